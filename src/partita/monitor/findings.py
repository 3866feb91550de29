"""Rows -> what is wrong, the evidence, what it means, what to try. Heuristics, stated as such.

Every threshold is a field of `Thresholds` and is printed with the finding it produced. A sink is never a fault by
itself, and entropy is not importance: a collapsed head may be a useful one (previous token, say).
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from typing import Any

from partita.monitor.record import Record

SEVERITIES = ("info", "warning", "error")
# code: confidence, and the threshold as a format over the fields of `Thresholds`
KINDS = {
    "HEAD_COLLAPSED": ("medium", "collapsed < {collapsed:g}"),
    "HEAD_UNIFORM": ("medium", "uniform > {uniform:g}"),
    "SINK_HEAD": ("high", "sink > {sink:g}, of more than {sink_share:.0%} of the heads"),
    "LOGIT_GROWTH": (
        "medium", "level {logit_warning:g}/{logit_error:g}, growth x{growth_ratio:g} above {growth_level:g}"
    ),
    "ENTROPY_DROP": ("low", "fall > {entropy_drop:g} between neighbouring windows"),
    "LENGTH_DILUTION": ("medium", "exponent > {dilution_slope:g}"),
    "DUPLICATE_HEADS": ("medium", "correlation > {duplicate:g}"),
    "NONFINITE": ("high", "any"),
    "NOT_NORMALISED": ("high", "| |x| - 1 | > {norm_tolerance:g}"),
    "EFFECTIVE_NEGATIVES_LOW": ("medium", "effective / negatives < {negatives:g}"),
    "MI_SATURATED": ("high", "bound / log N > {saturation:g}"),
    "SCALE_AT_CAP": ("medium", "scale within 1 % of {scale_cap:g}"),
    "COVERAGE": ("high", ""),
}  # fmt: skip
CODES = tuple(KINDS)
HABITS = ("LENGTH_DILUTION", "SINK_HEAD")  # of a model as a whole: no head is marked for them
Where = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class Thresholds:
    """When a number becomes a finding. The study `finding_quality` measures what each of them lets through and what it
    misses, on healthy runs and on runs with planted defects: docs/guide/findings.md."""

    collapsed: float = 0.01  # median over rows of H / log(visible) below this
    uniform: float = 0.998  # mean of H / log(visible) above this
    sink: float = 0.4  # mass on one key above this
    sink_share: float = 0.6  # share of heads that are sinks, above which it is a warning
    logit_warning: float = 50.0  # largest score: bfloat16 has steps of 0.25 there
    logit_error: float = 100.0
    growth_ratio: float = 2.0  # last quarter of the run over the first
    growth_level: float = 10.0  # growth below this score is of no interest
    untrained: float = 0.9  # H / log(visible) above which a head has not begun to select
    entropy_drop: float = 0.4  # fall of H / log(visible) between neighbouring windows
    dilution_slope: float = 0.8  # d log(width) / d log(visible), 1 for an average over all keys
    dilution_span: float = 2.0  # lengths must differ by this factor
    duplicate: float = 0.99  # correlation of two heads' attention
    parked: float = 0.5  # mass on one key above which two heads look alike because of it
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

    @property
    def page(self) -> str:
        """Where it is explained: with a picture, how it was provoked, what cured it."""
        return f"docs/guide/findings-explained.md#{self.code.lower()}"

    def __str__(self) -> str:
        limit = f" [{self.threshold}]" if self.threshold else ""
        remedy = f" Try: {self.action}" if self.action else ""
        text = f"{self.severity:7} {self.code} {self.where}: {self.evidence}{limit}. {self.meaning}{remedy}"
        return f"{text} See {self.page}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"page": self.page}


class Findings(list[Finding]):
    """A list of findings that shows itself as a short table, in text and in notebooks."""

    def __repr__(self) -> str:
        if not self:
            return "no findings"
        rows = [(f.severity, f.code, f.where[:40], f.evidence[:100]) for f in self[:20]]
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [" ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=False)) + " " + row[3] for row in rows]
        return "\n".join([*lines, *([f"... and {len(self) - 20} more"] if len(self) > 20 else [])])

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no findings</p>"

        def line(tag: str, *cells: str) -> str:
            return "<tr>" + "".join(f"<{tag} style='text-align:left'>{cell}</{tag}>" for cell in cells) + "</tr>"

        body = ""
        for f in self[:50]:
            code, where, evidence, meaning = map(html.escape, (f.code, f.where[:60], f.evidence[:200], f.meaning))
            action = f" Try: {html.escape(f.action)}" if f.action else ""
            body += line("td", f.severity, code, where, f"{evidence}<br><small>{meaning}{action}</small>")
        more = f"<p>and {len(self) - 50} more</p>" if len(self) > 50 else ""
        head = line("th", "severity", "finding", "where", "evidence")
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{more}"


def verdicts(findings: Iterable[Finding]) -> dict[Where, list[Finding]]:
    """Head -> the findings because of which it needs a look, worst first; a head that is not in it is healthy.

    Every page, mark and sentence takes its verdict from here.
    """
    found: dict[Where, list[Finding]] = {}
    for finding in findings:
        if finding.severity != "info" and finding.code not in HABITS:
            for where in finding.heads:
                found.setdefault(where, []).append(finding)
    return found


class Series:
    """Columns over steps for each (layer, head), read from the blocks once."""

    def __init__(self, record: Record) -> None:
        self.frozen = record.frozen
        self.window = "median over the inputs" if self.frozen else "median over the last quarter of the run"
        self.heads: dict[Where, list[dict[str, float]]] = {}
        for block in sorted(record.blocks, key=lambda b: b.step):
            for head in range(block.heads):
                self.heads.setdefault((block.layer, head), []).append(block.row(head))

    def late(self, where: Where, name: str, weight: str = "rows") -> float:
        """The number a head is judged and shown by: the state a run ended in, or a frozen model's typical input."""
        values = self.column(where, name, weight)
        return median(values if self.frozen else last(values))

    def column(self, where: Where, name: str, weight: str = "rows") -> list[float]:
        return [r[name] for r in self.heads[where] if math.isfinite(r[name]) and r[weight] > 0]


def find(record: Record, thresholds: Thresholds | dict[str, float] | None = None) -> Findings:
    """All findings, worst first. What is information only comes without a remedy: there is nothing to cure."""
    from partita.monitor.rules import Judge

    limits = thresholds if isinstance(thresholds, Thresholds) else Thresholds().with_(**(thresholds or {}))
    found: list[Finding] = []
    known: set[tuple[str, Where]] = set()
    for i, (phase, part) in enumerate(record.by_phase()):
        for f in Judge(part, limits).findings():
            if i == 0:
                found.append(f)
            elif f.heads and not known.issuperset((f.code, where) for where in f.heads):  # not what training showed
                found.append(replace(f, where=f"{f.where} ({phase})"))
        known.update((f.code, where) for f in found for where in f.heads)
    found = [replace(f, action="") if f.severity == "info" else f for f in found]
    return Findings(sorted(found, key=lambda f: (-SEVERITIES.index(f.severity), CODES.index(f.code))))


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
    pairs = combinations(zip(x, y, strict=True), 2)
    return median([(d - b) / (c - a) for (a, b), (c, d) in pairs if abs(c - a) > 1e-9])
