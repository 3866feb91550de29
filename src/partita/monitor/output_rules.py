"""Findings on the output side (losses) and about what was not seen: (record, series, thresholds) -> findings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from partita.monitor.findings import Finding, Series, Thresholds, last, median
from partita.monitor.record import Record
from partita.monitor.rules import Rule


def broken_loss(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    for name in dict.fromkeys(r["name"] for r in record.losses):
        bad = sum(int(r.get("nonfinite") or 0) for r in record.losses if r["name"] == name)
        if bad:
            yield Finding(
                "error",
                "NONFINITE",
                f"loss {name}",
                f"{bad} rows with NaN or infinite scores",
                "The loss is NaN or infinite.",
                "look at the logits of the first bad step.",
                "high",
                "any",
            )


def contrast(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    for name in dict.fromkeys(r["name"] for r in record.losses if r.get("type") == "contrastive"):
        yield from _of_one_loss(record, name, limits)


def _of_one_loss(record: Record, name: str, limits: Thresholds) -> Iterator[Finding]:
    rows = [r for r in record.losses if r["name"] == name]

    def column(key: str) -> list[float]:
        return [float(r[key]) for r in rows if r.get(key) is not None and math.isfinite(float(r[key]))]

    def finding(
        code: str, evidence: str, meaning: str, action: str, confidence: str, limit: str, *, shows: str
    ) -> Finding:
        picture = tuple(column(shows))[-48:]
        return Finding("warning", code, f"loss {name}", evidence, meaning, action, confidence, limit, (), picture)

    norms = [median(last(column(k))) for k in ("norm_query", "norm_key") if column(k)]
    off = [n for n in norms if abs(n - 1) > limits.norm_tolerance]
    if off:
        yield finding(
            "NOT_NORMALISED",
            f"vectors have norm {', '.join(f'{n:.2f}' for n in norms)}",
            "The scale then mixes with the norm: the temperature does not mean what it says.",
            "normalise both sides, or pass normalize=True.",
            "high",
            f"| |x| - 1 | > {limits.norm_tolerance:g}",
            shows="norm_query",
        )
    candidates, negatives = median(last(column("candidates"))), median(last(column("effective_negatives")))
    if candidates >= limits.negatives_least and negatives < limits.negatives * (candidates - 1):
        yield finding(
            "EFFECTIVE_NEGATIVES_LOW",
            f"{negatives:.1f} of {candidates - 1:.0f} negatives carry the gradient",
            "A few hard (or false) negatives decide every step; the rest of the batch is wasted.",
            "a higher temperature, or a look at near-duplicates in the batch.",
            "medium",
            f"effective / negatives < {limits.negatives:g}",
            shows="effective_negatives",
        )
    bound, cap = median(last(column("bound"))), median(last(column("cap")))
    if cap > 0 and bound > limits.saturation * cap:
        saturated = finding(
            "MI_SATURATED",
            f"mutual-information bound {bound:.2f} of at most log N = {cap:.2f} nats",
            "The bound cannot grow further with this many candidates: the loss no longer measures progress.",
            "more candidates (larger batch, gathered across ranks) or harder ones.",
            "high",
            f"bound / log N > {limits.saturation:g}",
            shows="bound",
        )
        yield replace(saturated, severity="info") if record.frozen else saturated  # nothing is learning from it
    scale = median(last(column("scale")))
    if abs(scale - limits.scale_cap) <= 0.01 * limits.scale_cap:  # beyond it nobody has clamped anything
        yield finding(
            "SCALE_AT_CAP",
            f"scale {scale:.1f} at its cap {limits.scale_cap:g}",
            "The learned scale wants to be sharper than it may; its gradient is cut off.",
            "check for duplicates, then raise the cap or fix the scale.",
            "medium",
            f"scale within 1 % of {limits.scale_cap:g}",
            shows="scale",
        )


def coverage(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    missed = record.coverage.get("missed") or []
    if missed:
        names = ", ".join(str(m["name"])[:60] for m in missed[:3]) + (" ..." if len(missed) > 3 else "")
        yield Finding(
            "info" if record.blocks else "warning",
            "COVERAGE",
            names,
            str(record.coverage.get("text", ""))[:400],
            "What was not seen is not judged.",
            "w.observe(query, key, ...) inside that module, or F.scaled_dot_product_attention there.",
            "high",
        )


RULES: tuple[Rule, ...] = (broken_loss, contrast, coverage)
