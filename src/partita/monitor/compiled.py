"""torch.compile and watching: a compiled graph calls no function that could be seen, so a watched model runs plainly.

Inside a `with` block torch.compile is off for the process; a handle without a block turns it off for the time of each
call of the compiled model it was given. Either way the graphs made before are kept, and serve again afterwards. What is
compiled beside a handle that knows only the plain model is traced past the watch: it runs as a graph and is not seen,
and the coverage says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

RAN_PLAINLY = "compiled, but run without torch.compile while watched"
NOT_SEEN = (
    "nothing was called while watched; the graphs of torch.compile are not seen: give the compiled model to watch, or "
    "use a `with` block"
)


def loaded() -> bool:
    """Somebody has used torch.compile: loading it takes seconds, so nobody else pays for it."""
    return "torch._dynamo" in sys.modules


class Off:
    """torch.compile is off from `on` to `off`; a second `on` does nothing.

    Where nobody has used it yet, torch.compile itself is wrapped until then, so that its first use turns it off.
    """

    def __init__(self) -> None:
        self._stance: Any = None
        self._before: Any = None
        self._wrapped: Any = None

    def on(self) -> None:
        if self._stance is not None or self._wrapped is not None:
            return
        if loaded():
            self._force()
            return
        before = self._before = torch.compile

        @functools.wraps(before)
        def first(*args: Any, **kwargs: Any) -> Any:
            made = before(*args, **kwargs)
            if self._wrapped is not None and self._stance is None:
                self._force()
            return made

        self._wrapped = first
        torch.compile = first

    def off(self) -> None:
        if self._wrapped is not None:
            if torch.compile is self._wrapped:
                torch.compile = self._before
            self._wrapped = None  # should somebody have wrapped it after us, it only passes on
        if self._stance is not None:
            stance, self._stance = self._stance, None
            stance.__exit__(None, None, None)

    def _force(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()


def compiled(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """(module, attribute) of every compiled callable: the shell of torch.compile(model), and model.compile()."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        if isinstance(inner.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            yield inner, "forward"
            inner = inner._orig_mod
        elif type(inner).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            inner = inner.module
        else:
            break
    for module in inner.modules():
        if module.__dict__.get("_compiled_call_impl") is not None:
            yield module, "_compiled_call_impl"


class Plain:
    """Stands in front of a compiled callable while its model is watched, and runs it without torch.compile."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.inner = module.__dict__[name]
        self.attached = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attached or torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        off = Off()
        off.on()
        try:
            return self.inner(*args, **kwargs)
        finally:
            off.off()

    def attach(self) -> None:
        self.attached = True
        self.module.__dict__[self.name] = self

    def detach(self) -> None:
        self.attached = False  # should somebody have wrapped it after us, it only passes on
        if self.module.__dict__.get(self.name) is self:
            self.module.__dict__[self.name] = self.inner
