"""See what a model's softmaxes are doing, without changing it.

with partita.watch(model) as w:
    train(model)
w.frame(); w.findings(); w.report("run.html")
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from partita.monitor.findings import CODES, Finding, Thresholds
from partita.monitor.loading import DamagedRecordError, RecordError, load_record
from partita.monitor.record import COLUMNS, SCHEMA, Record
from partita.monitor.sinks import json_lines, log_to
from partita.monitor.trackers import csv_file, mlflow, tensorboard, trackio, wandb

if TYPE_CHECKING:
    from torch import nn

    from partita.monitor.coverage import Coverage as Coverage
    from partita.monitor.handle import Watch as Watch

__all__ = [
    "CODES",
    "COLUMNS",
    "SCHEMA",
    "Coverage",
    "DamagedRecordError",
    "Finding",
    "Record",
    "RecordError",
    "Thresholds",
    "Watch",
    "csv_file",
    "json_lines",
    "load_record",
    "log_to",
    "mlflow",
    "tensorboard",
    "trackio",
    "wandb",
    "watch",
]
_LATER = {"Coverage": "coverage", "Watch": "handle"}  # these need torch; records and reports do not


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    rows: int | None = None,
    layers: Iterable[int | str] | int | str | None = None,
    maps: Sequence[tuple[int, int]] = (),
    sinks: Sequence[Any] = (),
    thresholds: Thresholds | dict[str, float] | None = None,
    title: str | None = None,
    kernel: str = "own",
    received: bool = False,
    critical: bool = False,
    live: bool = False,
) -> Watch:
    """Observe every softmax of a model: entropy, width, largest score, sinks, per layer and head.

    A context manager, and a handle (`detach` ends it). The model computes exactly what it would: statistics are made
    beside its own kernels. A step is one call of the model, or of a loss module that calls it several times in
    training, or what `set_step` says. A compiled model stays compiled: while it is watched its graphs are others, which
    report (all options work in them), and afterwards its own serve again without being made anew.

    every: look at one step of so many; of the others torch's calls are passed on, and nothing is computed.
    rows: look at so many evenly spaced queries per call (None: all); the largest score is then a lower bound.
    layers: numbers (in order of first call) or regular expressions on module names.
    maps: (layer, head) pairs whose attention is kept as a picture of at most 128 x 128.
    sinks: see `partita.monitor.json_lines`, `csv_file`, `tensorboard`, `wandb`, `mlflow`, `trackio`, `log_to`.
    kernel: "own" keeps the model's own attention kernel and its bits. "partita" lets plain attention (no mask, no
        dropout) give output and statistics in one pass of partita's: cheaper, and equal within rounding only. In
        compiled graphs too; there partita's own attention gives both in one pass whatever is asked for.
    received: follow which key positions draw the mass (`record.received`): two passes more at one step of eight in
        training, and at every input otherwise.
    critical: measure the critical scale of every head on a sample of rows: below it a row's best key drowns among those
        that compete with it (columns `critical`, in units of the present scale, and `scale`).
    live: a line in the terminal: loss, worst head, and findings as they appear (with `rich`, where it is installed).
    """
    from partita.monitor.handle import Watch

    return Watch(
        model, every=every, rows=rows, layers=layers, maps=maps, sinks=sinks, thresholds=thresholds, title=title,
        kernel=kernel, received=received, critical=critical, live=live,
    )  # fmt: skip
