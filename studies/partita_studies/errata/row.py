"""A row of the errata: a formula in print, the right one, and a number for each next to what is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isclose, isfinite
from typing import NamedTuple

from partita.errors import ValueRangeError

__all__ = ["Book", "Reading", "Row", "Verdict"]

KINDS = {
    "W": "wrong: false as stated, or not usable as written",
    "C": "conditional: true under conditions that are not stated, or an inequality printed as an equality",
    "N": "notation: right content, defective notation or wording",
    "P": "prose: a claim made in words",
    "K": "code: a defect of a printed program",
}


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

    `quantity` says in words what the three numbers of a reading are; `tolerance` is absolute and covers rounding,
    sampling and the order of an approximation, whichever the quantity needs.
    """

    label: str
    kind: str
    printed: str
    right: str
    spec: str
    quantity: str
    compute: Callable[[], Reading]
    tolerance: float

    def check(self) -> Verdict:
        """Compute the three numbers and compare."""
        reading = Reading(*(float(x) for x in self.compute()))

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
        self, where: str, kind: str, *, printed: str, right: str, spec: str, quantity: str, tolerance: float = 1e-6
    ) -> Callable[[Callable[[], Reading]], Callable[[], Reading]]:
        """Register a function as the computation of the row `name where`.

        >>> book = Book("example")
        >>> @book.add("(1)", "W", printed="1 + 1 = 3", right="1 + 1 = 2", spec="M-GIB-1", quantity="1 + 1")
        ... def sum_of_ones():
        ...     return Reading(printed=3, right=2, measured=1 + 1)
        >>> book.rows[0].check().confirmed
        True
        """
        if kind not in KINDS:
            raise ValueRangeError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}.")

        def keep(compute: Callable[[], Reading]) -> Callable[[], Reading]:
            self.rows.append(Row(f"{self.name} {where}", kind, printed, right, spec, quantity, compute, tolerance))
            return compute

        return keep
