"""watch(model): a context manager and a handle that leaves the model, and torch, as it found them."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from partita.monitor import compiled
from partita.monitor.coverage import Coverage, coverage, expected
from partita.monitor.functions import FunctionMode, in_backward
from partita.monitor.in_graph import Graphs
from partita.monitor.live import LiveLine
from partita.monitor.modules import Roll, frame, takes_fast_path
from partita.monitor.observer import Observer
from partita.monitor.operator import listening
from partita.monitor.options import options
from partita.monitor.provenance import provenance
from partita.monitor.reading import Reading
from partita.monitor.record import Record
from partita.monitor.scores import sdpa_scores
from partita.monitor.updates import Updates

_REPLAY = threading.local()  # whose second run of a module this is: others have seen the first


class Watch(Reading):
    """Observes while it is attached: from construction until `detach`, or for the time of a `with` block.

    Made by `partita.watch`, whose arguments it takes.
    It sees the calls of the thread that attached it. A loss outside the model's forward is seen if it is a module; a
    plain function is seen inside a `with` block only.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        title: str | None = None,
        live: bool = False,
        **asked: Any,  # of `options`
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch takes a torch.nn.Module; got {type(model).__name__}.")
        inside = compiled.unwrap(model)
        self._roll = Roll(inside)
        self.options = options(inside, self._roll.names(), **asked)
        self.thresholds, self.kernel = self.options.thresholds, self.options.kernel
        if live:
            self.options.sinks.append(LiveLine(self.thresholds))
        self.model = inside
        self._expected = expected(inside)
        self.record = Record(provenance=provenance(inside, self.options.plain()))
        if title:
            self.record.provenance["title"] = title
        self.observer = Observer(self.record, self.options)
        self.observing = False
        self._manual = False
        self._attached: weakref.finalize[..., Watch] | None = None
        self._fresh = True
        self._muted = 0
        self._outermost: set[int] = set()
        self._enclosed: bool | None = None  # inside a module that is not the model's: has it called the model?
        self._learning = False  # it was called to be differentiated, whatever it does inside (cached gradients)
        self._called: dict[str, int] = {}
        self._elsewhere = 0
        self._skipped = False
        self._lacking: str | None = None
        self._started: float | None = None
        self._steps = 0
        self._thread = threading.get_ident()
        self._mode = FunctionMode(self)
        self._graphs = Graphs(self._mode, self._roll, self._called)
        self._updates = Updates(self._mode)
        self._block = False
        self.attach()

    @property
    def step(self) -> int:
        return self.observer.step

    # ---- on and off ------------------------------------------------------------------------------------------------

    def attach(self) -> Watch:
        """Start to follow the model; a second call does nothing."""
        if self._attached is None:
            self._thread = threading.get_ident()
            self._fresh = True  # whatever is called first begins a step
            self.observer.stack.clear()
            wrapper = compiled.MODULE_CALL.add(_weakly(self), everywhere=True)
            self._attached = weakref.finalize(self, compiled.MODULE_CALL.remove, wrapper)
        return self

    def detach(self) -> None:
        """Leave everything as it was found; what was recorded stays."""
        attached, self._attached = self._attached, None
        if attached is not None:
            attached()
        self.observer.flush()
        self.observing = False
        self.observer.buffer.end()

    def __enter__(self) -> Watch:
        self.attach()
        self.open()
        return self

    def __exit__(self, *error: Any) -> None:
        self.shut()
        self.detach()

    def open(self) -> None:
        """See what is called outside the model too, a loss above all, until `shut`: what a `with` block does."""
        self._thread = threading.get_ident()
        if not self._block:
            self._block = True
            compiled.EAGER.on()
            self._mode.on()
            self._updates.on()

    def shut(self) -> None:
        self.observer.stack.clear()
        if self._block:
            self._block = False
            self._updates.off()
            self._mode.off()
            compiled.EAGER.off()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def set_step(self, step: int | None) -> None:
        """Name the step; from now on forwards do not advance it (gradient accumulation, trainers).

        None: between steps, where nothing is looked at until the next one is named (a trainer that evaluates).
        """
        self._manual = True
        if step is None:
            self.observing = self._fresh = False
        elif step != self.step:
            self._next(step)
        else:
            self.observing = step % self.options.every == 0

    def _next(self, step: int) -> None:
        self.observer.close()
        self._outermost.clear()
        self.observer.step = step
        self._steps += 1
        self.observing = step % self.options.every == 0
        self.observer.count += self.observing

    def _begin(self, module: nn.Module) -> None:
        """A call of the model, or of a part of it, from outside: a step, unless a loss calls the model once more."""
        again = self._enclosed is True and self._learning and self.step >= 0
        if not self._manual and not again and (self._fresh or id(module) in self._outermost):
            self._next(self.step + 1)
        elif self._manual and self._fresh and not self.observing:
            self._next(max(self.step, 0))  # attached again within a named step
        self._fresh = False
        self._outermost.add(id(module))
        self.observer.begin_forward()
        if self._enclosed is not None:
            self._enclosed = True

    def called(
        self, inner: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Every call of every module passes here while the watch is attached."""
        if self._muted or in_backward() or getattr(_REPLAY, "owner", self) is not self:
            return inner(module, *args, **kwargs)
        if threading.get_ident() != self._thread:
            self._elsewhere += self._roll.name(module) is not None
            return inner(module, *args, **kwargs)
        self._updates.resume()
        code, name = compiled.code_of(module), self._roll.name(module)
        if code is not None and (lacking := compiled.missing()) is not None:
            return self._without_graphs(lacking, name, inner, module, args, kwargs)
        if code is not None and (name is None or not compiled.skipped(module)):
            with self._mode.without():
                return self._call_graphs(code, inner, module, args, kwargs)
        if name is None:
            with self._beside():
                return self._pass_by(inner, module, args, kwargs)
        self._skipped = self._skipped or code is not None
        with contextlib.nullcontext() if code is None else compiled.GRAPHS.off():
            return self._follow(name, module, lambda: self._plainly(name, inner, module, args, kwargs))

    def _without_graphs(
        self, lacking: str, name: str | None, inner: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """A compiled module, with a torch whose graphs cannot be made to report: seen as if nobody had compiled it."""
        if name is None and all(part is not self.model for part in module.modules()):
            return self._pass_by(inner, module, args, kwargs)
        self._lacking = lacking
        with torch.compiler.set_stance("force_eager"):
            if name is None:
                return self._pass_by(inner, module, args, kwargs)
            return self._follow(name, module, lambda: self._plainly(name, inner, module, args, kwargs))

    def _call_graphs(
        self, code: nn.Module, inner: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """A compiled module; one of somebody else's may hold ours."""
        name = self._roll.name(code)
        if name is None and all(part is not self.model for part in code.modules()):
            with compiled.GRAPHS.as_they_are():
                return self._pass_by(inner, module, args, kwargs)

        kernel = self.kernel if self.options.rows is None and self.options.layers is None else "own"

        def call() -> Any:
            first = () if name is None and self.observer.stack else (frame(name or "", code, kwargs, args),)
            self.observer.stack.extend(first)
            with listening(self._graphs), compiled.GRAPHS.reporting(kernel, self._graphs.pass_over):
                return inner(module, *args, **kwargs)

        return self._follow(name or "", code if name is not None else self.model, call)

    def _follow(self, name: str, module: nn.Module, call: Callable[[], Any]) -> Any:
        """A call of the model or of a part of it; the outermost one may begin a step."""
        begin = time.perf_counter()
        if self._started is None:
            self._started = begin
        if not self.observer.stack:
            self._begin(module)
        self._called[name] = self._called.get(name, 0) + 1
        depth = len(self.observer.stack)
        self.observer.spent_s += time.perf_counter() - begin
        try:
            return call()
        finally:
            del self.observer.stack[depth:]
            self.observer.ended = time.perf_counter()

    def _plainly(
        self, name: str, inner: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if takes_fast_path(module) and not hasattr(_REPLAY, "owner"):
            return self._run_twice(name, inner, module, args, kwargs)
        self.observer.stack.append(frame(name, module, kwargs, args))
        with self._listen():
            return inner(module, *args, **kwargs)

    def _pass_by(self, inner: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Somebody else's module: a loss, perhaps, that calls the model; its own fast paths stay open."""
        quiet = self._mode.without() if self._block and takes_fast_path(module) else contextlib.nullcontext()
        outermost = not self.observer.stack and self._enclosed is None
        if outermost:
            self._enclosed, self._learning = False, torch.is_grad_enabled()
        try:
            with quiet:
                return inner(module, *args, **kwargs)
        finally:
            if outermost:
                self._enclosed = None

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Somebody else's module may be the loss: it is listened to like the model, where no `with` block does."""
        wanted = self.observing or (not self._manual and (self.step + 1) % self.options.every == 0)
        if self._block or self.observer.stack or not wanted:
            yield
            return
        self._block = True
        self._mode.on()
        try:
            yield
        finally:
            self._block = False
            self._mode.off()

    def _run_twice(
        self, name: str, inner: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """torch's fast path gives the result; a second run, on the slow one, is looked at."""
        self._muted += 1
        try:
            with self._mode.without():
                out = inner(module, *args, **kwargs)
        finally:
            self._muted -= 1
        if self.observing:
            spent, begin = self.observer.spent_s, time.perf_counter()
            self.observer.stack.append(frame(name, module, kwargs, args))
            _REPLAY.owner = self
            try:
                with self._listen():
                    module.forward(*args, **kwargs)
            finally:
                del _REPLAY.owner
            self.observer.spent_s = spent + time.perf_counter() - begin  # the whole second run is ours
        return out

    @contextlib.contextmanager
    def _listen(self) -> Iterator[None]:
        """The function mode is on for the outermost forward, unless the `with` block holds it already."""
        if self._block or len(self.observer.stack) > 1 or not self.observing:
            yield
            return
        self._mode.on()
        try:
            yield
        finally:
            self._mode.off()

    # ---- what the function mode reports ------------------------------------------------------------------------------

    def listening(self) -> bool:
        return self.observing and not self._muted and getattr(_REPLAY, "owner", self) is self

    def outside(self) -> bool:
        """Not inside the watched model, or not to be looked at."""
        return not self.observer.stack or self._muted > 0 or threading.get_ident() != self._thread

    def guard(self, look: Callable[[], None]) -> None:
        if not self._muted and threading.get_ident() == self._thread and not torch.compiler.is_compiling():
            self.observer.guard(look)

    def guard_inside(self, look: Callable[[], None]) -> None:
        """The same for a softmax: one outside the watched model is none of ours."""
        if not self.outside():
            self.guard(look)

    def observe(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scale: float | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> None:
        """Report an attention that nothing shows (a custom kernel): call it inside the module's forward."""
        if self.listening():
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            self.guard_inside(
                lambda: self.observer.attend(
                    "observe", query.shape, lambda: sdpa_scores(query, key, mask, causal, scale), None
                )
            )

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def coverage(self) -> Coverage:
        """Which attention modules were observed, which were not, and why."""
        found = coverage(self._expected, self.observer.seen, self._called, self.observer.by_hand)
        more = []
        if self._skipped:
            more.append(compiled.SKIPPED)
        if self._lacking is not None:
            more.append(compiled.not_followed(self._lacking))
        more += self._graphs.remarks(found, self.observer.seen)
        if compiled.loaded() and not self._called:
            more.append(compiled.NOT_SEEN)
        if self._elsewhere:
            more.append(f"{self._elsewhere} calls in other threads were not seen")
        more += self.observer.remarks(found)
        found["text"] = "; ".join([found["text"], *more])
        return found

    @property
    def overhead(self) -> dict[str, Any]:
        """Measured: seconds inside watch, seconds in all, and their ratio."""
        elapsed = max(self.observer.ended - self._started, 1e-9) if self._started is not None else 0.0
        outside = elapsed - self.observer.spent_s
        kept = sum(8 * (len(b.values) + sum(len(v) for v in b.bands.values())) for b in self.record.blocks)
        return {
            "watch_s": self.observer.spent_s,
            "elapsed_s": elapsed,
            "fraction": self.observer.spent_s / outside if outside > 0 else None,
            "steps": self._steps,
            "observed_steps": self.observer.count,
            "record_bytes": kept,
            "map_bytes": self.observer.map_bytes,
        }

    def finished(self) -> Record:
        """The record with everything seen so far, coverage and overhead included."""
        self.observer.flush()
        self.record.coverage, self.record.overhead = dict(self.coverage), self.overhead
        return self.record

    def __repr__(self) -> str:
        state = "detached" if self._attached is None else "attached"
        title = self.record.provenance.get("model", "a model")
        return f"<watch of {title}, {state}: {self.observer.count} steps, {self.coverage['short']}>"


def _weakly(watch: Watch) -> Callable[..., Any]:
    """Its way into every call. A handle that nobody holds ends, and lets its model go, unless a sink listens."""
    own, listens = weakref.ref(watch), watch if watch.options.sinks else None

    def around(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = listens or own()
        return inner(module, *args, **kwargs) if found is None else found.called(inner, module, args, kwargs)

    return around
