"""Saving, loading, sinks, tables, callbacks: what leaves the watch."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_models import small

from partita.monitor import (
    COLUMNS,
    DamagedRecordError,
    Record,
    RecordError,
    json_lines,
    load_record,
    log_to,
    tensorboard,
    watch,
)
from partita.monitor.callbacks import LightningCallback, trainer_callback
from partita.monitor.files import replace_file
from partita.monitor.record import Table
from partita.monitor.report import render

CONTRACT = ["step", "layer", "head", "entropy", "normalized_entropy", "effective_width", "max_score", "log_partition"]
CONTRACT += ["score_variance", "sink_first", "rows"]


def run(steps: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    model = small()
    with watch(model, **options) as w:
        for _ in range(steps):
            F.cross_entropy(model(torch.randn(2, 6, 8)).flatten(0, 1), torch.zeros(12, dtype=torch.long))
    return w


def test_the_frame_has_the_columns_of_the_contract() -> None:
    frame = run().frame()
    assert all(("entropy_p" in c) == ("normalized_entropy_p" in c) for c in frame.columns)  # one unit per name
    assert list(frame.columns)[:3] == CONTRACT[:3] and set(CONTRACT) <= set(frame.columns)
    assert len(frame) == 3 * 2 and set(frame["layer"]) == {0}
    table = run().frame(pandas=False)
    assert isinstance(table, Table) and table["head"] == [0, 1] * 3 and "entropy" in repr(table)
    assert table.head == table["head"]
    with pytest.raises(AttributeError, match="its columns are"):
        _ = table.heads
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


def test_steps_can_be_named() -> None:
    model = small()
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
    assert about["model"] == "Attention" and about["parameters"] == 216 and about["options"]["every"] == 1


def test_notebook_display_is_a_sandboxed_frame() -> None:
    text = run()._repr_html_()
    assert text.startswith("<iframe sandbox=") and "<script>" not in text.split("srcdoc", 1)[0]


class State:
    """What both trainers show of themselves."""

    global_step = 7


def test_callbacks_name_steps() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    lightning, trainer = LightningCallback(every=1), trainer_callback(every=1)
    model = small()
    lightning.on_fit_start(State(), model)
    lightning.on_train_batch_start(State(), model, None, 0)
    model(torch.randn(1, 4, 8))
    lightning.on_fit_end(State(), model)
    trainer.on_train_begin(None, State(), None, model=model)
    trainer.on_step_begin(None, State(), None, model=model)
    model(torch.randn(1, 4, 8))
    trainer.on_train_end(None, State(), None, model=model)
    for callback in (lightning, trainer):
        assert [b.step for b in callback.watch.record.blocks] == [7] and "forward" not in model.__dict__


def test_saving_follows_no_planted_link(tmp_path: Path) -> None:
    """A link under the name an unfinished file used to have, or under the file's own name, leads nowhere."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("run.jsonl", "run.jsonl.partial", "page.html", "page.html.partial"):
        (folder / name).symlink_to(victim)
    w = run()
    w.save(folder / "run.jsonl")
    w.report(folder / "page.html")
    assert victim.read_text() == "untouched"
    assert load_record(folder / "run.jsonl").sites and not (folder / "run.jsonl").is_symlink()
    assert sorted(p.name for p in folder.iterdir() if not p.is_symlink()) == ["page.html", "run.jsonl"]


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")

    def pieces() -> Any:
        yield "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, pieces())
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_the_json_lines_sink_continues_a_record(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    run(4, sinks=[json_lines(path)])
    with path.open("a") as out:
        out.write('{"kind":"attention","step":4,"la')  # the first run was killed
    run(3, sinks=[json_lines(path)])
    both = load_record(path)
    assert [b.step for b in both.blocks] == list(range(7)) and len(both.sites) == 1
    assert both.provenance["resumed"] == 1 and [r["step"] for r in both.losses] == list(range(7))
    model = small()
    with watch(model, sinks=[json_lines(path)]) as w:  # back to a checkpoint: what came after it is undone
        for step in (5, 6, 7):
            w.set_step(step)
            model(torch.randn(2, 6, 8))
    assert [b.step for b in load_record(path).blocks] == [0, 1, 2, 3, 4, 5, 6, 7]
    other = tmp_path / "notes.txt"
    other.write_text("my notes\n")
    with pytest.raises(RecordError, match="not JSON"):
        json_lines(other)
    assert other.read_text() == "my notes\n"


def damaged(text: str, rng: random.Random) -> str:
    """One line with something wrong in it: a value of another type, a key that is gone, bytes that are gone."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    if rng.random() < 0.3:
        cut = rng.randrange(len(lines[at]))
        lines[at] = lines[at][:cut] + lines[at][cut + rng.randrange(1, 9) :]
        return "\n".join(lines) + "\n"
    line = json.loads(lines[at])
    node, key = line, rng.choice(list(line))
    while isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.7:
        node = node[key]
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    if rng.random() < 0.3:
        del node[key]
    else:
        node[key] = rng.choice([None, "x", "", -1, 10**400, 1e308, [], {}, [[]], {"a": 1}, True, "../x", 7, [None]])
    lines[at] = json.dumps(line)
    return "\n".join(lines) + "\n"


def test_a_damaged_record_is_an_error_that_names_it_or_a_page(tmp_path: Path) -> None:
    """Never another exception: not in reading, not in judging, not in drawing."""
    w = run(3, maps=[(0, 1)], received=True)
    whole = w.save(tmp_path / "run.jsonl").read_text()
    path, rng, refused = tmp_path / "bad.jsonl", random.Random(0), []
    for _ in range(400):
        path.write_text(damaged(whole, rng))
        try:
            record = load_record(path)
        except RecordError as error:
            refused.append(str(error))
        else:
            record.findings()
            render(record)
    assert 100 < len(refused) < 400 and all("bad.jsonl" in said for said in refused)


def test_a_damaged_line_is_told_from_a_file_that_is_no_record(tmp_path: Path) -> None:
    path = run(2).save(tmp_path / "run.jsonl")
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"layer":0', '"layer":9')
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DamagedRecordError, match="line 3: layer must be"):
        load_record(path)
    path.write_bytes(b'\xff\xfe{"kind"')
    with pytest.raises(RecordError) as caught:
        load_record(path)
    assert not isinstance(caught.value, DamagedRecordError)


def test_one_line_for_a_record_and_a_summary_for_a_watch() -> None:
    w = run(40)
    assert "\n" not in repr(w.record) and len(repr(w.record)) < 200 and "40 steps" in repr(w.record)
    assert str(w).startswith("2 heads watched") and "1 of 1 attention modules observed" in str(w)
    assert len(str(w).splitlines()) < 12


@pytest.mark.parametrize("steps", [1, 6])
def test_the_three_figures_draw(steps: int, tmp_path: Path) -> None:
    w = run(steps)
    for kind in ("entropy", "scores", "width"):
        made = w.plot(kind)
        root = ElementTree.fromstring(made._repr_html_())
        assert root.tag.endswith("svg") and any(
            n.get("data-x") or n.get("class", "").startswith("line") for n in root.iter()
        )
        assert made.save(tmp_path / f"{kind}.svg").read_text() == str(made) and "\n" not in repr(made)
    with pytest.raises(ValueError, match="entropy, scores, width"):
        w.plot("losses")
    with pytest.raises(ValueError, match="nothing to plot"):
        Record().plot()
