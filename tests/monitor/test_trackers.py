"""Tracking tools: what their own packages read back is what was recorded; and the line in the terminal."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import sqlite3
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.monitor import csv_file, mlflow, sinks, tensorboard, trackio, wandb, watch
from partita.monitor.record import frame_columns
from partita.monitor.sinks import LiveLine, scalars


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.cross_entropy(out.mean(1), y)  # inside the model: the loss has a name with brackets


def run(*sinks: Any, steps: int = 3, factor: float = 1.0, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("inner", Head())
    with torch.no_grad():
        model.inner.project.weight.mul_(factor)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Tensor) -> Tensor:
            return self.model.inner(*given)

    # the same on every machine: torch's kernels draw normal numbers otherwise on other processors
    drawn = random.Random(0)
    given = [torch.tensor([drawn.gauss() for _ in range(3 * 9 * 8)]).view(3, 9, 8) for _ in range(steps)]
    whole = Whole()
    with watch(whole, sinks=list(sinks), **options) as w:
        for x in given:
            whole(x, torch.arange(3)).backward()
    return w


def expected(w: Any) -> dict[int, dict[str, float]]:
    """Flat names and numbers of each step, from the record."""
    record = w.record
    found = {
        step: scalars([b for b in record.blocks if b.step == step], [r for r in record.losses if r["step"] == step])
        for step in record.steps()
    }
    assert any("(" in name for name in found[0]) and "partita/max_score/layer0" in found[0]
    return found


def installed(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'partita[trackers]'")


def test_tensorboard(tmp_path: Path) -> None:
    events = installed("tensorboard.backend.event_processing.event_accumulator")
    w = run(tensorboard(tmp_path / "folder"))
    log = events.EventAccumulator(str(tmp_path / "folder"))
    log.Reload()
    for step, values in expected(w).items():
        for name, value in values.items():
            assert {e.step: e.value for e in log.Scalars(name)}[step] == pytest.approx(value, rel=1e-6)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pieces(data: bytes) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format behind seven bytes; long ones come in several parts."""
    place, kept = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        kept += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield kept
            kept = b""


def test_weights_and_biases(offline: Path) -> None:
    """The file of an offline run, read with its own reader: our steps next to the user's own."""
    package = installed("wandb")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sink = wandb(project="partita", dir=str(offline))
        package.run.log({"mine": 1.0})
        w = run(sink)
        assert sink is not None and package.run is not None
        package.finish()
        package.teardown()  # its service writes the file, and is done with it only when it has ended
        from wandb.proto import wandb_internal_pb2

        (path,) = offline.glob("wandb/offline-run-*/*.wandb")
        found: dict[int, dict[str, float]] = {}
        metrics = []
        for data in pieces(path.read_bytes()):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(data)
            if entry.WhichOneof("record_type") == "metric":
                metrics.append((entry.metric.name or entry.metric.glob_name, entry.metric.step_metric))
            if entry.WhichOneof("record_type") == "history":
                items = entry.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                if "partita/step" in row:
                    found[row["partita/step"]] = row
    assert ("partita/*", "partita/step") in metrics
    for step, values in expected(w).items():
        for name, value in values.items():
            assert found[step][name] == pytest.approx(value, rel=1e-6)


def test_mlflow(offline: Path) -> None:
    package = installed("mlflow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package.set_tracking_uri((offline / "mlruns").as_uri())
        with package.start_run() as active:
            w = run(mlflow())
        other = package.start_run().info.run_id
        package.end_run()
        run(mlflow(other), steps=1)
        client = package.MlflowClient()
        for step, values in expected(w).items():
            for name, value in values.items():
                history = client.get_metric_history(active.info.run_id, name.replace("(", "_").replace(")", "_"))
                assert {m.step: m.value for m in history}[step] == pytest.approx(value)
        assert len(client.get_run(other).data.metrics) == len(expected(w)[0])


def test_trackio(offline: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder when it is imported, by a trainer perhaps
    package = installed("trackio")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sink = trackio("partita", name="first")
        w = run(sink, every=2)  # trackio counts by itself where it does not receive the step
        package.finish()
    with sqlite3.connect(offline / "trackio" / "partita.db") as base:
        rows = base.execute("select step, metrics from metrics where run_name = 'first' order by step").fetchall()
    found = {step: json.loads(text) for step, text in rows}
    for step, values in expected(w).items():
        for name, value in values.items():
            assert found[step][name] == pytest.approx(value)


def test_a_table_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.csv"
    w = run(csv_file(path))
    run(csv_file(path), steps=1)  # a second run goes on below the first
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == frame_columns() and len(rows) == 2 * 3 + 2
    for row, truth in zip(rows, w.frame(pandas=False), strict=False):
        assert int(row["step"]) == truth["step"] and row["name"] == truth["name"]
        assert float(row["entropy"]) == pytest.approx(truth["entropy"])
    with (tmp_path / "deep" / "run.losses.csv").open(newline="") as file:
        losses = list(csv.DictReader(file))
    assert [float(r["loss"]) for r in losses[:3]] == pytest.approx([r["loss"] for r in w.record.losses])
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="holds another table"):
        csv_file(other)
    assert other.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("sink", [lambda: wandb(), lambda: mlflow(), lambda: trackio(), lambda: tensorboard("here")])
def test_what_is_not_installed_is_named(sink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "trackio", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="is not installed: pip install"):
        sink()


# ---- the line in the terminal ----------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings are looked for at every step, however long that takes."""
    monkeypatch.setattr(sinks, "_SHARE", math.inf)


@pytest.mark.usefixtures("_unhurried")
def test_a_plain_line_where_the_output_is_a_file() -> None:
    out = io.StringIO()
    w = run(LiveLine(stream=out), factor=40.0)
    lines = out.getvalue().splitlines()
    worst = min(
        (r for r in w.frame(pandas=False) if r["step"] == 2 and math.isfinite(r["normalized_entropy"])),
        key=lambda r: r["normalized_entropy"],
    )
    assert lines[-1].startswith(f"step 2   loss {w.record.losses[2]['loss']:.4g}   worst head 0.")
    assert f"H/log n {worst['normalized_entropy']:.3f}" in lines[-1]
    assert f"largest score {worst['max_score']:.3g}" in lines[-1]
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()
    assert sum("LOGIT_GROWTH" in line for line in lines) == 1 and lines[-1].endswith("findings")


@pytest.mark.usefixtures("_unhurried")
def test_a_line_that_is_written_over_where_there_is_a_terminal() -> None:
    out = Terminal()
    run(LiveLine(stream=out))
    assert out.getvalue().count("\r\x1b[K") == 3 and out.getvalue().endswith("\n")
    out = Terminal()
    w = run(LiveLine(stream=out), factor=40.0)
    text = out.getvalue()
    assert "step 2" in text and "worst head" in text and "\x1b[3" in text and "\x1b[0m\n" in text  # a colour, and back
    assert text.count("LOGIT_GROWTH") == sum(f.code == "LOGIT_GROWTH" for f in w.findings()) == 1


def test_live_is_one_option(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    run(live=True, steps=2)
    assert "step 1" in out.getvalue() and "loss" in out.getvalue()
