"""Series: rows turned into the lines of a figure, with bands over seeds, and slopes of one column against another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from partita.lab.figure import Line
from partita_studies.experiment import Interval, Row, interval, mean_by

__all__ = ["note", "only", "series", "slope", "slope_by_seed"]

Kind = Literal["data", "theory", "context", "points"]


def only(rows: Sequence[Row], **fixed: object) -> list[Row]:
    """The rows that have all of these values.

    >>> only([{"n": 1}, {"n": 2}], n=2)
    [{'n': 2}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in fixed.items())]


def series(rows: Sequence[Row], label: str, x: str, y: str, kind: Kind = "data") -> Line:
    """The mean of y at each x, x ascending, with its interval over the rows where there are several."""
    found = sorted((float(key[0]), spread) for key, spread in mean_by(rows, y, x).items())
    banded = kind == "data" and bool(found) and all(math.isfinite(spread.half) for _, spread in found)
    return Line(
        label,
        [at for at, _ in found],
        [spread.mean for _, spread in found],
        [spread.low for _, spread in found] if banded else None,
        [spread.high for _, spread in found] if banded else None,
        kind,
    )


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line of y against x; nan where x does not vary.

    >>> slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    2.0
    """
    centre, level = sum(x) / max(1, len(x)), sum(y) / max(1, len(y))
    spread = sum((a - centre) ** 2 for a in x)
    return sum((a - centre) * (b - level) for a, b in zip(x, y, strict=True)) / spread if spread else math.nan


def slope_by_seed(rows: Sequence[Row], x: str, y: str, *, log_x: bool = True) -> Interval:
    """The slope of y against (log) x within each seed, and its interval over seeds."""
    seeds = sorted({row["seed"] for row in rows})
    each = []
    for seed in seeds:
        own = only(rows, seed=seed)
        at = [math.log(row[x]) if log_x else float(row[x]) for row in own]
        each.append(slope(at, [float(row[y]) for row in own]))
    return interval(each)


def note(rows: Sequence[Row], over: str = "seeds") -> str:
    """How much stands behind a figure, and over what its bands are."""
    seeds = len({row["seed"] for row in rows})
    return f"{len(rows)} rows, {seeds} seed{'s' if seeds != 1 else ''}; bands are 95 % intervals over {over}"
