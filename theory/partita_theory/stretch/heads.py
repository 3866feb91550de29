"""What every head does as the text grows, unmodified: entropy, spread of its scores, and its critical scale.

The critical scale is in units of the present one: above 1 the head's best key does not part from its competitors.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from partita.monitor import Watch
from partita.scale import CriticalScale
from partita_theory.stretch.question import Question
from partita_theory.stretch.reader import OWN, Reader

__all__ = ["growth", "heads"]

_LOOKED = 2  # windows
_LIMITS = (-1.0, 3.0)  # of an exponent that is worth trying


def heads(reads: Reader, question: Question) -> list[dict[str, Any]]:
    """A row for every length, layer and head."""
    reads.apply(OWN)
    rows = []
    for length in question.lengths:
        asked = [question.asked(range(k, k + 1), length) for k in range(min(_LOOKED, len(question.starts)))]
        with Watch(reads.model, critical=True) as seen, torch.no_grad():
            for passage in asked:
                reads.nll(*passage)
        groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in seen.frame(pandas=False):
            groups.setdefault((row["layer"], row["head"]), []).append(row)
        for (layer, head), each in sorted(groups.items()):
            entropy, width, variance = (
                statistics.fmean(row[y] for row in each) for y in ("entropy", "effective_width", "score_variance")
            )
            critical = statistics.median(row["critical"] for row in each)
            found = {"entropy": entropy, "width": width, "spread": math.sqrt(max(0.0, variance)), "critical": critical}
            rows.append({"layer": layer, "head": head, "length": length, **found})
    return rows


def growth(rows: list[dict[str, Any]], trained: int) -> CriticalScale | None:
    """A scale that grows as the critical scales of the heads do, in the mean; None where they tell nothing."""
    lengths = sorted({row["length"] for row in rows})
    table: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        table.setdefault((row["layer"], row["head"]), []).append(row["critical"])
    told = [each for each in table.values() if len(each) == len(lengths) and all(0 < x < math.inf for x in each)]
    if not told or len(lengths) < 2:
        return None
    exponent = CriticalScale.fit(trained, lengths, [list(x) for x in zip(*told, strict=True)]).exponent
    assert not isinstance(exponent, float)
    mean = min(max(sum(exponent) / len(exponent), _LIMITS[0]), _LIMITS[1])
    return CriticalScale(trained, round(mean, 2), floor=trained)
