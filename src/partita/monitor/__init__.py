"""See what a model's softmaxes are doing, without changing it.

with partita.watch(model) as w:
    train(model)
w.frame(); w.findings(); w.report("run.html")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from partita._later import load
from partita.monitor.findings import CODES, Finding, Thresholds
from partita.monitor.loading import DamagedRecordError, RecordError, load_record
from partita.monitor.record import COLUMNS, SCHEMA, Record
from partita.monitor.sinks import csv_file, json_lines, log_to, mlflow, tensorboard, trackio, wandb

if TYPE_CHECKING:
    from torch import nn

    from partita.monitor.handle import Watch as Watch
    from partita.monitor.options import Coverage as Coverage

__all__ = [
    "CODES", "COLUMNS", "SCHEMA", "Coverage", "DamagedRecordError", "Finding", "Record", "RecordError", "Thresholds",
    "Watch", "csv_file", "json_lines", "load_record", "log_to", "mlflow", "tensorboard", "trackio", "wandb", "watch",
]  # fmt: skip
_LATER = {"Coverage": "options", "Watch": "handle"}  # these need torch; records and reports do not


def __getattr__(name: str) -> Any:
    return load(__name__, name, _LATER)


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
    keep: int | None = 1000,
    budget: float | None = None,
) -> Watch:
    """Observe every softmax of a model: entropy, width, largest score, sinks, per layer and head.

    A context manager, and a handle (`detach` ends it). The model computes exactly what it would: statistics are made
    in passes of their own, after its kernels. A step is one call of the model, or of a loss module that calls it
    several times in training, or named by `set_step`. A compiled model stays compiled: while it is watched its graphs
    are others, which report (all options work in them); afterwards its own serve again without being compiled anew.

    every: look at one step in `every`; in the others torch's calls are passed on, and nothing is computed.
    rows: look at this number of evenly spaced queries per call (None: all); means then have a standard error (columns
        `entropy_se`, ...), and the largest score is a lower bound.
    layers: numbers (in order of first call) or regular expressions on module names.
    maps: (layer, head) pairs whose attention is kept as a picture of at most 128 x 128.
    sinks: see `partita.monitor.json_lines`, `csv_file`, `tensorboard`, `wandb`, `mlflow`, `trackio`, `log_to`.
    kernel: "own" runs the model's own attention kernel, so its outputs are bit-identical. "partita" lets plain
        attention (no mask, no dropout) give output and statistics in one pass of partita's: cheaper, and equal within
        rounding only. In compiled graphs too; there partita's own attention gives both in one pass always.
    received: follow which key positions draw the mass (`record.received`): two passes more at one step of eight in
        training, and at every input otherwise.
    critical: measure the critical scale of every head on a sample of rows: below it a row's best key drowns among those
        that compete with it (columns `critical`, in units of the present scale, and `scale`).
    keep: the record holds at most this number of steps (None: all, some 120 kB each for 24 layers of 16 heads). Of a
        longer run steps stay that are spread evenly over it; sinks receive every step that is looked at.
    budget: a share of the time, such as 0.01: 256 evenly spaced rows of a call, unless `rows` is given, and a step only
        while less than this share of the time has gone into watching.
    live: a line in the terminal: loss, worst head, and findings as they appear.
    """
    from partita.monitor.handle import Watch

    return Watch(
        model, every=every, rows=rows, layers=layers, maps=maps, sinks=sinks, thresholds=thresholds, title=title,
        kernel=kernel, received=received, critical=critical, live=live, keep=keep, budget=budget,
    )  # fmt: skip
