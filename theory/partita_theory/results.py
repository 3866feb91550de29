"""What the rows of an experiment say: means over seeds and their 95 % intervals, differences, slopes, lines to draw."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.errors import ValueRangeError
from partita_theory.figure import Kind, Line

__all__ = [
    *("Interval", "Row", "columns", "distinct", "interval", "lines", "mean_by", "note", "only", "paired", "points"),
    *("said", "series", "slope", "slope_by_seed", "theory"),
]

Row = dict[str, Any]

# two-sided 95 % quantiles of Student's t by degrees of freedom; beyond them the normal's 1.96 is within 3 %
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval over runs; the half width of a single run is infinite, not zero.

    A format applies to the mean, and without one the interval is shown.

    >>> f"{Interval(2.0, 0.5, 3):.3f}, {Interval(2.0, 0.5, 3) - 1.5}"
    '2.000, 0.5 +- 0.5'
    """

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __sub__(self, by: float) -> Interval:
        return Interval(self.mean - by, self.half, self.count)

    def __str__(self) -> str:
        return f"{self.mean:.4g} +- {self.half:.2g}" if math.isfinite(self.half) else f"{self.mean:.4g} (one run)"

    def __format__(self, spec: str) -> str:
        return format(self.mean, spec) if spec else str(self)


def interval(values: Iterable[float]) -> Interval:
    """mean +- t * sd / sqrt(n): Student's 95 % interval.

    >>> print(interval([1.0, 2.0, 3.0]))  # 4.303 / sqrt(3)
    2 +- 2.5
    """
    given = [float(v) for v in values]
    if not given:
        raise ValueRangeError("an interval needs at least one value; the rows hold none for this setting.")
    if len(given) == 1:
        return Interval(given[0], math.inf, 1)
    t = _STUDENT[len(given) - 2] if len(given) - 2 < len(_STUDENT) else 1.96
    return Interval(statistics.fmean(given), t * statistics.stdev(given) / math.sqrt(len(given)), len(given))


# ---- rows ----------------------------------------------------------------------------------------------------------


def only(rows: Iterable[Row], **fixed: object) -> list[Row]:
    """The rows that have all of these values.

    >>> only([{"n": 1}, {"n": 2}], n=2)
    [{'n': 2}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in fixed.items())]


def distinct(rows: Iterable[Row], column: str) -> list[Any]:
    """The values of a column, each once, ascending."""
    return sorted({row[column] for row in rows})


def mean_by(rows: Iterable[Row], value: str, *keys: str) -> dict[Any, Interval]:
    """The interval of `value` for each combination of `keys` (for each value of a single one), as they first appear.

    >>> mean_by([{"n": 1, "y": 2.0}, {"n": 1, "y": 4.0}], "y", "n")[1].mean
    3.0
    """
    groups: dict[Any, list[float]] = {}
    for row in rows:
        key = row[keys[0]] if len(keys) == 1 else tuple(row[k] for k in keys)
        groups.setdefault(key, []).append(float(row[value]))
    return {key: interval(values) for key, values in groups.items()}


def paired(
    rows: Iterable[Row], value: str, by: str, first: Any, second: Any, same: Sequence[str] = ("seed",)
) -> Interval:
    """The mean of `value` where `by` is first minus where it is second, seed by seed: what both share cancels."""
    one, other = (
        {tuple(r[s] for s in same): float(r[value]) for r in rows if r[by] == side} for side in (first, second)
    )
    return interval(one[k] - other[k] for k in one if k in other)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line of y against x; nan where x does not vary.

    >>> slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    2.0
    """
    centre, level = sum(x) / max(1, len(x)), sum(y) / max(1, len(y))
    spread = sum((a - centre) ** 2 for a in x)
    return sum((a - centre) * (b - level) for a, b in zip(x, y, strict=True)) / spread if spread else math.nan


def slope_by_seed(rows: Sequence[Row], x: str, y: str, *, log_x: bool = True, log_y: bool = False) -> Interval:
    """The slope of (log) y against (log) x within each seed, and its interval over seeds."""

    def read(own: list[Row], column: str, log: bool) -> list[float]:
        found = [float(row[column]) for row in own]
        return [math.log(v) if v > 0 else math.nan for v in found] if log else found

    each = (only(rows, seed=seed) for seed in distinct(rows, "seed"))
    return interval(slope(read(own, x, log_x), read(own, y, log_y)) for own in each)


def said(found: Mapping[Any, Any], form: str = "{0} {1:.3f}", between: str = ", ") -> str:
    """Keys and values in words.

    >>> said({"softmax": 0.5, "l1": 0.25})
    'softmax 0.500, l1 0.250'
    """
    return between.join(form.format(key, value) for key, value in found.items())


# ---- figures -------------------------------------------------------------------------------------------------------


def series(rows: Iterable[Row], label: str, x: str, y: str, kind: Kind = "data") -> Line:
    """The mean of y at each x, x ascending, with its interval over the rows where there are several."""
    found = sorted((float(at), spread) for at, spread in mean_by(rows, y, x).items())
    banded = kind == "data" and bool(found) and all(math.isfinite(spread.half) for _, spread in found)
    return Line(
        label,
        [at for at, _ in found],
        [spread.mean for _, spread in found],
        [spread.low for _, spread in found] if banded else None,
        [spread.high for _, spread in found] if banded else None,
        kind,
    )


def lines(
    rows: Sequence[Row], x: str, y: str, by: str, values: Iterable[Any] | None = None, label: str = "{}",
    kind: Kind = "data",
) -> list[Line]:  # fmt: skip
    """A series for each value of the column `by`: for those given, else for all, ascending."""
    chosen = distinct(rows, by) if values is None else values
    return [series(only(rows, **{by: value}), label.format(value), x, y, kind) for value in chosen]


def columns(rows: Sequence[Row], x: str, named: Mapping[str, str], kind: Kind = "data") -> list[Line]:
    """A series for each of some columns: label -> column."""
    return [series(rows, label, x, y, kind) for label, y in named.items()]


def points(rows: Iterable[Row], label: str, x: str, y: str) -> Line:
    """Every row as a point."""
    found = list(rows)
    return Line(label, [row[x] for row in found], [row[y] for row in found], kind="points")


def theory(label: str, at: Iterable[float], value: float | Callable[[float], float]) -> Line:
    """A function at these places, or a level between their ends."""
    where = [float(x) for x in at]
    if callable(value):
        return Line(label, where, [value(x) for x in where], kind="theory")
    return Line(label, [where[0], where[-1]], [value, value], kind="theory")


def note(rows: Sequence[Row], over: str = "seeds") -> str:
    """How much stands behind a figure, and over what its bands are."""
    seeds = len({row["seed"] for row in rows})
    return f"{len(rows)} rows, {seeds} seed{'s' if seeds != 1 else ''}; bands are 95 % intervals over {over}"
