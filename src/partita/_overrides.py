"""Public faces that a TorchFunctionMode can see, as it sees torch's own functions.

`partita.watch` observes a model this way, and so can anybody else; where no mode is active the cost is one C call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import handle_torch_function

__all__ = ["overridable"]

P = ParamSpec("P")
R = TypeVar("R")


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """Let an active TorchFunctionMode handle calls of this function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling() and torch._C._is_torch_function_mode_enabled():
            handled: R = handle_torch_function(call, (), *args, **kwargs)
            return handled
        return function(*args, **kwargs)

    return call
