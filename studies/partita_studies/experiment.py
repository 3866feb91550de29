"""Experiment: a question, the answer expected, settings, run(settings, seed) -> rows, a verdict from the rows.

    cells   = settings x seeds            one cell is the unit that is run, written down and never repeated
    verdict = judge(all rows)             holds | holds within a stated range | does not hold

A row is a flat dictionary of numbers and short strings. Every experiment has three sizes: `tiny` for the tests (a
second or two: shows that it runs, not what is true), `quick` (under a minute), `full`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from partita.errors import ValueRangeError
from partita.lab.figure import Figure
from partita.lab.interval import Interval, interval

__all__ = ["Cell", "Experiment", "Interval", "Row", "Size", "Verdict", "grid", "interval", "mean_by", "paired"]

Row = dict[str, Any]
Settings = Mapping[str, Any]
Answer = Literal["holds", "holds within", "does not hold"]
SIZES = ("tiny", "quick", "full")


@dataclass(frozen=True)
class Verdict:
    """What the rows say of the expected answer, and the numbers that say it."""

    answer: Answer
    evidence: str  # one or two sentences with the measured numbers
    within: str = ""  # the range, where the answer is "holds within"

    def __post_init__(self) -> None:
        if (self.answer == "holds within") != bool(self.within):
            raise ValueRangeError("a verdict states a range exactly when its answer is 'holds within'.")

    def __str__(self) -> str:
        return f"{self.answer}{' ' + self.within if self.within else ''}: {self.evidence}"


@dataclass(frozen=True)
class Size:
    """The settings of one size, the seeds each is run with, and about how long one cell takes."""

    settings: Sequence[Settings]
    seeds: int
    seconds: float  # of one cell on two cores, for --dry-run


@dataclass(frozen=True)
class Cell:
    """One run: its settings and its seed. `key` names it on disk."""

    settings: Settings
    seed: int

    @property
    def key(self) -> str:
        text = json.dumps([dict(self.settings), self.seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Experiment:
    """One question about softmax, and how it is put to a machine."""

    name: str
    question: str
    expected: str  # said before the run
    ids: tuple[str, ...]  # statements of the mathematics it bears on, such as M-ENT-1
    sizes: Mapping[str, Size]
    run: Callable[[Settings, int], Iterable[Row]]  # one cell; seeds everything it draws itself
    judge: Callable[[list[Row]], Verdict]
    figure: Callable[[list[Row]], Figure]
    needs: tuple[str, ...] = field(default=())  # packages beyond torch, by the name they are imported with

    def __post_init__(self) -> None:
        if set(self.sizes) != set(SIZES):
            raise ValueRangeError(f"experiment {self.name} needs the sizes {', '.join(SIZES)}; got {list(self.sizes)}.")

    def cells(self, size: str, seeds: int | None = None) -> list[Cell]:
        """Every cell of a size, in the order in which rows are judged."""
        if size not in self.sizes:
            raise ValueRangeError(f"size must be one of {', '.join(SIZES)}; got {size!r}.")
        chosen = self.sizes[size]
        return [Cell(s, seed) for s in chosen.settings for seed in range(chosen.seeds if seeds is None else seeds)]


def grid(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of the axes' values, the last axis fastest.

    >>> grid(n=[16, 64], policy=["log"])
    [{'n': 16, 'policy': 'log'}, {'n': 64, 'policy': 'log'}]
    """
    found: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        found = [{**row, name: value} for row in found for value in values]
    return found


# ---- what seeds say ------------------------------------------------------------------------------------------------


def paired(
    rows: Sequence[Row], value: str, by: str, first: Any, second: Any, same: Sequence[str] = ("seed",)
) -> Interval:
    """The mean of `value` where `by` is first minus where it is second, seed by seed: what both share cancels."""
    sides: list[dict[tuple[Any, ...], float]] = [
        {tuple(r[s] for s in same): float(r[value]) for r in rows if r[by] == side} for side in (first, second)
    ]
    return interval(sides[0][k] - sides[1][k] for k in sides[0] if k in sides[1])


def mean_by(rows: Sequence[Row], value: str, *keys: str) -> dict[tuple[Any, ...], Interval]:
    """The interval of `value` for each combination of `keys`, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(float(row[value]))
    return {key: interval(values) for key, values in groups.items()}
