"""Steps that are open or just over: their sums, and how they become rows of the record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from partita.monitor import positions
from partita.monitor.accumulator import Accumulator, blocks
from partita.monitor.losses import Numbers, finish
from partita.monitor.ranges import Impossible
from partita.monitor.record import Block, Record

log = logging.getLogger("partita.watch")
AT_ONCE = 8  # steps whose sums are finished together: the many small operations cost no more than for one
Losses = dict[str, list[Numbers]]


class StepBuffer:
    """Sums of the open step by layer and by loss, and those of a few steps that are over."""

    def __init__(self, record: Record, sinks: Sequence[Any]) -> None:
        self.record, self.sinks = record, sinks
        self.sums: dict[int, Accumulator] = {}
        self.losses: Losses = {}
        self.impossible: list[Impossible] = []  # numbers that cannot be: our own faults
        self._closed: list[tuple[int, dict[int, Accumulator], Losses]] = []
        self._failed: set[int] = set()  # sinks that were reported

    def close(self, step: int) -> None:
        """End the step; whoever listens is told at once."""
        if self.sums or self.losses:
            self._closed.append((step, self.sums, self.losses))
            self.sums, self.losses = {}, {}
        if self.sinks or len(self._closed) >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Steps that are over become rows, and sinks are told, step by step."""
        closed, self._closed = self._closed, []
        try:
            with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
                parts = [(step, *item) for step, seen, _ in closed for item in sorted(seen.items())]
                made = iter(blocks(parts, self.impossible))
                for step, seen, losses in closed:
                    here = [next(made) for _ in seen]
                    rows = [finish(numbers, step, name) for name, numbers in losses.items()]
                    self._name_keys(seen)
                    self._keep_received(step, seen)
                    self.record.blocks += here
                    self.record.losses += rows
                    self._tell(step, here, rows)
        except Exception as error:  # watching never stops a run
            log.warning("steps up to %d could not be recorded: %s", closed[-1][0], error)

    def _name_keys(self, seen: dict[int, Accumulator]) -> None:
        """The strongest keys go with the temperature curve of their layer."""
        for curve in self.record.curves:
            sums = seen.get(curve["layer"])
            if sums is not None and sums.keys is not None:
                curve["keys"] = [[[int(i), mass] for i, mass in head] for head in sums.keys.tolist()]

    def _keep_received(self, step: int, seen: dict[int, Accumulator]) -> None:
        for layer, sums in sorted(seen.items()):
            row = None if sums.received is None else sums.received.row(step, layer, self.impossible)
            if row is not None:
                positions.keep(self.record.received, row)

    def _tell(self, step: int, here: list[Block], rows: list[dict[str, Any]]) -> None:
        for sink in self.sinks:
            try:
                sink(self.record, step, here, rows)
            except Exception as error:
                if id(sink) not in self._failed:
                    self._failed.add(id(sink))
                    log.warning("a sink failed at step %d and is not reported again: %s", step, error)

    def end(self) -> None:
        """Sinks that hold something open are told that nothing more comes for now."""
        for sink in self.sinks:
            close = getattr(sink, "close", None)
            if callable(close):
                try:
                    close()
                except Exception as error:
                    log.warning("a sink could not be closed: %s", error)
