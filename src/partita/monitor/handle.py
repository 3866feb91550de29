"""watch(model): a context manager and a handle that leaves the model as it found it."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from partita.monitor import compiled, outputs, probes, sites
from partita.monitor.findings import Thresholds
from partita.monitor.ledger import Ledger
from partita.monitor.provenance import provenance
from partita.monitor.reading import Coverage, Reading
from partita.monitor.record import Record, Site
from partita.monitor.seams import Seams, in_backward, sdpa_scores, self_padding
from partita.monitor.tally import Tally

log = logging.getLogger("partita.watch")
GOLDEN = 0.6180339887498949
SAMPLED = 8  # steps from one close look at a few rows to the next


class Watch(Reading):
    """Observes while it is attached: from construction until `detach`, or for the time of a `with` block.

    Losses called outside the model's forward are seen inside a `with` block only.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        rows: int | None = None,
        layers: Iterable[int | str] | int | str | None = None,
        maps: Sequence[tuple[int, int]] = (),
        sinks: Sequence[Any] = (),
        thresholds: Thresholds | dict[str, float] | None = None,
        title: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch takes a torch.nn.Module; got {type(model).__name__}.")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1; got {every!r}.")
        if rows is not None and (not isinstance(rows, int) or rows < 1):
            raise ValueError(f"rows must be None (every row) or a number of rows, at least 1; got {rows!r}.")
        self.model = sites.unwrap(model)
        self._plain = [compiled.Plain(module, name) for module, name in compiled.compiled(model)]
        self.every, self.rows, self.maps = every, rows, [tuple(m) for m in maps]
        self.layers = [layers] if isinstance(layers, (int, str)) else None if layers is None else list(layers)
        self.thresholds = thresholds if isinstance(thresholds, Thresholds) else Thresholds().with_(**(thresholds or {}))
        self.sinks = list(sinks)
        options = {"every": every, "rows": rows, "layers": self.layers, "maps": [list(m) for m in self.maps]}
        self.record = Record(provenance=provenance(self.model, options))
        if title:
            self.record.provenance["title"] = title
        self.observing = False
        self.step = -1
        self._manual = False
        self._attached = False
        self._fresh = True
        self._muted = 0
        self._stack: list[sites.Frame] = []
        self._outermost: set[int] = set()
        self._samples: dict[int, Tally] = {}
        self._ledger = Ledger(self.record, self.sinks)
        self._layer: dict[str, int] = {}
        self._module_seen: dict[str, int] = {}
        self._called: dict[str, int] = {}
        self._errors: dict[str, int] = {}
        self._watch_s = 0.0
        self._started: float | None = None
        self._ended = 0.0
        self._steps = self._observed = 0
        self._map_bytes = self._largest = 0
        self._thread = threading.get_ident()
        self._mode: Seams | None = None
        self._compile = compiled.Off()
        self._follows: list[sites.Follow] = []
        self.attach()

    # ---- on and off ------------------------------------------------------------------------------------------------

    def attach(self) -> Watch:
        """Start to follow the model; a second call does nothing."""
        if not self._attached:
            self._attached = True
            self._fresh = True  # whatever is called first begins a step
            self._follows = [sites.Follow(name, module, self._around) for name, module in sites.followed(self.model)]
            for follow in self._follows:
                follow.attach()
            for plain in self._plain:
                plain.attach()
        return self

    def detach(self) -> None:
        """Leave the model as it was found; what was recorded stays."""
        if self._attached:
            self._attached = False
            for plain in self._plain:
                plain.detach()
            for follow in reversed(self._follows):
                follow.detach()
            self._compile.off()
        self._flush()
        self.observing = False

    def __enter__(self) -> Watch:
        self.attach()
        self._compile.on()
        self._mode = Seams(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        mode, self._mode = self._mode, None
        self._stack.clear()
        try:
            if mode is not None:
                mode.__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self.detach()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def set_step(self, step: int) -> None:
        """Name the step; from now on forwards do not advance it (gradient accumulation, trainers)."""
        self._manual = True
        if step != self.step:
            self._next(step)

    def _next(self, step: int) -> None:
        self._close()
        self._outermost.clear()
        self.step = step
        self._steps += 1
        self.observing = step % self.every == 0
        self._observed += self.observing

    def _around(self, follow: sites.Follow, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._muted or not self._attached or in_backward() or threading.get_ident() != self._thread:
            return follow.inner(*args, **kwargs)
        begin = time.perf_counter()
        if self._started is None:
            self._started = begin
        if not self._stack:
            if not self._manual and (self._fresh or id(follow) in self._outermost):
                self._next(self.step + 1)
            elif self._manual and self._fresh and not self.observing:
                self._next(max(self.step, 0))  # attached again within a named step
            self._fresh = False
            self._outermost.add(id(follow))
        self._called[follow.name] = self._called.get(follow.name, 0) + 1
        self._stack.append(sites.frame(follow, kwargs))
        depth = len(self._stack)
        self._watch_s += time.perf_counter() - begin
        try:
            with self._seeing(follow, kwargs) as passed:
                if passed is not None:  # torch's nested fast path: its own result, then a second run to look at
                    out = passed(args, kwargs)
                    if self.observing:
                        spent, begin = self._watch_s, time.perf_counter()
                        follow.inner(*args, **kwargs)
                        self._watch_s = spent + time.perf_counter() - begin  # the whole second run is ours
                    return out
                return follow.inner(*args, **kwargs)
        finally:
            del self._stack[depth - 1 :]
            self._ended = time.perf_counter()

    @contextlib.contextmanager
    def _seeing(self, follow: sites.Follow, kwargs: dict[str, Any]) -> Iterator[Callable[..., Any] | None]:
        """The function mode is on for the outermost forward, unless the `with` block holds it already."""
        run = self._fast_path(follow, kwargs)
        if self._mode is not None or len(self._stack) > 1 or not self.observing:
            yield run
            return
        with Seams(self):
            yield run

    def _fast_path(self, follow: sites.Follow, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """nn.TransformerEncoder in eval mode zeroes padded outputs on a path that a function mode switches off."""
        module = follow.module
        if (
            not isinstance(module, nn.TransformerEncoder)
            or module.training
            or kwargs.get("src_key_padding_mask") is None
        ):
            return None

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._muted += 1
            try:
                with torch._C.DisableTorchFunction():
                    return follow.inner(*args, **kwargs)
            finally:
                self._muted -= 1

        return run

    # ---- what the seams report -------------------------------------------------------------------------------------

    def top(self) -> sites.Frame | None:
        return self._stack[-1] if self._stack else None

    def outside(self) -> bool:
        """Not inside the watched model, or not to be looked at."""
        return not self._stack or self._muted > 0 or threading.get_ident() != self._thread

    def guard(self, look: Callable[[], None]) -> None:
        """Observe without side effects: no graph, no autocast, no exception."""
        if self._muted or threading.get_ident() != self._thread or torch.compiler.is_compiling():
            return
        begin = time.perf_counter()
        try:
            with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(), _no_autocast():
                look()
        except Exception as error:  # watching never stops a run
            key = f"{type(error).__name__}: {str(error)[:200]}"
            self._errors[key] = self._errors.get(key, 0) + 1
            if self._errors[key] == 1:
                log.warning("a softmax could not be observed: %s", key)
        self._watch_s += time.perf_counter() - begin
        self._ended = time.perf_counter()

    def attend(
        self,
        kind: str,
        shape: Sequence[int],
        build: Callable[[], probes.Scores],
        cross: bool | None,
        stats: Any = None,
    ) -> None:
        """One attention call; `stats` are its rows' statistics where the call itself made them."""
        frame = self._stack[-1]
        frame.seen.append(None)
        ordinal = len(frame.seen) - 1
        bare = frame.follow.name or type(frame.follow.module).__name__
        name = bare if ordinal == 0 else f"{bare}#{ordinal}"
        self._module_seen[frame.follow.name] = self._module_seen.get(frame.follow.name, 0) + 1
        heads = shape[-3] if len(shape) > 3 else 1
        layer = self._layer.setdefault(name, len(self._layer))
        if layer == len(self.record.sites):
            self.record.sites.append(Site(name, kind, heads))
        if not self._chosen(layer, name):
            return
        call = build()
        crosses = cross if cross is not None else any(f.cross for f in self._stack[-2:])
        keep = sites.padding(self._stack, call.batch, call.n_query)
        if keep is None and not crosses:
            keep = self_padding(call)
        call = replace(call, keep=keep)
        tally = self._ledger.tallies.get(layer)
        if tally is None:
            tally = self._ledger.tallies[layer] = Tally(call.heads, _device(call), frame.follow.module.training)
        phase = (self._observed * GOLDEN) % 1.0 if self.rows else 0.5
        probes.measure(call, tally, rows=self.rows, phase=phase, stats=stats)
        count = self._observed
        if count % SAMPLED == 0 or layer not in self._samples:
            probes.look(call, tally)  # strongest keys and twins change slowly: the last sample stands in between
            self._samples[layer] = tally
            for where in self.maps:
                if where[0] == layer and where[1] < call.heads:
                    self._keep(self.record.maps, probes.pooled_map(call, where[1], self.step, layer), ("layer", "head"))
        else:
            tally.borrow(self._samples[layer])
        if count == 1 or count % 32 == 0 or (count >= 8 and count & (count - 1) == 0):
            self._keep(self.record.curves, probes.curve(call, self.step, layer), ("layer",))
        self._map_bytes += 4 * call.batch * call.heads * call.n_query * call.n_key

    def lose(self, name: str, numbers: outputs.Numbers | None) -> None:
        if numbers is None:
            return
        module = self._stack[-1].follow.name if self._stack else ""
        self._ledger.losses.setdefault(f"{name} ({module})" if module else name, []).append(numbers)

    def observe(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scale: float | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> None:
        """Report an attention that the seams cannot see (a custom kernel): call it inside the module's forward."""
        if self.observing and not self.outside():
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            self.guard(
                lambda: self.attend("observe", query.shape, lambda: sdpa_scores(query, key, mask, causal, scale), None)
            )

    def _chosen(self, layer: int, name: str) -> bool:
        return self.layers is None or any(layer == c if isinstance(c, int) else re.search(c, name) for c in self.layers)

    def _keep(self, rows: list[dict[str, Any]], row: dict[str, Any], keys: tuple[str, ...]) -> None:
        """The newest of its kind replaces the older one: memory stays O(layers x heads)."""
        rows[:] = [r for r in rows if any(r[k] != row[k] for k in keys)] + [row]

    def _close(self) -> None:
        """End the step."""
        begin = time.perf_counter()
        self._ledger.close(self.step)
        self._largest, self._map_bytes = max(self._largest, self._map_bytes), 0
        self._watch_s += time.perf_counter() - begin

    def _flush(self) -> None:
        self._close()
        begin = time.perf_counter()
        self._ledger.flush()
        self._watch_s += time.perf_counter() - begin

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def coverage(self) -> Coverage:
        """Which attention modules were observed, which were not, and why."""
        found = sites.coverage(self.model, self._module_seen, self._called)
        if self._plain:
            found["compiled"] = compiled.RAN_PLAINLY
            found["text"] += "; " + compiled.RAN_PLAINLY
        if compiled.loaded() and not self._called:
            found["text"] += "; " + compiled.NOT_SEEN
        if self._errors:
            found["errors"] = dict(self._errors)
            found["text"] += "; " + "; ".join(f"{n} calls could not be observed ({e})" for e, n in self._errors.items())
        return Coverage(found)

    @property
    def overhead(self) -> dict[str, Any]:
        """Measured: seconds inside watch, seconds in all, and their ratio."""
        elapsed = max(self._ended - self._started, 1e-9) if self._started is not None else 0.0
        outside = elapsed - self._watch_s
        kept = sum(8 * (len(b.values) + sum(len(v) for v in b.bands.values())) for b in self.record.blocks)
        return {
            "watch_s": self._watch_s,
            "elapsed_s": elapsed,
            "fraction": self._watch_s / outside if outside > 0 else None,
            "steps": self._steps,
            "observed_steps": self._observed,
            "record_bytes": kept,
            "map_bytes": max(self._largest, self._map_bytes),
        }

    def finished(self) -> Record:
        """The record with everything seen so far, coverage and overhead included."""
        self._flush()
        self.record.coverage, self.record.overhead = dict(self.coverage), self.overhead
        return self.record

    def __repr__(self) -> str:
        state = "attached" if self._attached else "detached"
        return f"<watch of {type(self.model).__name__}, {state}: {self._observed} steps, {self.coverage['short']}>"


def _device(call: probes.Scores) -> torch.device:
    first = call.query if call.scores is None else call.scores
    assert first is not None
    return first.device


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Statistics are float32 whatever the model runs in."""
    on = [
        d
        for d in ("cpu", "cuda", "mps", "xpu")
        if torch.amp.autocast_mode.is_autocast_available(d) and torch.is_autocast_enabled(d)
    ]
    with contextlib.ExitStack() as stack:
        for device in on:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
