"""What a watch has to say: tables, findings, files, pages."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from partita.monitor.findings import Finding, Thresholds
from partita.monitor.loading import load_record
from partita.monitor.merge import merge_records
from partita.monitor.record import Record, text_of


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
        sent = "".join(text_of(line) for line in mine.lines()).encode()
        return merge_records([_from_bytes(part) for part in _all_bytes(sent, group)])

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


def _from_bytes(data: bytes) -> Record:
    """What another rank sent is text, read like any file: it cannot run anything here, as a pickle could."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        path.write_bytes(data)
        return load_record(path)


def _all_bytes(data: bytes, group: Any) -> list[bytes]:
    """The bytes of every rank, in rank order: their lengths first, then all of them padded to the longest."""
    import torch.distributed as dist

    gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = mine
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[: int(size)].tolist()) for part, size in zip(parts, sizes, strict=True)]
