"""watch(model): a context manager and a handle that leaves the model, and torch, as it found them."""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partita.distributed import gather_bytes
from partita.monitor import compiled, hooks
from partita.monitor.hooks import Call, FunctionMode, ModuleNames, SoftmaxCall, Subscriber
from partita.monitor.loading import read_record
from partita.monitor.losses import Face
from partita.monitor.observer import Observer
from partita.monitor.options import Coverage, Options, coverage, expected, provenance, whole_step
from partita.monitor.record import Readings, Record, merge_records
from partita.monitor.scores import sdpa_scores
from partita.monitor.sinks import LiveLine

_REPLAY = threading.local()  # whose second run of a module this is: others have seen the first


class Watch(Readings, Subscriber):
    """Observes while it is attached: from construction until `detach`, or for the time of a `with` block.

    Made by `partita.watch`, whose arguments it takes.
    It sees the calls of the thread that attached it. A loss outside the model's forward is seen if it is a module; a
    plain function is seen inside a `with` block only, also before the model is called.
    """

    grouped = False  # keys of other ranks, which may not be watched

    def __init__(self, model: nn.Module, *, title: str | None = None, live: bool = False, **given: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch takes a torch.nn.Module; got {type(model).__name__}.")
        self.model = inside = compiled.unwrap(model)
        self._names = ModuleNames(inside)
        self.leaves = self._names.leaves
        self.options = Options(inside, self._names.names(), **given)
        self.thresholds, self.kernel = self.options.thresholds, self.options.kernel
        self._whole = self.options.rows is None and self.options.layers is None  # every row of every layer
        if live:
            self.options.sinks.append(LiveLine(self.thresholds))
        self._expected = expected(inside)
        self.record = Record(provenance=provenance(inside, self.options.plain()))
        if title:
            self.record.provenance["title"] = title
        self.observer = Observer(self.record, self.options)
        self.stack = self.observer.stack
        self.observing = self._chosen = False
        self._manual = False
        self._attached: weakref.finalize[..., Watch] | None = None
        self._fresh = True
        self._muted = 0
        self._outermost: set[int] = set()
        self._enclosed: bool | None = None  # inside a module that is not the model's: has it called the model?
        self._learning = False  # it was called with gradients, whatever it does inside (cached gradients)
        self._called: dict[str, int] = {}
        self._elsewhere = 0
        self._plain: dict[str, None] = {}  # why something compiled ran without torch.compile
        self._started: float | None = None
        self._steps = 0
        self._thread = threading.get_ident()
        self._mode = FunctionMode(self)
        self._graphs = compiled.Graphs(self, self._mode, self._names, self._called)
        self._block = False
        self.attach()

    @property
    def step(self) -> int:
        return self.observer.step

    # ---- on and off --------------------------------------------------------------------------------------------------

    def attach(self) -> Watch:
        """Start to follow the model; a second call does nothing."""
        if self._attached is None:
            self._thread = threading.get_ident()
            self._fresh = True  # whatever is called first begins a step
            self.stack.clear()
            # without a reference to it a handle ends, and lets its model go, unless it has sinks
            self._attached = hooks.follow(self, kept=bool(self.options.sinks))
        return self

    def detach(self) -> None:
        """Leave everything as it was found; what was recorded stays."""
        attached, self._attached = self._attached, None
        if attached is not None:
            attached()
        self.observer.close(flush=True)
        self.observing = False
        self.observer.end()

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
            self._mode.open()

    def shut(self) -> None:
        self.stack.clear()
        if self._block:
            self._block = False
            self._mode.shut()
            compiled.EAGER.off()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def set_step(self, step: int | None) -> None:
        """Name the step; from now on forwards do not advance it (gradient accumulation, trainers).

        None: between steps, where nothing is looked at until the next one is named (a trainer that evaluates).
        """
        step = None if step is None else whole_step(step)
        self._manual = True
        if step is None:
            self.observing = self._fresh = False
        elif step != self.step:
            self._next(step)
        else:
            self.observing = self._chosen

    def _affordable(self) -> bool:
        """Whether the time spent so far leaves room for another step."""
        budget, spent = self.options.budget, self.observer.spent_s
        return (
            budget is None or self._started is None or spent <= budget * (time.perf_counter() - self._started - spent)
        )

    def _next(self, step: int) -> None:
        self.observer.close()
        self._outermost.clear()
        self.observer.step = step
        self._steps += 1
        self._chosen = self.observing = step % self.options.every == 0 and self._affordable()
        self.observer.count += self.observing

    def begin(self) -> None:
        """Whatever is called first begins a step: the model, or a loss."""
        if not self._fresh or self._muted or threading.get_ident() != self._thread:
            return
        if not self._manual:
            self._next(self.step + 1)
        elif not self.observing:
            self._next(max(self.step, 0))  # attached again within a named step
        self._fresh = False

    def _begin(self, module: nn.Module) -> None:
        """A call of the model, or of a part of it, from outside: a step, unless a loss calls the model once more."""
        again = self._enclosed is True and self._learning and self.step >= 0
        if self._fresh:
            self.begin()
        elif not self._manual and not again and id(module) in self._outermost:
            self._next(self.step + 1)
        self._outermost.add(id(module))
        self.observer.calls.clear()
        if self._enclosed is not None:
            self._enclosed = True

    # ---- calls of modules --------------------------------------------------------------------------------------------

    def called(self, call: Call) -> Any:
        """Every call of every module, but for torch's leaves inside the model, while the watch is attached."""
        if self._muted or hooks.in_backward() or getattr(_REPLAY, "owner", self) is not self:
            return call()
        module, name = call.module, self._names.name(call.module)
        if threading.get_ident() != self._thread:
            self._elsewhere += name is not None
            return call()
        if self._mode.suspended is not None:
            self._mode.resume()
        if (code := compiled.code_of(module)) is not None:
            return self._compiled(code, name, call)
        if name is None:
            return self._foreign_with_mode(call)
        return self._tracked(name, module, self._eager, name, call)

    def _compiled(self, code: nn.Module, name: str | None, call: Call) -> Any:
        """A module that torch.compile runs: as graphs that report, or as if it had not been compiled."""
        module, lacking = call.module, compiled.missing()
        if lacking is None and (name is None or not compiled.skipped(module)):
            with self._mode.without():
                return self._call_graphs(code, call)
        if lacking is not None and name is None and not _holds(module, self.model):
            return self._foreign(call)
        self._plain[lacking or compiled.SKIPPED] = None
        with compiled.GRAPHS.off() if lacking is None else torch.compiler.set_stance("force_eager"):
            return self._foreign(call) if name is None else self._tracked(name, module, self._eager, name, call)

    def _call_graphs(self, code: nn.Module, call: Call) -> Any:
        """A compiled module; one that is not the model's may hold it."""
        name = self._names.name(code)
        if name is None and not _holds(code, self.model):
            with compiled.GRAPHS.as_they_are():
                return self._foreign(call)
        kernel = self.kernel if self._whole else "own"

        def run() -> Any:
            if not self.stack:
                self.observer.phase = hooks.phase_of(code, call.kwargs)
            if name is not None or not self.stack:
                self.stack.append(hooks.frame(name or "", code, call))
            with compiled.GRAPHS.reporting(kernel, self._graphs):
                return call()

        return self._tracked(name or "", code if name is not None else self.model, run)

    def _tracked(self, name: str, module: nn.Module, call: Callable[..., Any], *given: Any) -> Any:
        """A call of the model or of a part of it; the outermost one may begin a step.

        No context manager: one that is entered between two graphs of torch.compile would be compiled with them.
        """
        begin = time.perf_counter()
        if self._started is None:
            self._started = begin
        if not self.stack:
            self._begin(module)
        self._called[name] = self._called.get(name, 0) + 1
        depth = len(self.stack)
        self.observer.spent_s += time.perf_counter() - begin
        try:
            return call(*given)
        finally:
            del self.stack[depth:]
            self.observer.ended = time.perf_counter()

    def _eager(self, name: str, call: Call) -> Any:
        module = call.module
        if hooks.takes_fast_path(module) and not hasattr(_REPLAY, "owner"):
            return self._run_twice(name, call)
        outermost = not self.stack
        if outermost:
            self.observer.phase = hooks.phase_of(module, call.kwargs)
        self.stack.append(hooks.frame(name, module, call))
        if self._block or not outermost or not self.observing:  # the mode is on already, or not wanted
            return call()
        with self._mode.during():
            return call()

    def _run_twice(self, name: str, call: Call) -> Any:
        """torch's fast path gives the result; a second run, on the slow one, is looked at."""
        self._muted += 1
        try:
            with self._mode.without():
                out = call()
        finally:
            self._muted -= 1
        if self.observing:
            spent, begin = self.observer.spent_s, time.perf_counter()
            _REPLAY.owner = self
            try:
                self._eager(name, call._replace(inner=type(call.module).forward))
            finally:
                del _REPLAY.owner
            self.observer.spent_s = spent + time.perf_counter() - begin  # the whole second run is ours
        return out

    def _foreign(self, call: Call) -> Any:
        """A module that is not the model's: a loss, perhaps, that calls the model; its own fast paths stay open."""
        quiet = self._mode.without() if self._block and hooks.takes_fast_path(call.module) else contextlib.nullcontext()
        outermost = not self.stack and self._enclosed is None
        if outermost:
            self._enclosed, self._learning = False, torch.is_grad_enabled()
        try:
            with quiet:
                return call()
        finally:
            if outermost:
                self._enclosed = None

    def _foreign_with_mode(self, call: Call) -> Any:
        """It may be the loss: its functions are seen like the model's, also without a `with` block."""
        wanted = self.observing or (not self._manual and (self.step + 1) % self.options.every == 0)
        if self._block or self.stack or not wanted:
            return self._foreign(call)
        self._block = True
        try:
            with self._mode.during():
                return self._foreign(call)
        finally:
            self._block = False

    # ---- events ------------------------------------------------------------------------------------------------------

    def listening(self) -> bool:
        return self.observing and not self._muted and getattr(_REPLAY, "owner", self) is self

    def outside(self) -> bool:
        """Not inside the watched model, or not to be looked at."""
        return not self.stack or self._muted > 0 or threading.get_ident() != self._thread

    def serve(self, call: dict[str, Any]) -> tuple[Tensor, Any] | None:
        return (
            hooks.serve(call, plain=True) if self.kernel == "partita" and self._whole and not self.outside() else None
        )

    def softmax(self, make: Callable[[], SoftmaxCall | None]) -> None:
        if not self.outside():
            self.observer.guard(lambda: self.observer.record_attention(make()))

    def loss(self, face: Face, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.observer.guard(lambda: self.observer.record_loss(face, args, kwargs), f"{face.name} was not recorded")

    def passed_over(self) -> None:
        top = self.stack[-1]
        self.observer.by_hand[top.name] = type(top.module).__name__

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

        def look() -> None:
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            build = functools.partial(sdpa_scores, query, key, mask, causal, factor)
            self.observer.record_attention(SoftmaxCall("observe", self.stack[-1], build, query, key, mask, factor))

        if self.listening() and not self.outside() and not torch.compiler.is_compiling():
            self.observer.guard(look, "what observe(query, key) was given could not be observed", True)

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def coverage(self) -> Coverage:
        """Which attention modules were observed, which were not, and why."""
        found = coverage(self._expected, self.observer.seen, self._called, self.observer.by_hand)
        more = [*self._plain, *self._graphs.remarks(found, self.observer.seen)]
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
        self.observer.close(flush=True)
        self.record.coverage, self.record.overhead = dict(self.coverage), self.overhead
        return self.record

    def gather(self, group: Any = None) -> Record:
        """The records of all ranks as one, on every rank: a collective, to be called on all, outside the step."""
        mine = self.finished()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return mine
        sent = "".join(mine.lines()).encode()
        parts = gather_bytes(sent, torch.distributed.group.WORLD if group is None else group)
        # text, read like any file: it cannot run anything here, as a pickle could
        return merge_records([read_record(io.StringIO(part.decode()), "a record of another rank") for part in parts])

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        state = "detached" if self._attached is None else "attached"
        title = self.record.provenance.get("model", "a model")
        return f"<watch of {title}, {state}: {self.observer.count} steps, {self.coverage['short']}>"


def _holds(outer: nn.Module, model: nn.Module) -> bool:
    return any(part is model for part in outer.modules())
