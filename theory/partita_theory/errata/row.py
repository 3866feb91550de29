"""A row of the errata: a formula in print, the right one, and a number for each next to what is measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isclose, isfinite
from typing import NamedTuple

from partita.errors import ValueRangeError
from partita_theory._domain import Number

__all__ = ["Book", "Numbers", "Reading", "Row", "Verdict"]

KINDS = {
    "W": "wrong: false as stated, or not usable as written",
    "C": "conditional: true under conditions that are not stated, or an inequality printed as an equality",
    "N": "notation: right content, defective notation or wording",
    "P": "prose: a claim made in words",
    "K": "code: a defect of a printed program",
}
TEXTS = ("printed: ", "right: ", "quantity: ")
Numbers = tuple[Number, Number, Number]  # by the printed formula (NaN where it gives none), by the right one, measured


class Reading(NamedTuple):
    """One quantity three times: by the printed formula (NaN where it gives none), by the right one, and measured."""

    printed: float
    right: float
    measured: float


class Verdict(NamedTuple):
    """Which of the two formulas the measurement confirms."""

    reading: Reading
    right_holds: bool
    printed_holds: bool

    @property
    def confirmed(self) -> bool:
        """The erratum stands: the right formula agrees with the measurement and the printed one does not."""
        return self.right_holds and not self.printed_holds


@dataclass(frozen=True)
class Row:
    """One erratum.

    `quantity` says in words what the three numbers are; `tolerance` is absolute and covers rounding, sampling and the
    order of an approximation, whichever the quantity needs.
    """

    label: str
    kind: str
    printed: str
    right: str
    spec: str
    quantity: str
    compute: Callable[[], Numbers]
    tolerance: float

    def check(self) -> Verdict:
        """Compute the three numbers and compare."""
        reading = Reading(*map(float, self.compute()))

        def holds(value: float) -> bool:
            if not isfinite(value) or not isfinite(reading.measured):
                return value == reading.measured
            return isclose(value, reading.measured, rel_tol=0.0, abs_tol=self.tolerance)

        return Verdict(reading, holds(reading.right), holds(reading.printed))


@dataclass
class Book:
    """The rows of one document, filled by decorating the functions that compute them."""

    name: str
    rows: list[Row] = field(default_factory=list)

    def add(
        self, where: str, kind: str, spec: str, *, tolerance: float = 1e-6
    ) -> Callable[[Callable[[], Numbers]], Callable[[], Numbers]]:
        """Register a function as the row `name where`: its docstring has the texts, its result the numbers.

        >>> book = Book("example")
        >>> @book.add("(1)", "W", "M-GIB-1")
        ... def sum_of_ones():
        ...     '''printed: 1 + 1 = 3
        ...     right: 1 + 1 = 2
        ...     quantity: 1 + 1
        ...     '''
        ...     return 3, 2, 1 + 1
        >>> book.rows[0].check().confirmed
        True
        """
        if kind not in KINDS:
            raise ValueRangeError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}.")

        def keep(compute: Callable[[], Numbers]) -> Callable[[], Numbers]:
            lines = (inspect.getdoc(compute) or "").splitlines()
            if [line[: len(text)] for line, text in zip(lines, TEXTS, strict=False)] != [*TEXTS] or len(lines) > 3:
                raise ValueRangeError(f"the docstring of a row has the three lines {', '.join(TEXTS)}; got {lines}.")
            printed, right, quantity = (line[len(text) :] for line, text in zip(lines, TEXTS, strict=True))
            self.rows.append(Row(f"{self.name} {where}", kind, printed, right, spec, quantity, compute, tolerance))
            return compute

        return keep
