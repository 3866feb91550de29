"""Formulas in circulation that are wrong or conditional, next to the right ones, each as three numbers.

    >>> from partita_theory import errata
    >>> errata.find("losses (4.3.3)").check().confirmed
    True

`errata.ROWS` holds every row; a row computes nothing until asked. Five documents are covered: contrast (4.4.x),
losses (4.3.x), attention (5.1.x), noise (1..80) and scale (1..63), and a printed program (code).
"""

from __future__ import annotations

from partita.errors import ValueRangeError
from partita_theory.errata import attention, code, contrast, losses, noise, scale
from partita_theory.errata.row import KINDS, Reading, Row, Verdict

__all__ = ["KINDS", "ROWS", "Reading", "Row", "Verdict", "find"]

BOOKS = (contrast.book, losses.book, attention.book, noise.book, scale.book, code.book)
ROWS = tuple(row for book in BOOKS for row in book.rows)


def find(label: str) -> Row:
    """The row with this label, such as "contrast (4.4.15)"."""
    for row in ROWS:
        if row.label == label:
            return row
    raise ValueRangeError(f"no erratum is called {label!r}; there are {', '.join(row.label for row in ROWS)}.")
