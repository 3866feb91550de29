"""The studies of a report: what was asked, expected and found, with figures that obey the page's policy."""

from __future__ import annotations

import csv
import io
import json
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

from partita.lab.cli import main
from partita.lab.draw import svg
from partita.lab.figure import Figure, Line, Panel
from partita.lab.report import render, write
from partita.lab.report.studies import KIND, LARGEST, gather
from partita.monitor import Record, load_record
from partita_studies import study
from partita_studies.experiment import Verdict
from partita_studies.experiments import find
from partita_studies.store import Store

EVIL = synthetic.HOSTILE


def picture(label: str = "measured", panels: int = 2) -> str:
    lines = [
        Line(label, [1, 2, 4], [0.5, 0.25, 0.125], low=[0.4, 0.2, 0.1], high=[0.6, 0.3, 0.2]),
        Line("theory", [1, 4], [0.5, 0.1], kind="theory"),
    ]
    return svg(Figure(label + "?", [Panel(label, "n", "H", lines, log_x=True)] * panels, note="3 rows of one seed"))


def row(name: str = "example", figure: str | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "study": KIND,
        "name": name,
        "size": "quick",
        "question": "Does the width shrink with the scale?",
        "expected": "It shrinks.",
        "ids": ["M-INF-1"],
        "answer": "holds within",
        "within": "n <= 4",
        "evidence": "it fell from 0.5 to 0.125 over 3 rows.",
        "cells": 3,
        "rows": 3,
        "partita": ["0"],
        "figure": figure,
        **changes,
    }


def record(*rows: dict[str, Any]) -> Record:
    out = synthetic.record(2, 2, 3)
    out.studies += rows
    return out


