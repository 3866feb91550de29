"""Figure: what an experiment shows, as plain data; `partita.lab.draw` makes one SVG of it.

The title is the question; lines are labelled at their ends; bands are intervals over seeds; theory is dashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Figure", "Line", "Panel"]


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
    kind: Literal["data", "theory", "context", "points"] = "data"  # theory is dashed, context grey, points unjoined


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
