"""The sums of the steps seen, and how they become rows of the record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from partita.monitor import outputs
from partita.monitor.record import Block, Record
from partita.monitor.tally import Tally, blocks

log = logging.getLogger("partita.watch")
AT_ONCE = 8  # steps whose sums are finished together: the many small operations cost no more than for one


class Ledger:
    """Sums of the open step by layer and by loss, and those of a few steps that are over."""

    def __init__(self, record: Record, sinks: Sequence[Any]) -> None:
        self.record, self.sinks = record, sinks
        self.tallies: dict[int, Tally] = {}
        self.losses: dict[str, list[outputs.Numbers]] = {}
        self._closed: list[tuple[int, dict[int, Tally], dict[str, list[outputs.Numbers]]]] = []

    def close(self, step: int) -> None:
        """End the step; whoever listens is told at once."""
        if self.tallies or self.losses:
            self._closed.append((step, self.tallies, self.losses))
            self.tallies, self.losses = {}, {}
        if self.sinks or len(self._closed) >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Steps that are over become rows, and sinks are told, step by step."""
        closed, self._closed = self._closed, []
        try:
            with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
                made = iter(blocks([(step, *item) for step, seen, _ in closed for item in sorted(seen.items())]))
                for step, seen, losses in closed:
                    here = [next(made) for _ in seen]
                    rows = [outputs.finish(numbers, step, name) for name, numbers in losses.items()]
                    self._name_keys(seen)
                    self.record.blocks += here
                    self.record.losses += rows
                    self._tell(step, here, rows)
        except Exception as error:  # watching never stops a run
            log.warning("steps up to %d could not be recorded: %s", closed[-1][0], error)

    def _name_keys(self, seen: dict[int, Tally]) -> None:
        """The strongest keys go with the temperature curve of their layer."""
        for curve in self.record.curves:
            tally = seen.get(curve["layer"])
            if tally is not None and tally.keys is not None:
                curve["keys"] = [[[int(i), mass] for i, mass in head] for head in tally.keys.tolist()]

    def _tell(self, step: int, here: list[Block], rows: list[dict[str, Any]]) -> None:
        for sink in self.sinks:
            try:
                sink(self.record, step, here, rows)
            except Exception as error:
                log.warning("a sink failed and goes on without this step: %s", error)