@pytest.mark.parametrize("width", [390, 1024, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_study_is_shown_with_its_figure(width: int, theme: str, tmp_path: Path, visit: Any) -> None:
    path = write(record(row(figure=picture()), row("other", answer="holds", within="")), tmp_path / "r.html")
    page, seen = visit(path, width, 800, f"#theme={theme}")
    one = page.locator("#experiment-0")
    text = one.inner_text()
    for part in ("Does the width shrink", "It shrinks.", "holds within n <= 4", "it fell from 0.5", "M-INF-1"):
        assert part in text
    drawn = one.locator("svg.partita-figure")
    assert drawn.count() == (2 if width == 390 else 1)  # panels below each other where the screen is narrow
    box = drawn.first.bounding_box()
    assert box["width"] > 300 and box["height"] > 100
    line = one.locator("path.line.c0").first
    style = line.evaluate("n => { const s = getComputedStyle(n); return [s.stroke, s.fill]; }")
    assert style == [{"light": "rgb(59, 111, 182)", "dark": "rgb(122, 167, 230)"}[theme], "none"]
    assert one.locator("text.title").count() == 0  # the question stands above, once
    assert "No figure was kept" in page.locator("#experiment-1").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    seen.assert_quiet()


def test_the_figure_is_saved_whole(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(record(row(figure=picture())), tmp_path / "r.html"))
    with page.expect_download() as got:
        page.locator("#experiment-0 .tools button", has_text="SVG").click()
    text = Path(got.value.path()).read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg") and ".partita-figure .line" in text
    with page.expect_download() as got:
        page.locator("#experiment-0 .tools button", has_text="CSV").click()
    rows = list(csv.reader(io.StringIO(Path(got.value.path()).read_text())))
    assert [r[1:] for r in rows[1:4]] == [["1.0", "0.5"], ["2.0", "0.25"], ["4.0", "0.125"]]


def test_hostile_names_and_figures_stay_text(tmp_path: Path, visit: Any) -> None:
    wrapped = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" onload="alert(1)">'
    bad = (
        wrapped + "<script>alert(2)</script><style>body{display:none}</style>"
        '<a href="javascript:alert(3)"><text x="1" y="5">click</text></a><image href="http://example.invalid/x.png"/>'
        '<g style="fill:red" onclick="alert(4)"><text x="1" y="5" class="title">kept</text>'
        '<foreignObject><iframe xmlns="http://www.w3.org/1999/xhtml" src="http://example.invalid/"/></foreignObject>'
        "</g></svg>"
    )
    rows = [
        row(EVIL, picture(EVIL), question=EVIL, expected=EVIL, evidence=EVIL, answer=EVIL, ids=[EVIL], size=EVIL),
        row("bad", bad),
        row("broken", "<svg xmlns="),
        row("html", "<html><body>no</body></html>"),
        row("large", picture() + " " * LARGEST),
        row(7, 3.5, question=None, ids="M", cells="many"),  # type: ignore[arg-type]
    ]
    page, seen = visit(write(record(*rows), tmp_path / "r.html"))
    assert page.locator("#studies figure").count() == len(rows)
    assert page.locator("img, iframe").count() == 0
    assert page.locator("#studies :is(image, foreignObject, script, style, a)").count() == 0
    assert page.evaluate("[...document.querySelectorAll('#studies [style], #studies [onload]')].length") == 0
    assert "</script><img" in page.locator("#experiment-0").inner_text()
    assert page.locator("#experiment-1 svg.partita-figure, #experiment-1 .body svg").first.text_content() == "kept"
    assert "could not be read" in page.locator("#experiment-2").inner_text()
    assert "could not be read" in page.locator("#experiment-3").inner_text()
    assert "No figure was kept" in page.locator("#experiment-4").inner_text()
    seen.assert_quiet()
    fallback = render(record(*rows)).split("<noscript>")[1].split("</noscript>")[0]
    assert "<img" not in fallback and "&lt;/script&gt;" in fallback


def test_a_record_keeps_its_studies(tmp_path: Path, visit: Any) -> None:
    path = record(row(figure=picture())).save(tmp_path / "run.jsonl")
    again = load_record(path)
    assert [r for r in again.studies if r["study"] == KIND] == [row(figure=picture())]
    page, _ = visit(again.report(tmp_path / "r.html"))
    assert page.locator("#experiment-0 svg.partita-figure").is_visible()
    page, _ = visit(write(synthetic.record(1, 1, 3), tmp_path / "without.html"))
    assert "No experiment is part of this record" in page.locator("#studies").inner_text()


def test_report_takes_a_folder_of_studies(tmp_path: Path, visit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    studies, run = tmp_path / "studies", str(synthetic.record(1, 2, 3).save(tmp_path / "run.jsonl"))
    out = str(tmp_path / "r.html")
    assert gather(studies) == []
    assert main(["report", run, "-o", out, "--studies", str(studies)]) == 2 and "holds no" in capsys.readouterr().err
    studies.mkdir()
    kept = {k: v for k, v in row().items() if k not in ("study", "name", "size", "figure")}
    verdicts = {"one": {"tiny": {**kept, "evidence": "small"}, "quick": kept}, "two": {"tiny": kept}}
    (studies / "verdicts.json").write_text(json.dumps(verdicts))
    (studies / "one-quick.svg").write_text(picture(), encoding="utf-8")
    assert [(r["name"], r["size"]) for r in gather(studies)] == [("one", "quick"), ("two", "tiny")]
    assert main(["report", run, "-o", out, "--studies", str(studies)]) == 0
    page, seen = visit(Path(out))
    assert page.locator("#studies figure").count() == 2 and page.locator("#experiment-0 path.line").count() > 0
    seen.assert_quiet()


def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    studies.mkdir()
    (tmp_path / "secret-quick.svg").write_text(picture("secret"), encoding="utf-8")
    (studies / "linked-quick.svg").symlink_to(tmp_path / "secret-quick.svg")
    kept = {k: v for k, v in row().items() if k not in ("study", "size", "figure")}
    verdicts = {"../secret": {"quick": kept}, "linked": {"quick": kept}, "odd": 3, "/etc/passwd": {"quick": kept}}
    (studies / "verdicts.json").write_text(json.dumps(verdicts))
    (found,) = gather(studies)
    assert found["name"] == "linked" and found["figure"] is None
    (studies / "verdicts.json").write_text("[1]")
    assert gather(studies) == []


def test_verdicts_of_several_runs_at_once_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fcntl", reason="no file locks on this system")
    real = json.loads

    def slow(text: str) -> Any:
        found = real(text)
        time.sleep(0.02)  # whoever reads now and writes later would lose what was written in between
        return found

    monkeypatch.setattr(study.json, "loads", slow)
    base, verdict = find("positions"), Verdict("holds", "seen")
    (tmp_path / "verdicts.json").write_text("{}")

    def remember(name: str) -> None:
        one = replace(base, name=name)
        study._remember(tmp_path, one, "tiny", verdict, Store(tmp_path, name, "tiny"), [])

    names = [f"study{i}" for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(remember, names))
    assert sorted(real((tmp_path / "verdicts.json").read_text())) == names
    assert [p.name for p in tmp_path.iterdir()] == ["verdicts.json"]
