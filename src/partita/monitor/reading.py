"""What a watch has to say: tables, findings, files, pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from partita.monitor.findings import Finding, Thresholds
from partita.monitor.merge import merge_records
from partita.monitor.record import Record


class Coverage(dict[str, Any]):
    """What was seen and what was not; its text is a sentence."""

    def __str__(self) -> str:
        return str(self["text"])


class Reading:
    """Abstract: readers of a finished record."""

    thresholds: Thresholds

    def finished(self) -> Record:
        """The record with everything seen so far."""
        raise TypeError("Reading is abstract; use partita.watch(model).")

    def gather(self, group: Any = None) -> Record:
        """The records of all ranks as one, on every rank: a collective, to be called on all, outside the step."""
        mine = self.finished()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return mine
        parts: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(parts, mine, group=group)
        return merge_records(parts)

    def frame(self, pandas: bool | None = None) -> Any:
        """One row per step, layer and head: a pandas DataFrame where pandas is installed, else a `Table`."""
        return self.finished().frame(pandas)

    def loss_frame(self, pandas: bool | None = None) -> Any:
        """One row per step and loss."""
        return self.finished().loss_frame(pandas)

    def findings(self, thresholds: Thresholds | dict[str, float] | None = None) -> list[Finding]:
        """What is worth a look, worst first."""
        return self.finished().findings(thresholds if thresholds is not None else self.thresholds)

    def plot(self, kind: str = "entropy") -> Any:
        """A figure that notebooks show: "entropy", "scores" or "width". `.save(path)` writes it as SVG."""
        return self.finished().plot(kind)

    def __str__(self) -> str:
        return self.finished().summary(self.thresholds)

    def save(self, path: str | Path) -> Path:
        """Write the record as JSON lines; `partita.load_record` reads it."""
        return self.finished().save(path)

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write the self-contained HTML report."""
        return self.finished().report(path, **{"thresholds": self.thresholds, **options})

    def _repr_html_(self) -> str:
        return self.finished()._repr_html_()
