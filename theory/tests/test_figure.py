"""Figures: well-formed whatever the labels, the same every time, every point kept, empty panels that say so."""

from __future__ import annotations

import csv
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from partita.errors import ShapeError
from partita.monitor.report.studies import readable
from partita_theory.figure import COLOURS, GREY, SOFT, Figure, Line, Panel, png, svg

SVG = "{http://www.w3.org/2000/svg}"
N = [16, 64, 256, 1024, 4096]


def text_of(*lines: Line, log_x: bool = False, log_y: bool = False) -> str:
    return svg(Figure("Why?", [Panel("p", "x", "y", lines, log_x, log_y)]))


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]


def drawn(*lines: Line, log_x: bool = False, log_y: bool = False) -> ElementTree.Element:
    return ElementTree.fromstring(text_of(*lines, log_x=log_x, log_y=log_y))


def strokes(text: str) -> list[str]:
    """The colours of the joined lines, in the order in which they are drawn: clipped to the axes, without a fill."""
    return re.findall(r'clip-path="url\(#\w+\)" style="fill: none;[^"]*stroke: (#\w+)[^"]*stroke-width: 1\.6', text)


def test_the_same_figure_gives_the_same_text() -> None:
    figure = Figure("Why?", [Panel("p", "x", "y", [Line("a", N, N, [1.0] * 5, [9.0] * 5)], log_x=True)], "a note")
    assert svg(figure) == svg(figure)
    assert "date" not in svg(figure).lower() and "matplotlib v" not in svg(figure).lower()


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("log_y", [False, True])
def test_points_are_drawn_and_listed(log_x: bool, log_y: bool) -> None:
    x, y = [3.0, 17.0, 230.0, 4000.0], [0.02, 0.7, 5.5, 61.0]
    text = text_of(Line("a", x, y), log_x=log_x, log_y=log_y)
    assert strokes(text) == [COLOURS[0]]
    (path,) = re.findall(r'<path d="([^"]*)" clip-path="url\(#\w+\)" style="fill: none; stroke: #3b6fb6', text)
    corners = [tuple(map(float, pair)) for pair in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]
    for at, values, log in ((0, x, log_x), (1, y, log_y)):  # as far apart as the numbers, or their logarithms
        place, want = [corner[at] for corner in corners], [math.log(v) if log else v for v in values]
        share = [(p - place[0]) / (place[-1] - place[0]) for p in place]
        assert share == pytest.approx([(w - want[0]) / (want[-1] - want[0]) for w in want], abs=1e-3)
    rows = list(csv.reader((ElementTree.fromstring(text).findtext(f"{SVG}desc") or "").splitlines()))
    assert [(row[1], float(row[2]), float(row[3])) for row in rows[1:]] == [("a", *p) for p in zip(x, y, strict=True)]


def test_the_report_takes_it() -> None:
    text = text_of(Line("a", [1, 2], [3.0, 4.0], [2.0, 3.0], [4.0, 5.0]))
    kept, points = readable(text)
    assert kept == text
    assert points[0] == ["panel", "line", "x", "y", "low", "high"]
    assert points[1:] == [["p", "a", "1", "3.0", "2.0", "4.0"], ["p", "a", "2", "4.0", "3.0", "5.0"]]


def test_hostile_text_stays_text() -> None:
    evil = '</text><script>alert("1")</script>&amp;\x00\ud800 \'" $x^2$ \\'
    figure = Figure(evil, [Panel(evil, evil, evil, [Line(evil, [1, 2], [1, 2])])], evil)
    root = ElementTree.fromstring(svg(figure).encode("utf-8"))
    assert not list(root.iter(f"{SVG}script"))
    assert any("<script>" in t and "$x^2$" in t for t in texts(root))


def test_no_links_no_scripts_no_fonts() -> None:
    text = text_of(Line("a", N, N))
    assert not re.search(r"<script|@import|@font-face|<image|<!DOCTYPE", text)
    assert not re.search(r'(?:href="|url\()(?!#)', text)


