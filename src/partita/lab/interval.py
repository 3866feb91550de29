"""A mean and what may be said of it: Student's 95 % interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from partita.errors import ValueRangeError

__all__ = ["Interval", "interval"]

# two-sided 95 % quantiles of Student's t by degrees of freedom; beyond them the normal's 1.96 is within 3 %
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval over runs; the half width of a single run is infinite, not zero."""

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.4g} +- {self.half:.2g}" if math.isfinite(self.half) else f"{self.mean:.4g} (one run)"


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
