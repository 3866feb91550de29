"""Experiment: a question, the answer expected, settings, a measurement that gives rows, a verdict and panels from rows.

    cells   = settings x seeds            one cell is the unit that is run, written down and never repeated
    verdict = judge(all rows)             holds | holds within a stated range | does not hold

A row is a flat dictionary of numbers and short strings: the settings, the seed, what was measured. Every experiment has
three sizes: `tiny` for the tests (a second or two: shows that it runs, not what is true), `quick` (under a minute),
`full`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.errors import ValueRangeError
from partita_theory.figure import Figure, Panel
from partita_theory.results import Row, note
from partita_theory.verdict import Verdict

__all__ = ["SIZES", "Cell", "Experiment", "Settings", "Size", "experiment", "geometric", "grid"]

Settings = Mapping[str, Any]
SIZES = ("tiny", "quick", "full")


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
    measure: Callable[..., Iterable[Row]]  # one cell, called with seed and settings; seeds everything it draws itself
    judge: Callable[[list[Row]], Verdict]
    panels: Callable[[list[Row]], Sequence[Panel]]
    question: str
    expected: str  # said before the run
    ids: tuple[str, ...]  # statements of the mathematics it bears on, such as M-ENT-1
    sizes: Mapping[str, Size]
    needs: tuple[str, ...] = ()  # packages beyond torch, by the name they are imported with
    note: Callable[[list[Row]], str] = note  # under the figure

    def cells(self, size: str, seeds: int | None = None) -> list[Cell]:
        """Every cell of a size, in the order in which rows are judged."""
        if size not in self.sizes:
            raise ValueRangeError(f"size must be one of {', '.join(SIZES)}; got {size!r}.")
        chosen = self.sizes[size]
        return [Cell(s, seed) for s in chosen.settings for seed in range(chosen.seeds if seeds is None else seeds)]

    def run(self, settings: Settings, seed: int) -> Iterator[Row]:
        """The rows of one cell, each with its settings and seed."""
        for row in self.measure(seed=seed, **settings):
            yield {**settings, "seed": seed, **row}

    def figure(self, rows: list[Row]) -> Figure:
        """The question, its panels, and how much stands behind them."""
        return Figure(self.question, self.panels(rows), self.note(rows))


def experiment(module: str, *, tiny: Size, quick: Size, full: Size, **given: Any) -> Experiment:
    """The experiment of a file, named after it, with its functions `measure`, `judge` and `panels`."""
    home: Any = sys.modules[module]
    sizes = {"tiny": tiny, "quick": quick, "full": full}
    return Experiment(module.rpartition(".")[2], home.measure, home.judge, home.panels, sizes=sizes, **given)


def grid(**axes: Any) -> list[dict[str, Any]]:
    """Every combination of the axes' values, the last axis fastest; what is no list or tuple is the same in all.

    >>> grid(n=[16, 64], policy="log")
    [{'n': 16, 'policy': 'log'}, {'n': 64, 'policy': 'log'}]
    """
    found: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        chosen = values if isinstance(values, (list, tuple)) else [values]
        found = [{**row, name: value} for row in found for value in chosen]
    return found


def geometric(first: int, last: int, factor: int = 4) -> list[int]:
    """From first up to last, each this many times the one before.

    >>> geometric(64, 2000)
    [64, 256, 1024]
    """
    found = []
    while first <= last:
        found.append(first)
        first *= factor
    return found
