"""Saving, loading, sinks, tables, callbacks: what leaves the watch."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.monitor import COLUMNS, RecordError, json_lines, load_record, log_to, tensorboard, watch
from partita.monitor.callbacks import LightningCallback, trainer_callback
from partita.monitor.table import Table

CONTRACT = [
    "step",
    "layer",
    "head",
    "entropy",
    "normalized_entropy",
    "effective_width",
    "max_score",
    "log_partition",
    "score_variance",
    "sink_first",
    "rows",
]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def run(steps: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Small()
    with watch(model, **options) as w:
        for _ in range(steps):
            F.cross_entropy(model(torch.randn(2, 6, 8)).flatten(0, 1), torch.zeros(12, dtype=torch.long))
    return w


def test_the_frame_has_the_columns_of_the_contract() -> None:
    frame = run().frame()
    assert list(frame.columns)[:3] == CONTRACT[:3] and set(CONTRACT) <= set(frame.columns)
    assert len(frame) == 3 * 2 and set(frame["layer"]) == {0}
    table = run().frame(pandas=False)
    assert isinstance(table, Table) and table["head"] == [0, 1] * 3 and "entropy" in repr(table)
    with pytest.raises(KeyError, match="the columns are"):
        table["nothing"]


def test_a_saved_record_is_the_record(tmp_path: Path) -> None:
    w = run(maps=[(0, 1)])
    w.record.blocks[0].values[0] = math.nan
    back = load_record(w.save(tmp_path / "deep" / "run.jsonl"))
    first, second = w.record, back
    assert back.sites == first.sites and back.losses[0]["loss"] == pytest.approx(first.losses[0]["loss"], rel=1e-8)
    assert math.isnan(second.blocks[0].values[0])
    for a, b in zip(first.rows(), second.rows(), strict=True):
        assert a.keys() == b.keys()
        assert all(a[c] == pytest.approx(b[c], rel=1e-8, nan_ok=True) for c in COLUMNS)
    assert (back.maps[0]["step"], back.maps[0]["rows"], back.maps[0]["n_key"]) == (0, 6, 6)
    assert (
        back.maps[0]["data"] == first.maps[0]["data"] and back.coverage["short"] == "1 of 1 attention modules observed"
    )
    assert {f.code for f in back.findings()} == {f.code for f in w.findings()}
    for line in (tmp_path / "deep" / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f"not strict JSON: {c}"))


def test_files_that_are_not_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for text, message in (
        ("", "empty"),
        ("hello\n", "not JSON"),
        ('{"kind":"header","schema":"other/9"}\n', "expected schema"),
        ("[1]\n", "expected schema"),
    ):
        path.write_text(text)
        with pytest.raises(RecordError, match=message):
            load_record(path)


def test_the_json_lines_sink_survives_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    w = run(5, sinks=[json_lines(path)])
    text = path.read_text()
    assert len(load_record(path).blocks) == 5
    path.write_text(text[:-40])  # the last line is cut
    cut = load_record(path)
    assert 4 <= len(cut.blocks) <= 5 and cut.sites == w.record.sites


def test_sinks_get_flat_numbers() -> None:
    logged: list[tuple[dict[str, float], int]] = []
    written: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

    run(2, sinks=[log_to(lambda values, step: logged.append((values, step))), tensorboard(Writer(), heads=True)])
    assert (
        [s for _, s in logged] == [0, 1]
        and "partita/normalized_entropy/layer0" in logged[0][0]
        and "partita/cross_entropy/loss" in logged[0][0]
    )
    assert any(name.endswith("layer0/head1") for name, _, _ in written)


def test_a_sink_that_fails_does_not_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise OSError("disk full")

    with caplog.at_level(logging.WARNING, logger="partita.watch"):
        w = run(2, sinks=[broken])
    assert len(w.record.blocks) == 2 and "disk full" in caplog.text


def test_a_probe_that_fails_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from partita.monitor import measure

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(measure, "measure", broken)
    w = run(2)
    assert "no such luck" in str(w.coverage)


def test_steps_can_be_named() -> None:
    model = Small()
    with watch(model) as w:
        for step in (10, 20):
            w.set_step(step)
            model(torch.randn(2, 6, 8))
            model(torch.randn(2, 6, 8))  # gradient accumulation: the same step
    assert [(b.step, b.row(0)["rows"]) for b in w.record.blocks] == [(10, 24.0), (20, 24.0)]


def test_overhead_and_provenance_are_recorded() -> None:
    w = run()
    assert w.overhead["watch_s"] > 0 and w.overhead["observed_steps"] == 3 and w.overhead["map_bytes"] == 4 * 2 * 2 * 36
    about = w.record.provenance
    assert about["model"] == "Small" and about["parameters"] == 216 and about["options"]["every"] == 1


def test_notebook_display_is_a_sandboxed_frame() -> None:
    text = run()._repr_html_()
    assert text.startswith("<iframe sandbox=") and "<script>" not in text.split("srcdoc", 1)[0]


def test_lightning_callback_names_steps() -> None:
    class Trainer:
        global_step = 7

    model, callback = Small(), LightningCallback(every=1)
    callback.on_fit_start(Trainer(), model)
    callback.on_train_batch_start(Trainer(), model, None, 0)
    model(torch.randn(1, 4, 8))
    callback.on_fit_end(Trainer(), model)
    assert [b.step for b in callback.watch.record.blocks] == [7] and "forward" not in model.__dict__


def test_trainer_callback_names_steps() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")

    class State:
        global_step = 3

    model, callback = Small(), trainer_callback(every=1)
    callback.on_train_begin(None, State(), None, model=model)
    callback.on_step_begin(None, State(), None, model=model)
    model(torch.randn(1, 4, 8))
    callback.on_train_end(None, State(), None, model=model)
    assert [b.step for b in callback.watch.record.blocks] == [3] and "forward" not in model.__dict__
