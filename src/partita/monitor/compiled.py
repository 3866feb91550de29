"""torch.compile and watching: a compiled model stays compiled, into graphs that report.

For the time of a watched call the user's backend is given to torch.compile behind one that rewrites the graph
(`graphs.Instrumented`). torch.compile keeps the graphs of two backends apart, so those the user had before wait
untouched, and serve again afterwards. Modules are followed this way, compiled by torch.compile(model), model.compile()
or part by part. Of a compiled function nobody knows whether it calls the model: inside a `with` block functions run
without torch.compile, and beside a handle they are graphs that nobody sees.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from partita._overrides import TRACED
from partita.interception import Patch, Wrapper
from partita.monitor import traced
from partita.monitor.graphs import Instrumented

NOT_SEEN = (
    "nothing was called while watched; the graphs of a compiled function are not seen: compile the model instead, or "
    "use a `with` block, in which functions run without torch.compile"
)
# What of torch.compile's inside is used: it is nobody's promise, so another version may lack some of it.
NEEDED = {
    "torch._dynamo": ("allow_in_graph",),
    "torch._dynamo.eval_frame": ("_callback_from_stance", "skip_code"),
    "torch._dynamo.trace_rules": ("add", "check"),
}
SILENT = "graphs ran that do not report: the version of torch, or its stance, lets no backend be put before theirs"
SKIPPED = "compiled in place, which torch.compile does not do to a module of torch's own: run without it"
OURS = (
    "accumulator",
    "buffer",
    "compiled",
    "functions",
    "handle",
    "in_graph",
    "measure",
    "modules",
    "observer",
    "operator",
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

    @property
    def forced(self) -> bool:
        return self._stance is not None

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


def code_of(module: nn.Module) -> nn.Module | None:
    """The module whose code torch.compile runs when this one is called; None where it was not compiled.

    The one in the shell that torch.compile(model) made, or the module itself after model.compile() or model.forward =
    torch.compile(model.forward).
    """
    kept = module.__dict__
    inner = kept.get("_modules", {}).get("_orig_mod")
    if isinstance(inner, nn.Module):
        return inner
    if kept.get("_compiled_call_impl") is not None or hasattr(kept.get("forward"), "_torchdynamo_orig_callable"):
        return module
    return None


def missing() -> str | None:
    """Why graphs cannot be made to report, with this version of torch; None where they can."""
    for module, names in NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            return module
        for name in names:
            if not hasattr(found, name):
                return f"{module}.{name}"
    return None


def not_followed(what: str) -> str:
    return f"run without torch.compile, because torch {torch.__version__} has no {what}, which following graphs needs"


def skipped(module: nn.Module) -> bool:
    """Compiled in place, and of a class whose code torch.compile leaves alone then."""
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    return code_of(module) is module and bool(rules.check(type(module).forward))


class _Graphs:
    """torch.compile in this thread, for the time of one call: with graphs that report, or as it is."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._calls = 0
        self._callback: Patch | None = None

    @contextmanager
    def reporting(self, kernel: str, silent: Callable[[], None]) -> Iterator[None]:
        """Graphs made in this call report; `silent` is called where one cannot."""
        with self._lock:
            self._calls += 1
            TRACED.around = traced.around
        try:
            with self._through(lambda callback: self._instrumented(callback, kernel, silent)):
                yield
        finally:
            with self._lock:
                self._calls -= 1
                TRACED.around = traced.around if self._calls else None

    def off(self) -> AbstractContextManager[None]:
        """As if nothing had been compiled."""
        return self._through(lambda callback: None)

    def as_they_are(self) -> AbstractContextManager[None]:
        """For a module of somebody else's, inside a block too."""
        return self._through(lambda callback: callback)

    @contextmanager
    def _through(self, change: Callable[[Any], Any]) -> Iterator[None]:
        """Whatever is about to run in a frame of torch.compile is asked for here."""
        place: Any = importlib.import_module("torch._dynamo.eval_frame")
        if self._callback is None:
            importlib.import_module("torch._dynamo").allow_in_graph(traced.mark)
            rules: Any = importlib.import_module("torch._dynamo.trace_rules")
            for name in OURS:
                rules.add(f"partita.monitor.{name}")
            self._callback = Patch(place, "_callback_from_stance")
        # between two graphs modules are called one by one: what is compiled then is their code, and not ours around it
        MODULE_CALL.each(lambda call: place.skip_code(call.__code__))

        def around(inner: Callable[[Any], Any], callback: Any) -> Any:
            found = callback if EAGER.forced else inner(callback)
            return found if found in (None, False) else change(found)

        with self._callback.around(around):
            yield

    def _instrumented(self, callback: Any, kernel: str, silent: Callable[[], None]) -> Any:
        """The same with the user's backend behind ours; the same one every time, or each call would compile anew."""
        convert: Any = getattr(callback, "_torchdynamo_orig_backend", None)
        backend = getattr(convert, "_torchdynamo_orig_backend", None)
        if backend is None or not hasattr(convert, "_clone_with_backend") or not hasattr(callback, "hooks"):
            silent()  # a stance that defers compiling, or another version of torch
            return callback
        if isinstance(backend, Instrumented):
            return callback  # another watch was asked first
        known = self._known.setdefault(callback, {})
        if kernel not in known:
            behind = convert._clone_with_backend(Instrumented(backend, kernel))
            known[kernel] = type(callback)(behind, callback.hooks)
        return known[kernel]


GRAPHS = _Graphs()


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and DistributedDataParallel's shells."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__name__ in SHELLS:
            model = model.module  # type: ignore[assignment]
        else:
            return model
