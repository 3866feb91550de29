"""Figure: what an experiment shows, as plain data, and the SVG or PNG that matplotlib draws of it.

The title is the question; bands are intervals over seeds; theory is dashed; context is grey. What cannot be shown
(nothing finite, nothing positive on a log axis) is counted under the panel; an empty panel says that it is empty. The
same figure gives the same text: identifiers are hashed with a fixed salt, and no date is written. The points are in the
SVG's description as comma-separated values.
"""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from partita.errors import ShapeError

__all__ = ["Figure", "Kind", "Line", "Panel", "png", "svg"]

COLOURS = ("#3b6fb6", "#b26a00", "#2e7d4f", "#8a4fa3", "#b8476a")
INK, SOFT, GREY, HAIR = "#1b1e23", "#63666b", "#b4b8bd", "#dcdddf"
STYLE = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: text has the same width on every machine
    "font.size": 10,
    "text.parse_math": False,  # a dollar sign is a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "partita",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": HAIR,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "ytick.major.size": 0,
    "legend.frameon": False,
}
Kind = Literal["data", "theory", "context", "points"]  # theory is dashed, context grey, points unjoined
MARKED = 64  # lines of more points than this carry no dots


@dataclass(frozen=True)
class Line:
    """Points joined in order. `low` and `high` are the ends of an interval at each point.

    A theory line with the label of a data line is drawn in its colour and not labelled again.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    kind: Kind = "data"


@dataclass(frozen=True)
class Panel:
    """One pair of axes. At most five data lines: the rest is context."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Figure:
    """One to four panels under the question they answer; `note` says how many rows and seeds stand behind it."""

    title: str
    panels: Sequence[Panel]
    note: str = ""


def svg(figure: Figure) -> str:
    """The figure as SVG text: no script, no link, no request.

    >>> svg(Figure("Why?", [])).startswith("<svg")
    True
    """
    out = io.StringIO()
    with _drawn(figure) as drawn:
        drawn.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    text = text[text.index("<svg") :]
    points = io.StringIO()
    table = csv.writer(points, lineterminator="\n")
    table.writerow(["panel", "line", "x", "y", "low", "high"])
    for title, line in ((panel.title, line) for panel in figure.panels for line in panel.lines):
        rows = itertools.zip_longest(line.x, line.y, line.low or (), line.high or (), fillvalue="")
        table.writerows((title, line.label, *row) for row in rows)
    head = f'<svg role="img" aria-label="{escape(_legal(figure.title))}"'
    about = f">\n <desc>{escape(_legal(points.getvalue(), kept=chr(10)))}</desc>"
    return text.replace("<svg", head, 1).replace(">", about, 1)


def png(figure: Figure, path: str | Path) -> None:
    """The figure as a PNG file, two pixels to a point."""
    with _drawn(figure) as drawn:
        drawn.savefig(path, format="png", dpi=144)


@contextmanager
def _drawn(figure: Figure) -> Iterator[Any]:
    """A figure of matplotlib's, under our style; loaded here, since a list of studies needs no plotting library."""
    matplotlib: Any = importlib.import_module("matplotlib")
    canvas: Any = importlib.import_module("matplotlib.figure").Figure
    columns = min(2, max(1, len(figure.panels)))
    rows = max(1, math.ceil(len(figure.panels) / columns))
    with matplotlib.rc_context(STYLE):
        drawn = canvas(figsize=(11.5 if columns > 1 else 9.0, 4.2 * rows + 0.8), layout="constrained")
        title = textwrap.fill(_legal(figure.title), 80 if columns > 1 else 62, max_lines=3, placeholder=" …")
        drawn.suptitle(title, x=0.01, ha="left", color=INK, size=15)
        note = textwrap.fill(_legal(figure.note), 150 if columns > 1 else 115, max_lines=3, placeholder=" …")
        drawn.supxlabel(note, x=0.01, ha="left", color=SOFT, size=9)
        for at, panel in enumerate(figure.panels, 1):
            _panel(drawn.add_subplot(rows, columns, at), panel)
        if not figure.panels:
            drawn.text(0.5, 0.5, "nothing to show: the figure has no panels", color=SOFT)
        yield drawn


