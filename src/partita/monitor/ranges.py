"""What a recorded quantity can be. A number outside is our own fault: it is reported, and never shown.

0 <= entropy <= log n      0 <= H / log n <= 1      1 <= exp H <= n      0 <= mass <= 1      n: the head's length
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Row statistics are float32 sums of up to n terms, whose relative error stays far below this; a wrong formula does not.
SLACK = 1e-3
MEANS = {"entropy", "normalized_entropy", "effective_width", "score_variance", "sink_first", "top_mass", "visible"}


class Impossible(NamedTuple):
    """A number that cannot be."""

    step: int
    layer: int
    head: int
    column: str
    value: float

    def __str__(self) -> str:
        return f"{self.column} of layer {self.layer}, head {self.head}, step {self.step} came out as {self.value:.6g}"


def limits(length: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The least and the largest value of each column, for heads that see at most `length` keys; others: anything."""
    zero, one, many = torch.zeros_like(length), torch.ones_like(length), length.clamp(min=1)
    share, positive = (zero, one), (zero, torch.full_like(length, torch.inf))
    return {
        "entropy": (zero, many.log()),
        "normalized_entropy": share,
        "effective_width": (one, many),
        "score_variance": positive,
        "sink_first": share,
        "top_mass": share,
        "visible": (2 * one, length.clamp(min=2)),
        **{f"normalized_entropy_{quantile}": share for quantile in ("p05", "p50", "p95")},
        "sink_top": share,
        "critical": positive,
        "twin_similarity": (-one, one),
    }


def check(column: dict[str, Tensor]) -> list[tuple[str, int, float]]:
    """(column, head, value) of what cannot be; the column then holds NaN there, and is inside its limits elsewhere."""
    wrong: list[tuple[str, int, float]] = []
    there = column["rows"] > 0
    for name, (low, high) in limits(column["length"]).items():
        values = column[name]
        slack = SLACK * torch.where(high.isinf(), 1.0, high.abs()).clamp(min=1.0)
        bad = (values < low - slack) | (values > high + slack)
        if name in MEANS:
            bad |= there & values.isnan()
        column[name] = torch.where(bad, torch.nan, values.clamp(low, high))
        if bool(bad.any()):
            wrong += [(name, int(head), float(values[head])) for head in bad.nonzero()[:, 0]]
    return wrong
