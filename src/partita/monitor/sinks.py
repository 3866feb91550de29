"""Where measurements go while they are made. A sink is called after each observed step:

    sink(record, step, blocks, losses)

A sink that raises is reported once in the log, and the run goes on. Sinks for TensorBoard, Weights & Biases, MLflow and
trackio import their package when they are made; names there are partita/<number>/layer<number> and
partita/<loss>/<number>.
"""

from __future__ import annotations

import csv
import importlib
import math
import mmap
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from partita.monitor.findings import SEVERITIES, Finding, Thresholds, find, verdicts
from partita.monitor.loading import check_header
from partita.monitor.record import LOSS_COLUMNS, Block, Record, frame_columns

Sink = Callable[[Record, int, list[Block], list[dict[str, Any]]], None]
SCALARS = ("normalized_entropy", "effective_width", "max_score", "log_partition", "sink_first", "sink_top", "nonfinite")


def scalars(blocks: list[Block], losses: list[dict[str, Any]], *, heads: bool = False) -> dict[str, float]:
    """Flat names and numbers, one per layer (and per head with heads=True): what trackers take."""
    out: dict[str, float] = {}
    mixed = len({block.phase for block in blocks}) > 1  # such as a generation inside a step of training
    for block in blocks:
        start = f"partita/{block.phase}" if mixed and block.phase != "train" else "partita"
        for name in SCALARS:
            if (value := block.overall(name)) is not None:
                out[f"{start}/{name}/layer{block.layer}"] = value
            for head, value in enumerate(block.column(name) if heads else ()):
                if math.isfinite(value):
                    out[f"{start}/{name}/layer{block.layer}/head{head}"] = value
    for row in losses:
        for key in ("loss", "entropy", "confidence", "calibration_error", "effective_negatives", "bound"):
            if isinstance(number := row.get(key), (int, float)) and math.isfinite(number):
                out[f"partita/{row['name']}/{key}"] = float(number)
    return out


def log_to(function: Callable[..., Any], *, heads: bool = False, pass_step: bool = True) -> Sink:
    """Any `log(dict, step=...)`: wandb.log, trackio.log, your own. `pass_step=False` leaves the step to it."""

    def sink(record: Record, step: int, blocks: list[Block], losses: list[dict[str, Any]]) -> None:
        values = scalars(blocks, losses, heads=heads)
        function(values, step=step) if pass_step else function({**values, "partita/step": step})

    return sink


def json_lines(path: str | Path) -> Sink:
    """A file that grows with each step and that `load_record` reads, also after an interruption.

    A record that is there already is continued, never overwritten: a resumed training adds to the first run's file.
    A file that is no record is refused at once.
    """
    path = Path(path)
    if path.exists():
        with path.open("rb") as there:
            first = there.readline()
        if first.strip():
            check_header(path, first.decode("utf-8", "replace"))
    sites = 0
    fresh = True

    def sink(record: Record, step: int, blocks: list[Block], losses: list[dict[str, Any]]) -> None:
        nonlocal sites, fresh
        new = Record(record.provenance, record.sites, blocks, losses)
        if fresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished(path)
        with path.open("a", encoding="utf-8") as out:
            if fresh:
                out.write(next(new.lines()))  # the header
            out.writelines(new.part(sites))
        sites, fresh = len(record.sites), False

    return sink


def _cut_unfinished(path: Path) -> None:
    """Cut off what an interruption left of the last line, so that the next one starts on its own."""
    if path.exists() and path.stat().st_size:
        with path.open("r+b") as there:
            with mmap.mmap(there.fileno(), 0, access=mmap.ACCESS_READ) as text:
                end = text.rfind(b"\n") + 1
            there.truncate(end)


# ---- trackers, and a table in a file ---------------------------------------------------------------------------------