def test_values_that_cannot_be_shown_are_left_out_and_counted() -> None:
    said = texts(drawn(Line("a", [1, 2, 3, 4], [1.0, math.nan, math.inf, 2.0]), Line("gone", [1], [math.nan])))
    assert "3 points left out: not finite" in said and "nothing to show for gone" in said
    said = texts(drawn(Line("a", [0, 1, 2], [1.0, -1.0, 2.0]), log_x=True, log_y=True))
    assert "2 points left out: not finite, or not positive on a log axis" in said


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "no lines were given"),
        ([Line("a", [], [])], "the lines hold no points"),
        ([Line("a", [1], [math.nan])], "no finite values"),
    ],
)
def test_an_empty_panel_says_why(lines: list[Line], why: str) -> None:
    assert f"nothing to show: {why}" in texts(drawn(*lines))


def test_a_figure_without_panels_says_so() -> None:
    assert any("no panels" in t for t in texts(ElementTree.fromstring(svg(Figure("Why?", [])))))


@pytest.mark.parametrize("value", [0.0, -3.5, 1e-300, 1e200])
def test_a_single_point(value: float) -> None:
    text = text_of(Line("a", [2.0], [value], [value - 1], [value + 1]))
    assert "nan" not in text and COLOURS[0] in text


def test_an_interval_of_one_run_is_no_band_and_a_wide_one_does_not_dwarf_the_values() -> None:
    assert "FillBetween" not in text_of(Line("a", [1, 2], [1.0, 2.0], [-math.inf] * 2, [math.inf] * 2))
    text = text_of(Line("a", [1, 2], [1.0, 2.0], [-900.0] * 2, [900.0] * 2))
    assert "FillBetween" in text and "800" not in texts(ElementTree.fromstring(text))


def test_five_lines_have_colours_and_the_rest_is_grey() -> None:
    text = text_of(*(Line(f"{k}", [1, 2], [k, k]) for k in range(7)))
    assert strokes(text)[:7] == [*COLOURS, GREY, GREY]


def test_theory_is_dashed_and_shares_the_colour_of_its_line() -> None:
    pairs = [Line(name, [1, 2], [1, 2], kind=kind) for kind in ("data", "theory") for name in ("a", "b")]
    text = text_of(*pairs)
    assert strokes(text)[:4] == [*COLOURS[:2]] * 2 and "stroke-dasharray" in text
    assert texts(ElementTree.fromstring(text)).count("a") == 1
    assert SOFT in strokes(text_of(Line("a", [1, 2], [1, 2]), Line("a", [1, 2], [1, 3], kind="theory")))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_panels_stay_inside_the_figure(count: int) -> None:
    panel = Panel("a title " * 12, "x", "y", [Line("a long label that must be cut somewhere " * 3, N, N)], log_x=True)
    root = ElementTree.fromstring(svg(Figure("A long question? " * 20, [panel] * count, "note " * 80)))
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    found = 0
    for text in root.iter(f"{SVG}text"):
        shift = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", text.attrib.get("transform", ""))
        x, y = map(float, shift.groups() if shift else (text.attrib["x"], text.attrib["y"]))
        assert left <= x <= left + width and top <= y <= top + height
        found += "a title" in "".join(text.itertext())
    assert found >= count


def test_a_log_axis_says_so_and_counts_lengths_in_powers_of_two() -> None:
    said = texts(drawn(Line("a", N, N), log_x=True))
    assert "x (log scale)" in said and [t for t in said if t in map(str, N)] == [str(n) for n in N]


@pytest.mark.parametrize("values", [(0.0, 0.0), (1.0, 1.0 + 1e-9), (-7.0, 3.0), (1e-9, 5.0), (0.05, 1.0), (3.0, 4.0)])
@pytest.mark.parametrize("log", [False, True])
def test_every_axis_has_two_ticks(values: tuple[float, float], log: bool) -> None:
    if log and (min(values) <= 0 or max(values) < 1.001 * min(values)):
        return
    said = texts(drawn(Line("a", list(values), [1.0, 1.0]), log_x=log))
    axis = said[: said.index("x (log scale)" if log else "x")]
    assert 2 <= len(axis) <= 14


def test_a_png_is_written(tmp_path: Path) -> None:
    png(Figure("Why?", [Panel("p", "x", "y", [Line("a", N, N)])]), tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_lines_of_unequal_lengths_are_refused() -> None:
    with pytest.raises(ShapeError, match="the same number of y and x"):
        drawn(Line("a", [1, 2], [1]))
    with pytest.raises(ShapeError, match="both or neither"):
        drawn(Line("a", [1], [1], low=[0]))
