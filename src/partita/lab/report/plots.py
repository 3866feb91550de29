"""The three figures people ask a run for, drawn by the code of the studies: no plotting library is needed.

entropy   H / log n over the run, layer by layer
scores    the largest score over the run, layer by layer, with the level that costs digits in half precision
width     exp(H) against the number of keys a row may see, layer by layer, with the line of an average over all keys
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from partita.errors import ValueRangeError
from partita.lab.draw import svg
from partita.lab.figure import Figure, Line, Panel
from partita.monitor.files import replace_file
from partita.monitor.findings import Thresholds
from partita.monitor.record import BAND_COLUMNS, Record

__all__ = ["KINDS", "Plot", "plot"]

MOST = 5  # lines in colour; the others are grey


class Plot:
    """An SVG that notebooks show; `save(path)` writes it, `str` is its text."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def __str__(self) -> str:
        return svg(self.figure)

    def __repr__(self) -> str:
        return f"<plot {self.figure.title!r}: in a notebook it shows itself; elsewhere .save('figure.svg')>"

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
    return Plot(KINDS[kind](record))


def _note(record: Record) -> str:
    heads, steps = sum(s.heads for s in record.sites), len({b.step for b in record.blocks})
    name = str(record.provenance.get("title") or record.provenance.get("model") or "a model")
    return f"{name[:80]}: {heads} heads in {len(record.sites)} layers, {steps} {record.unit}{'s' * (steps != 1)}"


def _over_time(record: Record, column: str) -> list[Line]:
    layers: dict[int, dict[int, float]] = {}
    for block in record.blocks:
        if (value := block.overall(column)) is not None:
            layers.setdefault(block.layer, {})[block.step] = value
    if all(len(steps) < 2 for steps in layers.values()):  # one look: the layers are the axis
        at = sorted(layers)
        return [Line("", [float(n) for n in at], [next(iter(layers[n].values())) for n in at])]
    return [_line(n, sorted(steps.items()), len(layers)) for n, steps in sorted(layers.items())]


def _line(layer: int, points: list[tuple[int, float]] | list[tuple[float, float]], layers: int) -> Line:
    """The first and last layers and those between them in equal strides are in colour."""
    chosen = {round(i * (layers - 1) / max(1, MOST - 1)) for i in range(MOST)}
    kind = "data" if layer in chosen else "context"
    return Line(f"layer {layer}", [float(x) for x, _ in points], [y for _, y in points], kind=kind)  # type: ignore[arg-type]


def _axis(record: Record) -> str:
    return record.unit if len({b.step for b in record.blocks}) > 1 else "layer"


def entropy(record: Record) -> Figure:
    lines = _over_time(record, "normalized_entropy")
    panel = Panel("mean over heads and rows of H / log n", _axis(record), "H / log n", lines)
    return Figure("Do the heads select?", [panel], f"{_note(record)}; 1 is an average over all keys, 0 is one key")


def scores(record: Record) -> Figure:
    lines, limit = _over_time(record, "max_score"), Thresholds().logit_warning
    x = [v for line in lines for v in line.x]
    if max((v for line in lines for v in line.y), default=0.0) > limit / 2:
        lines.append(Line(f"warning {limit:g}", [min(x), max(x)], [limit, limit], kind="theory"))
    panel = Panel("largest score of any head and row", _axis(record), "score", lines)
    return Figure("How much headroom do the scores have?", [panel], _note(record))


def width(record: Record) -> Figure:
    sums: dict[int, dict[int, list[float]]] = {}
    size = len(BAND_COLUMNS)
    for block in record.blocks:
        for band, values in block.bands.items():
            for at in range(0, len(values), size):
                rows, visible, wide = values[at : at + 3]
                if rows > 0 and math.isfinite(visible) and math.isfinite(wide):
                    total = sums.setdefault(block.layer, {}).setdefault(band, [0.0, 0.0, 0.0])
                    for i, v in enumerate((rows, rows * visible, rows * wide)):
                        total[i] += v
    lines = [
        _line(layer, [(v / n, w / n) for _, (n, v, w) in sorted(bands.items())], len(sums))
        for layer, bands in sorted(sums.items())
    ]
    ends = [v for line in lines for v in line.x]
    if ends:
        lines.append(Line("all keys alike", [min(ends), max(ends)], [min(ends), max(ends)], kind="theory"))
    panel = Panel("mean over heads and rows of exp(H)", "keys a row may see", "width (keys)", lines, True, True)
    return Figure("Does attention widen with length?", [panel], _note(record))


KINDS: dict[str, Callable[[Record], Figure]] = {"entropy": entropy, "scores": scores, "width": width}