def _package(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this sink writes to {name}, which is not installed: pip install {install}.") from error


def tensorboard(writer: Any, *, heads: bool = False) -> Sink:
    """A `torch.utils.tensorboard.SummaryWriter`, a folder for one, or anything with add_scalar(name, value, step)."""
    folder = isinstance(writer, (str, Path))
    log: Any = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(writer)) if folder else writer

    def add(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            log.add_scalar(name, value, step)
        if folder:
            log.flush()

    return log_to(add, heads=heads)


def wandb(run: Any = None, *, heads: bool = False, **init: Any) -> Sink:
    """Weights & Biases: a run, or the one that is open, or a new one, `wandb(project="...", mode="offline")`.

    Steps are a column of their own, `partita/step`, which the charts use: your own calls of `log` keep their steps.
    """
    package = _package("wandb", "wandb")
    log = run if run is not None else package.run if package.run is not None and not init else package.init(**init)
    log.define_metric("partita/step", hidden=True)
    log.define_metric("partita/*", step_metric="partita/step")
    return log_to(log.log, heads=heads, pass_step=False)


def mlflow(run_id: str | None = None, *, heads: bool = False) -> Sink:
    """MLflow (or mlflow-skinny): the run of that id, or the active one, which MLflow opens where there is none.

    MLflow's names take no brackets: those of a loss become underscores.
    """
    package = _package("mlflow", "mlflow")

    def log(values: dict[str, float], step: int) -> None:
        plain = {re.sub(r"[^\w./ -]+", "_", name): value for name, value in values.items()}
        package.log_metrics(plain, step=step, run_id=run_id)

    return log_to(log, heads=heads)


def trackio(project: str | None = None, *, heads: bool = False, **init: Any) -> Sink:
    """trackio: the open run, or a new one of this project, `trackio("mine", name="first")`."""
    package = _package("trackio", "trackio")
    if project is not None:
        package.init(project=project, **init)
    return log_to(package.log, heads=heads)


def csv_file(path: str | Path) -> Sink:
    """A table that grows: a row per step, layer and head, as `frame()` has them; losses go to `<name>.losses.csv`.

    A table of the same columns is continued, any other file is refused at once.
    """
    path = Path(path)
    other = path.with_name(f"{path.stem}.losses{path.suffix or '.csv'}")
    tables = ((path, frame_columns()), (other, ["step", "name", *LOSS_COLUMNS]))
    for there, columns in tables:
        if there.exists() and there.stat().st_size:
            with there.open(newline="", encoding="utf-8") as file:
                found = next(csv.reader(file), [])
            if found != columns:
                raise ValueError(
                    f"{there} holds another table, with columns {', '.join(found[:4])}, ...; it is left as it is. "
                    f"Choose another name."
                )

    def sink(record: Record, step: int, blocks: list[Block], losses: list[dict[str, Any]]) -> None:
        seen = Record(sites=record.sites, blocks=blocks)
        for (there, columns), rows in zip(tables, (list(seen.rows()), losses), strict=True):
            if rows:
                there.parent.mkdir(parents=True, exist_ok=True)
                with there.open("a", newline="", encoding="utf-8") as file:
                    table = csv.DictWriter(file, columns, extrasaction="ignore")
                    if not file.tell():
                        table.writeheader()
                    table.writerows(rows)

    return sink


# ---- a line in the terminal ------------------------------------------------------------------------------------------


_SHARE = 0.02  # of the time, at most, goes into looking for findings
_BETWEEN_S = 5.0  # from line to line where there is no terminal
_MARKS = {"error": "\033[31m●", "warning": "\033[33m◐"}


class LiveLine:
    """A sink: the loss, the worst head, and findings as they appear, in one line of the terminal.

        step 120   loss 2.413   worst head 3.5  H/log n 0.031  largest score 58.2   2 findings

    In a terminal the line stays in its place, below the findings; where the output goes to a file it is written now and
    then. `close` ends the line; `watch` calls it when it lets the model go.
    """

    def __init__(self, thresholds: Thresholds | None = None, stream: TextIO | None = None) -> None:
        self.thresholds, self.stream = thresholds, stream
        self._known: dict[tuple[str, str], Finding] = {}  # by code and layer: more heads of it are no news
        self._begin = self._written = self._spent = 0.0
        self._last = self._shown = ""

    def __call__(self, record: Record, step: int, blocks: list[Block], losses: list[dict[str, Any]]) -> None:
        now = time.perf_counter()
        self._begin = self._begin or now
        out = self.stream or sys.stderr
        screen = out.isatty()
        if self._spent <= _SHARE * (now - self._begin):
            found = find(record, self.thresholds)
            worth = {(f.code, str(f.heads[0][0]) if f.heads else f.where): f for f in found if f.severity != "info"}
            for f in (f for key, f in worth.items() if key not in self._known):
                mark = _MARKS[f.severity] if screen else _MARKS[f.severity][-1]
                note = f"step {step}  {mark} {f.code} {f.where}: {f.evidence}"
                out.write(f"\r\033[K{note}\033[0m\n" if screen else f"{note}\n")
            self._known = worth
            self._spent += time.perf_counter() - now
        self._last = line(step, blocks, losses, list(self._known.values()))
        if screen:
            out.write(f"\r\033[K{self._last[: shutil.get_terminal_size().columns - 1]}")
        elif not self._shown or now - self._written >= _BETWEEN_S:
            out.write(f"{self._last}\n")
            self._shown, self._written = self._last, now
        out.flush()

    def close(self) -> None:
        """Leave the last line where it is."""
        if self._last:
            out = self.stream or sys.stderr
            out.write("\n" if out.isatty() else "" if self._last == self._shown else f"{self._last}\n")
            out.flush()
        self._last = self._shown = ""


def line(step: int, blocks: list[Block], losses: list[dict[str, Any]], findings: list[Finding]) -> str:
    """What is worth one line: the losses of the step, and of the heads with the gravest finding the sharpest one."""
    parts = [f"step {step}"]
    for row in losses[:2]:
        value = row.get("loss")
        if isinstance(value, (int, float)):
            parts.append(f"{'loss' if len(losses) == 1 else row['name']} {value:.4g}")
    judged = {where: SEVERITIES.index(found[0].severity) for where, found in verdicts(findings).items()}
    ranked = []
    for block in blocks:
        for head, share in enumerate(block.column("normalized_entropy")):
            grave = -judged.get((block.layer, head), 0)
            ranked.append((grave, share if math.isfinite(share) else math.inf, block.layer, head, block))
    if ranked:
        _, _, layer, head, block = min(ranked, key=lambda item: item[:4])
        row = block.row(head)
        parts.append(
            f"worst head {layer}.{head}  H/log n {row['normalized_entropy']:.3f}  largest score {row['max_score']:.3g}"
        )
    if findings:
        parts.append(f"{len(findings)} finding{'s' * (len(findings) > 1)}")
    return "   ".join(parts)
