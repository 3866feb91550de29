"""An axis of a figure: which numbers it spans, where a number stands on it, which ticks it carries.

    place(v) = start + (stop - start) * (t(v) - t(low)) / (t(high) - t(low))        t = log on a log axis

Ticks are 1, 2, 2.5 or 5 times a power of ten; on a log axis of numbers that are powers of two (lengths), those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Axis", "fit", "shown", "written"]

LARGEST = 1e300  # beyond it the span of an axis overflows
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """A range of numbers laid over a range of pixels."""

    low: float
    high: float
    log: bool
    start: float
    stop: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """The pixel of a number; numbers beyond the range stand at its ends."""
        if value <= self.low:
            return self.start
        if value >= self.high:
            return self.stop
        low, high, v = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (v - low) / (high - low)


def shown(value: float, log: bool) -> bool:
    """Whether a number has a place on such an axis."""
    return math.isfinite(value) and abs(value) <= LARGEST and (value > 1 / LARGEST or not log)


def fit(values: Iterable[float], log: bool, start: float, stop: float, *, want: int = 5, pad: float = 0.04) -> Axis:
    """The axis that shows all these numbers with a little room around them."""
    given = [v for v in values if shown(v, log)]
    low, high = (min(given), max(given)) if given else (1.0, 10.0) if log else (0.0, 1.0)
    if log:
        a, b = math.log(low), math.log(high)
        room = pad * (b - a) if b - a > 1e-9 else math.log(2)
        low, high = math.exp(a - room), math.exp(b + room)
        return Axis(low, high, True, start, stop, _log_ticks(low, high, given, want))
    small = 1e-9 * max(abs(low), abs(high))
    room = pad * (high - low) if high - low > small else max(abs(low) * 0.1, 1e-12) if low else 1.0
    low, high = low - room, high + room
    return Axis(low, high, False, start, stop, _linear_ticks(low, high, want))


def _linear_ticks(low: float, high: float, want: int) -> tuple[float, ...]:
    step = 10.0 ** math.floor(math.log10((high - low) / want))
    step *= next(m for m in (1, 2, 2.5, 5, 10, 20) if (high - low) / (step * m) <= want)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # via the decimal text of the step, so that 3 * 0.1 is 0.3
    return tuple(float(f"{k * step:.12g}") for k in range(first, last + 1))


def _log_ticks(low: float, high: float, given: Sequence[float], want: int) -> tuple[float, ...]:
    if len(set(given)) > 1 and all(v >= 1 and math.log2(v).is_integer() for v in given):
        if len(set(given)) <= want + 1:
            return tuple(sorted(set(given)))
        first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / (want + 1)))
        return tuple(2.0**k for k in range(first, last + 1, every))
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if (decades := math.log10(high / low)) >= 3.5:
        every = max(1, math.ceil(decades / (want + 1)))
        first = math.ceil(math.log10(low) - 1e-9)
        return tuple(float(f"1e{k}") for k in range(first, last + 1, every) if float(f"1e{k}") <= high * (1 + 1e-9))
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [float(f"{m}e{k}") for k in range(first, last + 1) for m in steps]
        inside = tuple(t for t in ticks if low <= t <= high)
        if len(inside) >= min(3, want):
            return inside
    return tuple(t for t in _linear_ticks(low, high, want) if t > 0)


def written(value: float) -> str:
    """A number for people: 0.05, 1 024, 10⁻⁶, 2.5·10⁷.

    >>> [written(v) for v in (0.05, 1024, 65536, 1e-6, 2.5e7, 0)]
    ['0.05', '1024', '65 536', '10⁻⁶', '2.5·10⁷', '0']
    """
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        text = f"{value:.6g}"
        return f"{int(value):,}".replace(",", " ") if abs(value) >= 1e4 and value == int(value) else text
    mantissa, exponent = f"{value:.4g}".split("e") if "e" in f"{value:.4g}" else f"{value:.3e}".split("e")
    mantissa = f"{float(mantissa):g}"
    power = "10" + str(int(exponent)).translate(_RAISED)
    return power if mantissa == "1" else f"-{power}" if mantissa == "-1" else f"{mantissa}·{power}"