def _panel(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        _check(line, panel.title)
    title = textwrap.fill(_legal(panel.title), 60, max_lines=2, placeholder=" …")
    axes.set_title(title, loc="left", color=INK, size=11)
    seen = [_points(line, panel) for line in panel.lines]
    missing = sum(len(line.x) - len(points) for line, points in zip(panel.lines, seen, strict=True))
    if not any(seen):
        why = "no lines were given" if not panel.lines else "the lines hold no points"
        if missing:
            log = panel.log_x or panel.log_y
            why = "no finite positive values (log axis)" if log else "no finite values"
        axes.text(0.5, 0.5, f"nothing to show: {why}", ha="center", color=SOFT, transform=axes.transAxes)
        axes.set_axis_off()
        return
    colours = _colours(panel.lines)
    alone = len({line.label for line in panel.lines if line.kind == "theory"}) < 2
    named: dict[str, tuple[bool, float, Any]] = {}
    order = {"context": 0, "data": 1, "theory": 2, "points": 3}
    for line, points in sorted(zip(panel.lines, seen, strict=True), key=lambda pair: order[pair[0].kind]):
        if not points:
            continue
        colour = SOFT if line.kind == "theory" and alone else colours[line.label]
        mark = _marks(axes, line, points, colour)
        if line.label and (line.label not in named or line.kind == "data"):
            named[line.label] = (colour == GREY, -points[-1][1], mark)
    _scales(axes, panel, seen)
    remarks = [f"nothing to show for {line.label}" for line, p in zip(panel.lines, seen, strict=True) if not p]
    if missing:
        kind = "not finite, or not positive on a log axis" if panel.log_x or panel.log_y else "not finite"
        remarks.append(f"{missing} point{'s' * (missing > 1)} left out: {kind}")
    axes.set_xlabel("\n".join([_log_said(panel.x_label, panel.log_x), *(_legal(r)[:90] for r in remarks)]))
    axes.set_ylabel(_log_said(panel.y_label, panel.log_y))
    grey = {label: mark for label, (grey, _, mark) in named.items() if grey}
    if grey:  # cannot be distinguished: one name for all of them
        named = {label: found for label, found in named.items() if label not in grey}
        named[", ".join(grey)] = (True, math.inf, next(iter(grey.values())))
    kept = sorted(named.items(), key=lambda item: item[1][1])  # from top to bottom, as the lines end
    names = [textwrap.fill(_legal(label), 24, max_lines=2, placeholder=" …") for label, _ in kept]
    if names:
        marks = [mark for _, (_, _, mark) in kept]
        axes.legend(marks, names, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=SOFT, fontsize=9)


def _check(line: Line, title: str) -> None:
    sizes = {len(v) for v in (line.x, line.y, line.low, line.high) if v is not None}
    if len(sizes) != 1 or (line.low is None) != (line.high is None):
        raise ShapeError(
            f"line {line.label!r} of panel {title!r} needs the same number of y and x, and low and high both "
            f"or neither; got {len(line.x)} x, {len(line.y)} y, "
            f"{[None if v is None else len(v) for v in (line.low, line.high)]}."
        )


_Point = tuple[float, float, float, float]  # x, y, low, high; an end of an interval that cannot be shown is y


def _points(line: Line, panel: Panel) -> list[_Point]:
    """What of a line can be shown on these axes."""
    found: list[_Point] = []
    for x, y, *ends in zip(line.x, line.y, line.low or line.y, line.high or line.y, strict=True):
        if _shown(x, panel.log_x) and _shown(y, panel.log_y):
            low, high = ends if _shown(ends[0], False) and _shown(ends[1], panel.log_y) else (y, y)
            found.append((float(x), float(y), float(low), float(high)))
    return found


def _shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and abs(value) <= 1e300 and (value > 0 or not log)


def _colours(lines: Sequence[Line]) -> dict[str, str]:
    """label -> colour: the first five of data and points have one of their own, the rest is context."""
    strong = dict.fromkeys(line.label for line in lines if line.kind in ("data", "points"))
    found = {label: COLOURS[k] if k < len(COLOURS) else GREY for k, label in enumerate(strong)}
    for line in lines:
        found.setdefault(line.label, GREY if line.kind == "context" else SOFT)
    return found


def _marks(axes: Any, line: Line, points: Sequence[_Point], colour: str) -> Any:
    """The line, its points and its band; what stands for it among the names."""
    x, y, low, high = zip(*points, strict=True)
    joined = line.kind != "points" and len(points) > 1
    if (low, high) != (y, y):
        if joined:
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
        else:
            axes.vlines(x, low, high, color=colour, linewidth=1.5)
    style = "none" if not joined else (0, (4, 3)) if line.kind == "theory" else "solid"
    dots = len(points) == 1 or (line.kind in ("data", "points") and (len(points) <= MARKED or not joined))
    width = 1.0 if line.kind == "context" else 1.6
    (mark,) = axes.plot(x, y, color=colour, linestyle=style, linewidth=width, marker="o" if dots else "", markersize=4)
    return mark


def _scales(axes: Any, panel: Panel, seen: Sequence[Sequence[_Point]]) -> None:
    """Log axes with plain numbers, lengths in powers of two; intervals do not dwarf the values."""
    ticker: Any = importlib.import_module("matplotlib.ticker")
    for axis, log, at in ((axes.xaxis, panel.log_x, 0), (axes.yaxis, panel.log_y, 1)):
        if not log:
            continue
        values = sorted({point[at] for points in seen for point in points})
        (axes.set_xscale if at == 0 else axes.set_yscale)("log")
        lengths = len(values) > 1 and all(v >= 1 and math.log2(v).is_integer() for v in values)
        every = math.ceil(len(values) / 7)
        subs = (1, 2, 5) if values[-1] < 1000 * values[0] else (1,)
        axis.set_major_locator(ticker.FixedLocator(values[::every]) if lengths else ticker.LogLocator(subs=subs))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(ticker.NullLocator())
    y = [point[1] for points in seen for point in points]
    ends = [end for points in seen for point in points for end in point[2:]]
    span = max(y) - min(y) or max(abs(v) for v in y) or 1.0
    floor, ceiling = (min(y) / 10, max(y) * 10) if panel.log_y else (min(y) - span, max(y) + span)
    axes.set_ylim(floor if min(ends) < floor else None, ceiling if max(ends) > ceiling else None)


def _log_said(label: str, log: bool) -> str:
    return _legal(f"{label} (log scale)" if log else label)


def _legal(text: str, kept: str = "") -> str:
    """Text that XML takes: without the characters that XML forbids."""
    legal = (c if c >= " " or c in kept else " " for c in text if not "\ud800" <= c <= "\udfff")
    return "".join(c for c in legal if c not in "\ufffe\uffff")
