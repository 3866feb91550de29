"""What is recorded of a softmax or a loss that was seen, and how it is looked at: without any effect on the model.

Sums of the open step become rows of the record some steps later, of which a record of bounded size keeps an even share.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from partita.errors import PartitaError
from partita.monitor import measure
from partita.monitor.hooks import Frame, SoftmaxCall, is_attention, named_cross, padding
from partita.monitor.losses import Face, Numbers, finish
from partita.monitor.measure import Accumulator, blocks
from partita.monitor.options import Coverage, Options
from partita.monitor.record import COLUMNS, Block, Record, Site, keep_newest
from partita.monitor.scores import NoCloseLook, Scores, self_padding

log = logging.getLogger("partita.watch")
GOLDEN = 0.6180339887498949
SAMPLED = 8  # steps from one close look at a few rows to the next
AT_ONCE = 8  # steps whose sums are finished together: the many small operations cost no more than for one
_NONFINITE = list(COLUMNS).index("nonfinite")
Losses = dict[str, list[Numbers]]
Sums = dict[tuple[int, str], Accumulator]  # by layer and phase
Row = Block | dict[str, Any]  # of a layer, or of a loss
Of = tuple[int, str] | str  # layer and phase, or the name of a loss


class Observer:
    """Measures of the open step, those of a few steps that are over, and what was seen so far."""

    def __init__(self, record: Record, options: Options) -> None:
        self.record, self.options = record, options
        self.stack: list[Frame] = []  # modules of the model being called
        self.step = -1
        self.phase = ""  # of the call of the model being made
        self.count = 0  # observed steps
        self.layers: dict[str, int] = {}
        self.seen: set[str] = set()  # modules
        self.by_hand: dict[str, str] = {}
        self.errors: dict[str, int] = {}
        self.spent_s = 0.0
        self.ended = 0.0
        self.calls: dict[str, int] = {}  # softmaxes of a module in the forward being run
        self._sums: Sums = {}  # of the open step
        self._losses: Losses = {}
        self._closed: list[tuple[int, Sums, Losses]] = []
        self._kept = Thinning(record, options.keep)
        self._impossible: list[str] = []  # numbers that cannot be: our own faults
        self._failed: set[int] = set()  # sinks that were reported
        self._samples: Sums = {}
        self.map_bytes = 0  # what the attention maps of one step would have taken, at most
        self._map_bytes = 0  # of the open step

    def remarks(self, found: Coverage) -> list[str]:
        """What went wrong, or was excluded by an option, for the text of the coverage; details are added to it."""
        more = []
        if self.layers and not any(self.options.chosen(layer, name) for name, layer in self.layers.items()):
            more.append(f"nothing recorded: layers={self.options.layers!r} chose none of {len(self.layers)} layers")
        if self.errors:
            found["errors"] = dict(self.errors)
            more += [e if n == 1 else f"{e} ({n} times)" for e, n in self.errors.items()]
        if wrong := self._impossible:
            found["impossible"] = wrong[:20]
            more.append(f"a fault of partita: {len(wrong)} numbers that cannot be were left out")
        return more

    def guard(
        self, look: Callable[[], None], lost: str = "a softmax could not be observed", given: bool = False
    ) -> None:
        """Observe without side effects: no graph, no autocast, no exception. `lost`, `given`: see `reporting`."""
        begin = time.perf_counter()
        with self.reporting(lost, given), _aside():
            look()
        self.ended = time.perf_counter()
        self.spent_s += self.ended - begin

    @contextlib.contextmanager
    def reporting(self, lost: str, given: bool = False) -> Iterator[None]:
        """Watching never stops a run: an exception is counted for the coverage, and logged once.

        lost: what the record lacks because of it. given: the user wrote the arguments, so its message is for them;
        otherwise the fault is ours, and what it advises would be about a call that the user did not make.
        """
        try:
            yield
        except Exception as error:
            key = f"{lost}: {str(error)[:200] if given or isinstance(error, NoCloseLook) else _fault(error)}"
            self.errors[key] = self.errors.get(key, 0) + 1
            if self.errors[key] == 1:
                log.warning("%s", key)
                log.debug("the traceback of it", exc_info=True)

    def record_attention(self, event: SoftmaxCall | None) -> None:
        """One softmax, if it is attention; each further call of a module in one forward is a layer, name[1], ..."""
        if event is None:
            return
        top = event.module
        ordinal = self.calls.get(top.name, 0)
        self.calls[top.name] = ordinal + 1
        self.seen.add(top.name)
        name = (top.name or type(top.module).__name__) + (f"[{ordinal}]" if ordinal else "")
        layer = self.layers.setdefault(name, len(self.layers))
        if layer == len(self.record.sites):
            inside = [f for f in self.stack[-2:] if f.cross and is_attention("", type(f.module))]
            cross = bool(event.cross or named_cross(top.name) or inside)
            self.record.sites.append(Site(name, event.kind, event.heads, cross))
        if not self.options.chosen(layer, name):
            return
        call = event.canonical()
        keep = padding(self.stack, call.batch, call.n_query)
        crosses = any(f.cross for f in self.stack[-2:]) if event.cross is None else event.cross
        if keep is None and not crosses:
            keep = self_padding(call)
        if keep is not None:
            call = replace(call, keep=keep)
        place, sampled = (layer, self.phase), self.options.rows is not None
        sums = self._sums.get(place) or Accumulator(
            call.heads, call.first.device, top.module.training, self.phase, sampled
        )
        phase = (self.count * GOLDEN) % 1.0 if self.options.rows else 0.5
        measure.measure(call, sums, rows=self.options.rows, phase=phase, stats=event.statistics)
        self._sums[place] = sums
        self._look_closely(call, sums, layer, phase)
        self._map_bytes += 4 * call.batch * call.heads * call.n_query * call.n_key
        self.map_bytes = max(self.map_bytes, self._map_bytes)

    def _look_closely(self, call: Scores, sums: Accumulator, layer: int, phase: float) -> None:
        count, options = self.count, self.options
        # In training strongest keys and twins change slowly: the last sample stands in between. Inputs of a frozen
        # model have nothing to do with each other, but for the tokens of a text that is being generated.
        independent = not sums.training and call.n_query > 1
        if independent or count % SAMPLED == 0 or (layer, self.phase) not in self._samples:
            with self._closely("strongest keys and alike heads"):
                measure.look(call, sums)
                self._samples[layer, self.phase] = sums
            if options.critical:
                with self._closely("critical scale"):
                    measure.criticality(call, sums)
            if options.received:
                with self._closely("profile of what keys received"):
                    measure.receive(call, sums, rows=options.rows, phase=phase)
            for where in options.maps:
                if where[0] == layer and where[1] < call.heads:
                    with self._closely("map"):
                        row = measure.pooled_map(call, where[1], self.step, layer)
                        keep_newest(self.record.maps, row, "layer", "head")
        else:
            sums.borrow(self._samples[layer, self.phase])
        if count == 1 or count % 32 == 0 or (count >= 8 and count & (count - 1) == 0):
            with self._closely("temperature curve"):
                keep_newest(self.record.curves, measure.curve(call, self.step, layer), "layer")

    def _closely(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A close look that fails takes nothing else with it."""
        return self.reporting(f"the rows are recorded, but no {what}")

    def record_loss(self, face: Face, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One call of a loss, by what its face reads."""
        module = self.stack[-1].name if self.stack else ""
        name = f"{face.name} ({module})" if module else face.name
        self._losses.setdefault(name, []).append(face.read(*args, **kwargs))

    # ---- from sums to rows -------------------------------------------------------------------------------------------

    def close(self, *, flush: bool = False) -> None:
        """End the step; with sinks, or flush, all steps become rows at once."""
        begin = time.perf_counter()
        if self._sums or self._losses:
            self._closed.append((self.step, self._sums, self._losses))
            self._sums, self._losses = {}, {}
        if self.options.sinks or flush or len(self._closed) >= AT_ONCE:
            self._flush()
        self._map_bytes = 0
        self.spent_s += time.perf_counter() - begin

    def _flush(self) -> None:
        """Steps that are over become rows, and sinks are called, step by step."""
        closed, self._closed = self._closed, []
        try:
            with _aside():
                parts = [(step, layer, sums) for step, seen, _ in closed for (layer, _), sums in sorted(seen.items())]
                made = iter(blocks(parts, self._impossible))
                for step, seen, losses in closed:
                    here = [next(made) for _ in seen]
                    rows = [finish(numbers, step, name) for name, numbers in losses.items()]
                    self._close_looks(step, seen)
                    self._call_sinks(step, here, rows)
                    self._kept.add(here, rows)
        except Exception as error:  # watching never stops a run
            log.warning("steps up to %d could not be recorded: %s", closed[-1][0], error)

    def _close_looks(self, step: int, seen: Sums) -> None:
        for curve in self.record.curves:  # the strongest keys go with the temperature curve of their layer
            sums = next((s for (layer, _), s in sorted(seen.items()) if layer == curve["layer"]), None)
            if sums is not None and sums.keys is not None:
                curve["keys"] = [[[int(i), mass] for i, mass in head] for head in sums.keys.tolist()]
        for (layer, _), sums in sorted(seen.items()):
            if (row := sums.received.row(step, layer, self._impossible)) is not None:
                measure.keep_profile(self.record.received, row)

    def _call_sinks(self, step: int, here: list[Block], rows: list[dict[str, Any]]) -> None:
        for sink in self.options.sinks:
            try:
                sink(self.record, step, here, rows)
            except Exception as error:
                if id(sink) not in self._failed:
                    self._failed.add(id(sink))
                    log.warning("a sink failed at step %d and is not reported again: %s", step, error)

    def end(self) -> None:
        """Close the sinks that hold something open: nothing more comes for now."""
        for close in (getattr(sink, "close", None) for sink in self.options.sinks):
            try:
                if callable(close):
                    close()
            except Exception as error:
                log.warning("a sink could not be closed: %s", error)


def _fault(error: Exception) -> str:
    """An exception of ours, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if Path(f.filename).parent.name == "monitor"]
    message = "" if isinstance(error, PartitaError) else f": {str(error)[:200]}"
    return f"a fault of partita ({type(error).__name__} in monitor/{place[-1]}{message})"


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """No function mode, no graph, no inference mode, and float32 whatever the model runs in."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(), contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.amp.autocast_mode.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Thinning:
    """Adds rows to a record, of which the rows of `keep` steps stay, spread evenly; of all where it is None.

    Step s stays where frac(s * golden ratio) < 2^-level, and the level rises by one whenever there are too many. Such
    steps are evenly spaced and in phase with nothing: lengths in turn, or an evaluation at every second step, keep
    their shares. What stays is as it was measured, so that findings are those of the same run looked at less often.
    Only the count of rows that are not finite is carried over, to the step before that stays; the first such step of a
    layer or of a loss stays itself.
    """

    def __init__(self, record: Record, keep: int | None) -> None:
        self.record, self.keep = record, keep
        self._level = 0
        self._begin()

    def _begin(self) -> None:
        self._steps: set[int] = set()
        self._newest: dict[Of, Row] = {}  # that stayed
        self._sick: set[Of] = set()  # of these, those that were not finite at some step

    def add(self, here: Iterable[Block], losses: Iterable[dict[str, Any]]) -> None:
        new: list[Row] = [*here, *losses]
        for row in new:
            self._add(row)
        if self.keep is None or len(self._steps) <= self.keep:
            return
        while sum(map(self._stays, self._steps)) > self.keep:
            self._level += 1
        rows: list[Row] = [*self.record.blocks, *self.record.losses]
        self.record.blocks.clear()
        self.record.losses.clear()
        self._begin()
        for row in rows:
            self._add(row)

    def _stays(self, step: int) -> bool:
        return step * GOLDEN % 1.0 < 0.5**self._level

    def _add(self, row: Row) -> None:
        of: Of
        step, of = (
            (row.step, (row.layer, row.phase)) if isinstance(row, Block) else (int(row["step"]), str(row["name"]))
        )
        bad = _nonfinite(row)
        first = of not in self._newest or (any(bad) and of not in self._sick)
        if any(bad):
            self._sick.add(of)
        if not self._stays(step) and not first:
            if any(bad):
                _carry(bad, self._newest[of])
            return
        if self._stays(step):
            self._steps.add(step)
        self._newest[of] = row
        if isinstance(row, Block):
            self.record.blocks.append(row)
        else:
            self.record.losses.append(row)


def _nonfinite(row: Row) -> list[float]:
    """Rows that are not finite, of each head or of the loss."""
    counts = row.values[_NONFINITE :: len(COLUMNS)] if isinstance(row, Block) else [float(row.get("nonfinite") or 0)]
    return [count if count > 0 else 0.0 for count in counts]


def _carry(bad: list[float], to: Row) -> None:
    total = [a + b for a, b in zip(bad, _nonfinite(to), strict=True)]
    if isinstance(to, Block):
        to.values[_NONFINITE :: len(COLUMNS)] = array("d", total)
    else:
        to["nonfinite"] = int(total[0])
