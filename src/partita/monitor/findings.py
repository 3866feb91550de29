"""Rows -> what is wrong, the evidence, what it means, what to try. Heuristics, and they say so.

Every threshold is a field of `Thresholds` and is printed with the finding it produced. A sink is never a fault by
itself, and entropy is not importance: a collapsed head may be a useful one (previous token, say).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from partita.monitor.record import Record

SEVERITIES = ("info", "warning", "error")
CODES = (
    "HEAD_COLLAPSED",
    "HEAD_UNIFORM",
    "SINK_HEAD",
    "LOGIT_GROWTH",
    "ENTROPY_DROP",
    "LENGTH_DILUTION",
    "DUPLICATE_HEADS",
    "NONFINITE",
    "NOT_NORMALISED",
    "EFFECTIVE_NEGATIVES_LOW",
    "MI_SATURATED",
    "SCALE_AT_CAP",
    "COVERAGE",
)


@dataclass(frozen=True)
class Thresholds:
    """When a number becomes a finding."""

    collapsed: float = 0.05  # median over rows of H / log(visible) below this
    uniform: float = 0.98  # mean of H / log(visible) above this
    sink: float = 0.3  # mass on one key above this
    sink_share: float = 0.6  # share of heads that are sinks, above which it is a warning
    logit_warning: float = 50.0  # largest score: bfloat16 has steps of 0.25 there
    logit_error: float = 100.0
    growth_ratio: float = 2.0  # last quarter of the run over the first
    growth_level: float = 10.0  # growth below this score is of no interest
    untrained: float = 0.9  # H / log(visible) above which a head has not begun to select
    entropy_drop: float = 0.3  # fall of H / log(visible) between neighbouring windows
    dilution_slope: float = 0.8  # d log(width) / d log(visible), 1 for an average over all keys
    dilution_span: float = 2.0  # lengths must differ by this factor
    duplicate: float = 0.99  # correlation of two heads' attention
    norm_tolerance: float = 0.05  # | |x| - 1 | of contrastive vectors
    negatives: float = 0.05  # effective negatives over negatives, below this
    negatives_least: int = 16  # and only with this many candidates
    saturation: float = 0.95  # mutual-information bound over its cap log N
    scale_cap: float = 100.0  # CLIP's clamp of the scale

    def with_(self, **changes: float) -> Thresholds:
        known = {f.name for f in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise ValueError(f"unknown threshold {', '.join(unknown)}; the thresholds are {', '.join(sorted(known))}")
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Finding:
    """One thing worth a look."""

    severity: str  # info, warning or error
    code: str
    where: str
    evidence: str
    meaning: str
    action: str
    confidence: str  # low, medium or high
    threshold: str = ""
    heads: tuple[tuple[int, int], ...] = ()  # (layer, head)
    series: tuple[float, ...] = ()  # for a small picture

    def __str__(self) -> str:
        limit = f" [{self.threshold}]" if self.threshold else ""
        return f"{self.severity:7} {self.code} {self.where}: {self.evidence}{limit}. {self.meaning} Try: {self.action}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Series:
    """Columns over steps for each (layer, head), read from the blocks once."""

    def __init__(self, record: Record) -> None:
        self.heads: dict[tuple[int, int], list[dict[str, float]]] = {}
        for block in sorted(record.blocks, key=lambda b: b.step):
            for head in range(block.heads):
                self.heads.setdefault((block.layer, head), []).append(block.row(head))

    def column(self, where: tuple[int, int], name: str, weight: str = "rows") -> list[float]:
        return [r[name] for r in self.heads[where] if math.isfinite(r[name]) and r[weight] > 0]

    def by_layer(
        self, test: Callable[[tuple[int, int]], Any]
    ) -> Iterator[tuple[int, list[tuple[tuple[int, int], Any]]]]:
        """(layer, [(head, what the test returned)]) for the layers where the test holds for some head."""
        hits: dict[int, list[tuple[tuple[int, int], Any]]] = {}
        for where in sorted(self.heads):
            if (result := test(where)) is not None:
                hits.setdefault(where[0], []).append((where, result))
        yield from hits.items()


def find(record: Record, thresholds: Thresholds | dict[str, float] | None = None) -> list[Finding]:
    """All findings, worst first."""
    from partita.monitor import rules

    limits = thresholds if isinstance(thresholds, Thresholds) else Thresholds().with_(**(thresholds or {}))
    series = Series(record)
    found: list[Finding] = []
    for rule in rules.RULES:
        found.extend(rule(record, series, limits))
    return sorted(found, key=lambda f: (-SEVERITIES.index(f.severity), CODES.index(f.code)))


def at_or_above(findings: list[Finding], level: str) -> list[Finding]:
    if level not in SEVERITIES:
        raise ValueError(f"level must be one of {', '.join(SEVERITIES)}; got {level!r}")
    return [f for f in findings if SEVERITIES.index(f.severity) >= SEVERITIES.index(level)]


def median(values: list[float]) -> float:
    """Middle value; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def last(values: list[float]) -> list[float]:
    """The last quarter of a run: the state it ended in, with some averaging."""
    return values[-max(1, len(values) // 4) :]


def slope(x: list[float], y: list[float]) -> float:
    """Theil-Sen: the median of pairwise slopes, deaf to single outliers."""
    pairs = [
        (y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i + 1, len(x)) if abs(x[j] - x[i]) > 1e-9
    ]
    return median(pairs)
