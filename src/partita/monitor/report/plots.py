"""Three figures of a run, as SVG without a plotting library.

entropy   H / log n over the run, layer by layer
scores    the largest score over the run, layer by layer, with the level that costs digits in half precision
width     exp(H) against the number of keys a row may see, layer by layer, with the line of an average over all keys
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from partita.errors import ValueRangeError
from partita.monitor.files import replace_file
from partita.monitor.findings import Thresholds
from partita.monitor.record import Record, band_sums

__all__ = ["KINDS", "Plot", "plot"]

MOST = 5  # lines in colour; the others are grey
COLOURS = ("#3b6fb6", "#b26a00", "#2e7d4f", "#8a4fa3", "#b8476a")
GREY, SOFT = "#b4b8bd", "#63666b"
LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT = 60, 660, 106, 400, 820, 480


Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points joined in order: of a layer, of one in the background, or (dashed) of a level to compare with."""

    label: str
    points: Sequence[Point]
    kind: str = "data"  # data, context, theory


@dataclass(frozen=True, repr=False)
class Plot:
    """An SVG that notebooks show; `save(path)` writes it, `str` is its text."""

    title: str
    note: str
    panel: str
    across: str  # the name of the axis
    up: str
    lines: Sequence[Line]
    log: bool = False

    def __str__(self) -> str:
        return _svg(self)

    def __repr__(self) -> str:
        return f"<plot {self.title!r}: in a notebook it shows itself; elsewhere .save('figure.svg')>"

    def _repr_html_(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> Path:
        return replace_file(path, str(self))


def plot(record: Record, kind: str = "entropy") -> Plot:
    """One of the figures by name."""
    if kind not in KINDS:
        raise ValueRangeError(f"plot draws {', '.join(KINDS)}; got {kind!r}.")
    if not record.blocks:
        raise ValueRangeError("nothing to plot: no attention was recorded. Call the model while it is watched.")
    return KINDS[kind](record.by_phase()[0][1])


def _note(record: Record) -> str:
    heads, steps = sum(s.heads for s in record.sites), len({b.step for b in record.blocks})
    units = f"{record.unit}{'s' * (steps != 1)}"
    return f"{record.title[:80]}: {heads} heads in {len(record.sites)} layers, {steps} {units}"


def _over_time(record: Record, column: str) -> list[Line]:
    layers: dict[int, dict[int, float]] = {}
    for block in record.blocks:
        if (value := block.overall(column)) is not None:
            layers.setdefault(block.layer, {})[block.step] = value
    if all(len(steps) < 2 for steps in layers.values()):  # one look: the layers are the axis
        return [Line("", [(n, next(iter(steps.values()))) for n, steps in sorted(layers.items())])]
    return [_line(n, sorted(steps.items()), len(layers)) for n, steps in sorted(layers.items())]


def _line(layer: int, points: Sequence[Point], layers: int) -> Line:
    """The first and last layers and those between them in equal strides are in colour."""
    chosen = {round(i * (layers - 1) / max(1, MOST - 1)) for i in range(MOST)}
    return Line(f"layer {layer}", points, "data" if layer in chosen else "context")


def _axis(record: Record) -> str:
    return record.unit if len({b.step for b in record.blocks}) > 1 else "layer"


def entropy(record: Record) -> Plot:
    note, panel = (
        f"{_note(record)}; 1 is an average over all keys, 0 is one key",
        "mean over heads and rows of H / log n",
    )
    lines = _over_time(record, "normalized_entropy")
    return Plot("Do the heads select?", note, panel, _axis(record), "H / log n", lines)


def scores(record: Record) -> Plot:
    lines, limit = _over_time(record, "max_score"), Thresholds().logit_warning
    x, y = ([point[i] for line in lines for point in line.points] for i in (0, 1))
    if max(y, default=0.0) > limit / 2:
        lines.append(Line(f"warning {limit:g}", [(min(x), limit), (max(x), limit)], "theory"))
    title, panel = "How much headroom do the scores have?", "largest score of any head and row"
    return Plot(title, _note(record), panel, _axis(record), "score", lines)


def width(record: Record) -> Plot:
    layers: dict[int, dict[int, list[float]]] = {}
    for (layer, _, band), sums in band_sums(record.blocks).items():
        total = layers.setdefault(layer, {}).setdefault(band, [0.0, 0.0, 0.0])
        total[:] = map(sum, zip(total, sums, strict=True))
    lines = [
        _line(layer, [(v / n, w / n) for _, (n, v, w) in sorted(bands.items())], len(layers))
        for layer, bands in layers.items()
    ]
    if ends := [v for line in lines for v, _ in line.points]:
        lines.append(Line("all keys alike", [(end(ends), end(ends)) for end in (min, max)], "theory"))
    title, panel = "Does attention widen with length?", "mean over heads and rows of exp(H)"
    return Plot(title, _note(record), panel, "keys a row may see", "width (keys)", lines, log=True)


KINDS: dict[str, Callable[[Record], Plot]] = {"entropy": entropy, "scores": scores, "width": width}

# ---- SVG -----------------------------------------------------------------------------------------------------------


def _svg(plot: Plot) -> str:
    least = 0.0 if plot.log else -math.inf
    shown = [(line, [xy for xy in line.points if all(least < v < math.inf for v in xy)]) for line in plot.lines]
    parts = [_text(plot.title, 0, 26, "title"), _text(plot.note, 0, 48), _text(plot.panel, 0, 74, "panel")]
    shown = [(line, points) for line, points in shown if points]
    parts += _drawn(plot, shown) if shown else [_text("nothing to show: no finite values", 0, 120)]
    rules = {
        "": "background:#ffffff",
        " text": "font:12px system-ui,sans-serif;fill:#63666b",
        " .title": "font-size:20px;fill:#1b1e23",
        " .panel": "font-size:15px;fill:#1b1e23",
        " path": "fill:none;stroke-width:1.8",
        " .hair": "stroke:#dcdddf;stroke-width:1",
    }  # of this figure alone: a notebook has others
    style = "".join(f".partita-plot{select}{{{rule}}}" for select, rule in rules.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="partita-plot" role="img" aria-label="{escape(plot.title)}" '
        f'viewBox="-8 0 {WIDTH + 16} {HEIGHT}" width="{WIDTH + 16}" height="{HEIGHT}"><style>{style}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _drawn(plot: Plot, shown: list[tuple[Line, list[Point]]]) -> list[str]:
    """Axes, lines, and the names of lines at their ends."""
    across, x_ticks = _scale([x for _, points in shown for x, _ in points], plot.log, LEFT, RIGHT)
    up, y_ticks = _scale([y for _, points in shown for _, y in points], plot.log, BOTTOM, TOP)
    parts = [f'<path class="hair" d="M{LEFT} {up(t):.1f}H{RIGHT}"/>' for t in y_ticks]
    parts += [_text(f"{t:g}", LEFT - 6, up(t) + 4, anchor="end") for t in y_ticks]
    parts += [_text(f"{t:g}", across(t), BOTTOM + 17, anchor="middle") for t in x_ticks]
    log = " (log scale)" if plot.log else ""
    parts.append(_text(plot.up + log, 0, TOP - 12))
    parts.append(_text(plot.across + log, (LEFT + RIGHT) / 2, BOTTOM + 38, anchor="middle"))
    named, coloured = [], 0
    for line, points in sorted(shown, key=lambda pair: ("context", "data", "theory").index(pair[0].kind)):
        colour = {"context": GREY, "theory": SOFT}.get(line.kind, COLOURS[coloured % MOST])
        coloured += line.kind == "data"
        dash = ' stroke-dasharray="5 4"' if line.kind == "theory" else ""
        points = [(float(x), float(y)) for x, y in points]
        at = [(across(x), up(y)) for x, y in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        parts.append(f'<path class="line" stroke="{colour}"{dash} d="M{path}"/>')
        if line.kind == "data":
            parts += [
                f'<circle fill="{colour}" cx="{px:.1f}" cy="{py:.1f}" r="2.6" data-x="{x!r}" data-y="{y!r}"/>'
                for (px, py), (x, y) in zip(at, points, strict=True)
            ]
        if line.label and line.kind != "context":
            named.append((at[-1][1], line.label, colour))
    below = TOP - 15.0
    for wanted, label, colour in sorted(named):
        below = max(wanted, below + 15)
        parts.append(_text(label, RIGHT + 10, below + 4, colour=colour))
    return parts


def _scale(values: list[float], log: bool, start: float, stop: float) -> tuple[Callable[[float], float], list[float]]:
    """Where a number stands, and the numbers that are written: steps of 1, 2 or 5, or of a power of two."""
    low, high = min(values), max(values)
    if log:
        first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
        last = max(last, first + 1)
        ticks = [2.0**k for k in range(first, last + 1, max(1, (last - first) // 6))]
        return lambda v: start + (stop - start) * (math.log2(v) - first) / (last - first), ticks
    span = high - low or abs(high) or 1.0
    low, high = low - 0.04 * span, high + 0.04 * span
    step = 10.0 ** math.floor(math.log10((high - low) / 5))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 6)
    ticks = [float(f"{k * step:.12g}") for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return lambda v: start + (stop - start) * (v - low) / (high - low), ticks


def _text(text: str, x: float, y: float, kind: str = "", *, anchor: str = "start", colour: str = "") -> str:
    look = (f' class="{kind}"' if kind else "") + (f' style="fill:{colour}"' if colour else "")
    return f'<text{look} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(_legal(text))}</text>'


def _legal(text: str) -> str:
    """Without the characters that XML forbids: a model's name may have any."""
    return "".join(c if c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff" else " " for c in text)
