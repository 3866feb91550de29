"""The studies of a report: question, expectation and result, with figures as images."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import pytest

from partita.cli import main
from partita.monitor import Record, load_record
from partita.monitor.report import render, write
from partita.monitor.report.studies import KIND, LARGEST, gather
from tests.pages import synthetic
from tests.pages.browser import table

EVIL = synthetic.HOSTILE


def picture(label: str = "measured") -> str:
    """A figure with a style of its own, 820 by 400, and its points in its description."""
    text = escape("".join(c for c in label if c.isprintable() and not "\ud800" <= c <= "\udfff"))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 400" width="820" height="400">'
        f"<desc>line,x,y\nmeasured,1.0,0.5\nmeasured,2.0,0.25\nmeasured,4.0,0.125</desc><title>{text}</title>"
        '<style>path{fill:none;stroke:#3b6fb6}</style><path style="stroke-width:2" d="M0 0L820 400"/></svg>'
    )


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
    drawn = one.locator("img")
    assert drawn.evaluate("n => [n.naturalWidth, n.naturalHeight]") == [820, 400]
    assert drawn.get_attribute("alt") == "Does the width shrink with the scale?"
    box = drawn.bounding_box()
    assert box["width"] > 300 and box["height"] > 100
    assert "No figure was kept" in page.locator("#experiment-1").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    seen.assert_quiet()


def test_the_figure_is_saved_whole(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(record(row(figure=picture())), tmp_path / "r.html"))
    with page.expect_download() as got:
        page.locator("#experiment-0 .tools button", has_text="SVG").click()
    text = Path(got.value.path()).read_text(encoding="utf-8")
    assert text == picture()
    rows = table(page, "#experiment-0")
    assert [r[1:] for r in rows[1:4]] == [["1.0", "0.5"], ["2.0", "0.25"], ["4.0", "0.125"]]


def test_hostile_names_stay_text_and_hostile_figures_images(tmp_path: Path, visit: Any) -> None:
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
    assert page.locator("iframe").count() == 0
    shown = page.locator("#studies img").evaluate_all("all => all.map(n => [n.src.slice(0, 26), n.naturalWidth > 0])")
    assert shown == [["data:image/svg+xml;base64,", True]] * 2
    assert page.locator("#studies :is(image, foreignObject, script, style, a)").count() == 0
    assert page.evaluate("[...document.querySelectorAll('#studies [style], #studies [onload]')].length") == 0
    assert "</script><img" in page.locator("#experiment-0").inner_text()
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
    assert page.locator("#experiment-0 img").is_visible()
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
    assert page.locator("#studies figure").count() == 2 and page.locator("#experiment-0 img").count() == 1
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
