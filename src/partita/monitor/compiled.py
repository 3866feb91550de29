"""torch.compile and watching: a compiled graph calls no function that could be seen, so a watched model runs plainly.

Inside a `with` block torch.compile is off for the process; a handle without a block turns it off for the time of each
call of the compiled model it was given. Either way the graphs made before are kept, and serve again afterwards. What is
compiled beside a handle that knows only the plain model is traced past the watch: it runs as a graph and is not seen,
and the coverage says so.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from partita.interception import Patch, Wrapper

RAN_PLAINLY = "compiled, but run without torch.compile while watched"
NOT_SEEN = (
    "nothing was called while watched; the graphs of torch.compile are not seen: give the compiled model to watch, or "
    "use a `with` block"
)
MODULE_CALL = Patch(nn.Module, "__call__")
_COMPILE = Patch(torch, "compile")
SHELLS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def loaded() -> bool:
    """Somebody has used torch.compile: loading it takes seconds, so nobody else pays for it."""
    return "torch._dynamo" in sys.modules


class _Eager:
    """torch.compile is off while anybody asks for it: the first to ask sets the stance, the last to leave restores it.

    Where nobody has used torch.compile yet, it is wrapped until then, so that its first use turns it off.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wanted = 0
        self._stance: Any = None
        self._wrapper: Wrapper | None = None

    def on(self) -> None:
        with self._lock:
            self._wanted += 1
            if self._wanted > 1:
                return
            if loaded():
                self._force()
            else:
                self._wrapper = _COMPILE.add(self._first, everywhere=True)

    def off(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted:
                return
            if self._wrapper is not None:
                _COMPILE.remove(self._wrapper)
                self._wrapper = None
            if self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)

    @contextmanager
    def block(self) -> Iterator[None]:
        self.on()
        try:
            yield
        finally:
            self.off()

    def _first(self, compile_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not loaded():
            with MODULE_CALL.lifted():  # it remembers nn.Module.__call__ as it finds it
                importlib.import_module("torch._dynamo")
        with self._lock:
            if self._wanted and self._stance is None:
                self._force()
        return compile_(*args, **kwargs)

    def _force(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()


EAGER = _Eager()


def compiled(model: nn.Module) -> Iterator[nn.Module]:
    """Every module that torch.compile made or runs: the shell of torch.compile(model), and model.compile()."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        if isinstance(inner.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            yield inner
            inner = inner._orig_mod
        elif type(inner).__name__ in SHELLS:
            inner = inner.module
        else:
            break
    for module in inner.modules():
        if module.__dict__.get("_compiled_call_impl") is not None:
            yield module


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and DistributedDataParallel's shells."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__name__ in SHELLS:
            model = model.module  # type: ignore[assignment]
        else:
            return model
