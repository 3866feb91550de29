"""Public faces that a TorchFunctionMode can see, as it sees torch's own functions.

`partita.watch` observes a model this way, and so can other code; where no mode is active the cost is one C call. A
graph of torch.compile has no modes: there `TRACED.around`, where it is set, is traced around every face.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
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
            if TRACED.around is None:
                return function(*args, **kwargs)
            traced: R = TRACED.around(function, args, kwargs)
            return traced
        if torch._C._is_torch_function_mode_enabled():
            handled: R = handle_torch_function(call, (), *args, **kwargs)
            return handled
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised inside
                raise
            raise TypeError(f"{error}{nearest_name(str(error), function)}") from None

    return call


def nearest_name(message: str, function: Callable[..., Any]) -> str:
    """For an unexpected keyword argument, the name that may have been meant."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", message)
    known = list(inspect.signature(function).parameters)
    near = difflib.get_close_matches(unknown[1], known, 1, 0.5) if unknown else []
    return f". Did you mean {near[0]!r}?" if near else ""
