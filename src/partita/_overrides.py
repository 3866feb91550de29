"""Public faces that a TorchFunctionMode can see, as it sees torch's own functions.

`partita.watch` observes a model this way, and so can anybody else; where no mode is active the cost is one C call. A
graph of torch.compile has no modes: there `TRACED.around`, where somebody has set it, is traced around every face.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import handle_torch_function

__all__ = ["TRACED", "overridable"]

P = ParamSpec("P")
R = TypeVar("R")


Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Traced:
    """around(function, args, kwargs) calls the function of a face, in code that torch.compile traces."""

    def __init__(self) -> None:
        self.around: Around | None = None


TRACED = _Traced()


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """Let an active TorchFunctionMode handle calls of this function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            if TRACED.around is not None:
                traced: R = TRACED.around(function, args, kwargs)
                return traced
        elif torch._C._is_torch_function_mode_enabled():
            handled: R = handle_torch_function(call, (), *args, **kwargs)
            return handled
        return function(*args, **kwargs)

    return call
