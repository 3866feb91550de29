"""Sinks for the logs people already look at: TensorBoard, Weights & Biases, MLflow, trackio, a table in a file.

None of these packages is needed, or imported, before its sink is made. Names are those of `partita.monitor.sinks`:
partita/<number>/layer<number>, and partita/<loss>/<number>.
"""

from __future__ import annotations

import csv
import importlib
import re
from pathlib import Path
from typing import Any

from partita.monitor.record import LOSS_COLUMNS, Block, Record, frame_columns
from partita.monitor.sinks import Sink, log_to

__all__ = ["csv_file", "mlflow", "tensorboard", "trackio", "wandb"]


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
            _append(there, columns, rows)

    return sink


def _append(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        if not file.tell():
            table.writeheader()
        table.writerows(rows)
