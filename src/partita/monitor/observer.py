"""What is recorded of a softmax or a loss that was seen, and how it is looked at: without any effect on the model."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from partita.monitor import measure
from partita.monitor.accumulator import Accumulator
from partita.monitor.buffer import StepBuffer
from partita.monitor.coverage import Coverage
from partita.monitor.losses import Numbers
from partita.monitor.modules import Frame, is_attention, named_cross, padding
from partita.monitor.options import Options
from partita.monitor.record import Record, Site, keep_newest
from partita.monitor.scores import Scores, self_padding

log = logging.getLogger("partita.watch")
GOLDEN = 0.6180339887498949
SAMPLED = 8  # steps from one close look at a few rows to the next


class Observer:
    """Measures of the open step, and what was seen so far."""

    def __init__(self, record: Record, options: Options) -> None:
        self.record, self.options = record, options
        self.buffer = StepBuffer(record, options.sinks)
        self.stack: list[Frame] = []  # modules of the model being called
        self.step = -1
        self.count = 0  # observed steps
        self.layers: dict[str, int] = {}
        self.seen: set[str] = set()  # modules
        self.by_hand: dict[str, str] = {}
        self.errors: dict[str, int] = {}
        self.spent_s = 0.0
        self.ended = 0.0
        self._calls: dict[str, int] = {}  # softmaxes of a module in the forward being run
        self._samples: dict[int, Accumulator] = {}
        self._map_bytes = self._largest = 0

    @property
    def map_bytes(self) -> int:
        """What the attention maps of one step would have taken."""
        return max(self._largest, self._map_bytes)

    def remarks(self, found: Coverage) -> list[str]:
        """What went wrong, or was not asked for, beside the coverage; details are added to it."""
        more = []
        if self.layers and not any(self.options.chosen(layer, name) for name, layer in self.layers.items()):
            more.append(f"nothing recorded: layers={self.options.layers!r} chose none of {len(self.layers)} layers")
        if self.errors:
            found["errors"] = dict(self.errors)
            more += [f"{n} calls could not be observed ({e})" for e, n in self.errors.items()]
        if wrong := self.buffer.impossible:
            found["impossible"] = [str(one) for one in wrong[:20]]
            more.append(f"a fault of partita: {len(wrong)} numbers that cannot be were left out")
        return more

    def begin_forward(self) -> None:
        self._calls.clear()

    def guard(self, look: Callable[[], None]) -> None:
        """Observe without side effects: no graph, no autocast, no exception."""
        begin = time.perf_counter()
        try:
            with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(), _no_autocast():
                look()
        except Exception as error:  # watching never stops a run
            key = f"{type(error).__name__}: {str(error)[:200]}"
            self.errors[key] = self.errors.get(key, 0) + 1
            if self.errors[key] == 1:
                log.warning("a softmax could not be observed: %s", key)
        self.spent_s += time.perf_counter() - begin
        self.ended = time.perf_counter()

    def attend(
        self, kind: str, shape: Sequence[int], build: Callable[[], Scores], cross: bool | None, stats: Any = None
    ) -> None:
        """One softmax; `stats` are its rows' statistics where the call itself made them.

        A module that is called several times in one forward is as many layers: name, name[1], name[2], ...
        """
        top = self.stack[-1]
        ordinal = self._calls.get(top.name, 0)
        self._calls[top.name] = ordinal + 1
        self.seen.add(top.name)
        name = top.title if ordinal == 0 else f"{top.title}[{ordinal}]"
        layer = self.layers.setdefault(name, len(self.layers))
        crosses = cross if cross is not None else any(f.cross for f in self.stack[-2:])
        if layer == len(self.record.sites):
            apart = (
                cross or named_cross(top.name) or any(f.cross for f in self.stack[-2:] if is_attention("", f.module))
            )
            self.record.sites.append(Site(name, kind, shape[-3] if len(shape) > 3 else 1, bool(apart)))
        if not self.options.chosen(layer, name):
            return
        call = build()
        keep = padding(self.stack, call.batch, call.n_query)
        if keep is None and not crosses:
            keep = self_padding(call)
        call = replace(call, keep=keep)
        sums = self.buffer.sums.get(layer)
        if sums is None:
            sums = self.buffer.sums[layer] = Accumulator(call.heads, call.first.device, top.module.training)
        phase = (self.count * GOLDEN) % 1.0 if self.options.rows else 0.5
        measure.measure(call, sums, rows=self.options.rows, phase=phase, stats=stats)
        self._look_closely(call, sums, layer, phase)
        self._map_bytes += 4 * call.batch * call.heads * call.n_query * call.n_key

    def _look_closely(self, call: Scores, sums: Accumulator, layer: int, phase: float) -> None:
        count = self.count
        # In training strongest keys and twins change slowly: the last sample stands in between. Inputs of a frozen
        # model have nothing to do with each other, but for the tokens of a text that is being generated.
        apart = not sums.training and call.n_query > 1
        if apart or count % SAMPLED == 0 or layer not in self._samples:
            measure.look(call, sums)
            self._samples[layer] = sums
            if self.options.critical:
                measure.criticality(call, sums)
            if self.options.received:
                measure.receive(call, sums, rows=self.options.rows, phase=phase)
            for where in self.options.maps:
                if where[0] == layer and where[1] < call.heads:
                    row = measure.pooled_map(call, where[1], self.step, layer)
                    keep_newest(self.record.maps, row, "layer", "head")
        else:
            sums.borrow(self._samples[layer])
        if count == 1 or count % 32 == 0 or (count >= 8 and count & (count - 1) == 0):
            keep_newest(self.record.curves, measure.curve(call, self.step, layer), "layer")

    def passed_over(self) -> None:
        """The module being called holds attention that was not recorded."""
        top = self.stack[-1]
        self.by_hand[top.name] = type(top.module).__name__

    def lose(self, name: str, numbers: Numbers | None) -> None:
        if numbers is None:
            return
        module = self.stack[-1].name if self.stack else ""
        self.buffer.losses.setdefault(f"{name} ({module})" if module else name, []).append(numbers)

    def close(self) -> None:
        """End the step."""
        begin = time.perf_counter()
        self.buffer.close(self.step)
        self._largest, self._map_bytes = max(self._largest, self._map_bytes), 0
        self.spent_s += time.perf_counter() - begin

    def flush(self) -> None:
        self.close()
        begin = time.perf_counter()
        self.buffer.flush()
        self.spent_s += time.perf_counter() - begin


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Statistics are float32 whatever the model runs in."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.amp.autocast_mode.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
