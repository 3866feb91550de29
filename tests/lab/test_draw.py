"""Figures: well-formed whatever the labels, every point where its numbers say, empty panels that say so."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from partita.errors import ShapeError
from partita.lab.axis import fit, written
from partita.lab.draw import svg
from partita.lab.figure import Figure, Line, Panel

SVG = "{http://www.w3.org/2000/svg}"
N = [16, 64, 256, 1024, 4096]


def drawn(*lines: Line, log_x: bool = False, log_y: bool = False) -> ElementTree.Element:
    return ElementTree.fromstring(svg(Figure("Why?", [Panel("p", "x", "y", lines, log_x, log_y)])))


def texts(root: ElementTree.Element) -> list[str]:
    return [t.text or "" for t in root.iter(f"{SVG}text")]


def scale_from_ticks(root: ElementTree.Element, along: str, log: bool):
    """number -> pixel, from the first and the last tick alone: the ticks are what a reader measures with."""
    ticks = [t for t in root.iter(f"{SVG}text") if f"data-{along}" in t.attrib]
    shift = 4.0 if along == "y" else 0.0  # tick labels hang a little below their line
    (a, pa), (b, pb) = (
        (float(t.attrib[f"data-{along}"]), float(t.attrib[along]) - shift) for t in (ticks[0], ticks[-1])
    )
    f = math.log if log else float
    return lambda v: pa + (pb - pa) * (f(v) - f(a)) / (f(b) - f(a))


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("log_y", [False, True])
def test_points_stand_where_the_ticks_put_their_numbers(log_x: bool, log_y: bool) -> None:
    x, y = [3.0, 17.0, 230.0, 4000.0], [0.02, 0.7, 5.5, 61.0]
    root = drawn(Line("a", x, y), log_x=log_x, log_y=log_y)
    right, up = scale_from_ticks(root, "x", log_x), scale_from_ticks(root, "y", log_y)
    dots = list(root.iter(f"{SVG}circle"))
    assert [float(d.attrib["data-x"]) for d in dots] == x and [float(d.attrib["data-y"]) for d in dots] == y
    for dot, a, b in zip(dots, x, y, strict=True):
        assert float(dot.attrib["cx"]) == pytest.approx(right(a), abs=0.02)
        assert float(dot.attrib["cy"]) == pytest.approx(up(b), abs=0.02)
    path = next(p.attrib["d"] for p in root.iter(f"{SVG}path") if p.attrib["class"].startswith("line"))
    corners = [tuple(map(float, c.split())) for c in path[1:].split("L")]
    assert corners == [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in dots]


def test_hostile_text_stays_text() -> None:
    evil = '</text><script>alert("1")</script>&amp;\x00\ud800 \'"'
    figure = Figure(evil, [Panel(evil, evil, evil, [Line(evil, [1, 2], [1, 2])])], evil)
    root = ElementTree.fromstring(svg(figure).encode("utf-8"))
    assert not list(root.iter(f"{SVG}script"))
    assert any("<script>" in t for t in texts(root))


def test_no_links_no_scripts_no_fonts() -> None:
    text = svg(Figure("Why?", [Panel("p", "x", "y", [Line("a", N, N)])]))
    assert not re.search(r"url\(|href|<script|@import|@font-face", text)
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "prefers-color-scheme:dark" in text
    for fixed in ("light", "dark"):
        assert "var(" not in svg(Figure("Why?", []), theme=fixed)


def test_values_that_cannot_be_shown_are_left_out_and_counted() -> None:
    root = drawn(Line("a", [1, 2, 3, 4], [1.0, math.nan, math.inf, 2.0]), Line("gone", [1], [math.nan]))
    assert len(list(root.iter(f"{SVG}circle"))) == 2
    assert "3 points left out: not finite" in texts(root) and "nothing to show for gone" in texts(root)
    root = drawn(Line("a", [0, 1, 2], [1.0, -1.0, 2.0]), log_x=True, log_y=True)
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    assert "2 points left out: not finite, or not positive on a log axis" in texts(root)


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
    root = drawn(Line("a", [2.0], [value], [value - 1], [value + 1]))
    (dot,) = root.iter(f"{SVG}circle")
    assert float(dot.attrib["data-y"]) == value and math.isfinite(float(dot.attrib["cy"]))


def test_an_interval_of_one_run_is_no_band() -> None:
    root = drawn(Line("a", [1, 2], [1.0, 2.0], [-math.inf] * 2, [math.inf] * 2))
    assert not [p for p in root.iter(f"{SVG}path") if "band" in p.attrib["class"]]


def test_bands_touch_their_ends_and_zero_is_an_end() -> None:
    root = drawn(Line("a", [1, 2], [-1.0, -2.0], [-1.5, -2.5], [0.0, -1.5]))
    up = scale_from_ticks(root, "y", False)
    (band,) = (p for p in root.iter(f"{SVG}path") if "band" in p.attrib["class"])
    heights = [float(c.split()[1]) for c in band.attrib["d"][1:-1].split("L")]
    assert heights == pytest.approx([up(0.0), up(-1.5), up(-2.5), up(-1.5)], abs=0.02)


def test_labels_do_not_overlap() -> None:
    lines = [Line(f"line {k}", [1, 2], [1.0, 2.0 + k / 1e4]) for k in range(5)]
    lines += [Line(f"context {k}", [1, 2], [1.0, 2.0], kind="context") for k in range(40)]
    root = drawn(*lines, Line("theory", [1, 2], [1.0, 2.0], kind="theory"))
    names = [t for t in root.iter(f"{SVG}text") if "name" in t.attrib["class"]]
    said = [t.text for t in names]
    assert all(f"line {k}" in said for k in range(5)) and "theory" in said
    heights = sorted(float(t.attrib["y"]) for t in names)
    assert min(b - a for a, b in pairwise(heights)) > 14.9


def test_five_lines_have_colours_and_the_rest_is_grey() -> None:
    root = drawn(*(Line(f"{k}", [1, 2], [k, k]) for k in range(7)))
    kinds = [p.attrib["class"] for p in root.iter(f"{SVG}path") if p.attrib["class"].startswith("line")]
    assert kinds == [f"line c{k}" for k in range(5)] + ["line context"] * 2


def test_theory_is_dashed_and_shares_the_colour_of_its_line() -> None:
    pairs = [Line(name, [1, 2], [1, 2], kind=kind) for kind in ("data", "theory") for name in ("a", "b")]
    kinds = [p.attrib["class"] for p in drawn(*pairs).iter(f"{SVG}path") if "line" in p.attrib["class"]]
    assert kinds == ["line c0", "line c1", "line c0 dash", "line c1 dash"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_panels_stay_inside_the_figure_and_apart(count: int) -> None:
    panel = Panel("a title " * 12, "x", "y", [Line("a long label that must be cut somewhere " * 3, N, N)], log_x=True)
    root = ElementTree.fromstring(svg(Figure("A long question? " * 20, [panel] * count, "note " * 80)))
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    for text in root.iter(f"{SVG}text"):
        assert left <= float(text.attrib["x"]) <= left + width and top <= float(text.attrib["y"]) <= top + height
    assert sum("p" in t.attrib["class"] and t.attrib["class"] == "panel" for t in root.iter(f"{SVG}text")) >= count


def test_a_log_axis_says_so_and_counts_lengths_in_powers_of_two() -> None:
    root = drawn(Line("a", N, N), log_x=True)
    assert "x (log scale)" in texts(root)
    assert [t.text for t in root.iter(f"{SVG}text") if "data-x" in t.attrib] == [str(n) for n in N]


@pytest.mark.parametrize("values", [(0.0, 0.0), (1.0, 1.0 + 1e-15), (-7.0, 3.0), (1e-9, 5.0), (0.05, 1.0), (3.0, 4.0)])
@pytest.mark.parametrize("log", [False, True])
def test_every_axis_has_two_ticks_inside_it(values: tuple[float, float], log: bool) -> None:
    axis = fit(values, log, 0.0, 100.0)
    assert 2 <= len(axis.ticks) <= 12 and len({written(t) for t in axis.ticks}) == len(axis.ticks)
    assert all(axis.low <= t <= axis.high * (1 + 1e-9) for t in axis.ticks)


def test_lines_of_unequal_lengths_are_refused() -> None:
    with pytest.raises(ShapeError, match="as many y as x"):
        drawn(Line("a", [1, 2], [1]))
    with pytest.raises(ShapeError, match="both or neither"):
        drawn(Line("a", [1], [1], low=[0]))
