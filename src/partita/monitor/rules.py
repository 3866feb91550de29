"""One function per finding code: (record, series, thresholds) -> findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from partita.monitor.findings import Finding, Series, Thresholds, last, median, slope
from partita.monitor.record import Record

Where = tuple[int, int]
Rule = Callable[[Record, Series, Thresholds], Iterator[Finding]]
Hits = list[tuple[Where, Any]]


def _place(layer: int, hits: Hits) -> str:
    heads = [str(w[1]) for w, _ in hits]
    shown = ", ".join(heads[:8]) + (f" and {len(heads) - 8} more" if len(heads) > 8 else "")
    return f"layer {layer} head{'s' if len(heads) > 1 else ''} {shown}"


def _heads(hits: Hits) -> tuple[Where, ...]:
    return tuple(w for w, _ in hits)


def _picture(series: Series, where: Where, name: str) -> tuple[float, ...]:
    values = series.column(where, name)
    stride = max(1, len(values) // 48)
    return tuple(values[::stride])


def _same_length(series: Series, where: Where) -> bool:
    """Steps compare over time only if their inputs are about as long: a longer one has larger maxima by itself."""
    lengths = series.column(where, "length", weight="length")
    return bool(lengths) and max(lengths) <= 1.5 * min(lengths)


def _worst(hits: Hits, *, largest: bool) -> tuple[Where, float]:
    pick: tuple[Where, float] = (max if largest else min)(hits, key=lambda h: h[1])
    return pick


def collapsed(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> float | None:
        value = median(last(series.column(where, "entropy_p50")))
        return value if value < limits.collapsed else None

    for layer, hits in series.by_layer(test):
        where, value = _worst(hits, largest=False)
        width = median(last(series.column(where, "effective_width")))
        yield Finding(
            "warning",
            "HEAD_COLLAPSED",
            _place(layer, hits),
            f"median H/log(visible) is {value:.3f} in head {where[1]}, about {width:.2f} keys per row",
            "Most rows put all mass on one key, so little gradient reaches the scores.",
            "a smaller scale or a normalised query and key; check the learning rate of the query and key projections.",
            "medium",
            f"collapsed < {limits.collapsed:g}",
            _heads(hits),
            _picture(series, where, "entropy_p50"),
        )


def uniform(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> float | None:
        value = median(last(series.column(where, "normalized_entropy")))
        return value if value > limits.uniform else None

    for layer, hits in series.by_layer(test):
        where, value = _worst(hits, largest=True)
        yield Finding(
            "warning",
            "HEAD_UNIFORM",
            _place(layer, hits),
            f"mean H/log(visible) is {value:.4f} in head {where[1]}",
            "The head averages all keys: it selects nothing (normal at initialisation, a waste after training).",
            "a larger scale, a length-aware scale policy, or removing the head.",
            "medium",
            f"uniform > {limits.uniform:g}",
            _heads(hits),
            _picture(series, where, "normalized_entropy"),
        )


def sinks(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> tuple[float, float] | None:
        first = median(last(series.column(where, "sink_first")))
        top = median(last(series.column(where, "sink_top")))
        length = median(last(series.column(where, "visible")))
        # one of very few keys gets much mass without being a sink
        return (max(first, top), first) if max(first, top) > max(limits.sink, 2.0 / max(length, 1.0)) else None

    layers = list(series.by_layer(test))
    share = sum(len(hits) for _, hits in layers) / max(1, len(series.heads))
    common = share > limits.sink_share
    groups = [hits for _, hits in layers]
    if common:  # a habit of the whole model: one finding, not one per layer
        groups = [[hit for hits in groups for hit in hits]]
    for hits in groups:
        where, (value, first) = max(hits, key=lambda h: h[1][0])
        place = f"{len(hits)} of {len(series.heads)} heads" if common else _place(where[0], hits)
        key = "key 0" if first >= value - 1e-9 else f"key {int(median(last(series.column(where, 'sink_key'))))}"
        yield Finding(
            "warning" if common else "info",
            "SINK_HEAD",
            place,
            f"{value:.0%} of the mass lies on {key} in layer {where[0]} head {where[1]}; "
            f"{share:.0%} of all heads are sinks",
            "Heads park attention they do not need on one key. Common and often harmless; it matters for "
            "quantising, cutting the cache, and maps.",
            "keep that key when cutting a cache; an explicit sink (attention(sink=...)) frees the first token.",
            "high",
            f"sink > {limits.sink:g}",
            _heads(hits),
            _picture(series, where, "sink_first" if key == "key 0" else "sink_top"),
        )


def growth(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> tuple[float, float] | None:
        values = series.column(where, "max_score", weight="length")
        if not values:
            return None
        level = median(last(values))
        quarter = max(1, len(values) // 4)
        parts = [median(values[i * quarter : (i + 1) * quarter]) for i in range(4)] if len(values) >= 4 else [level]
        start = max(abs(parts[0]), 1e-6)
        grows = len(parts) == 4 and _same_length(series, where) and all(a < b for a, b in pairwise(parts))
        ratio = level / start if grows else 1.0
        if level >= limits.logit_warning or (ratio >= limits.growth_ratio and level >= limits.growth_level):
            return level, ratio
        return None

    for layer, hits in series.by_layer(test):
        where, (level, ratio) = max(hits, key=lambda h: h[1][0])
        grown = f", {ratio:.1f} times the first quarter of the run" if ratio > 1 else ""
        # a model that learns from scratch grows its scores too: far below the level that hurts, that is news, no fault
        far = level < limits.logit_warning / 2
        yield Finding(
            "error" if level >= limits.logit_error else "info" if far else "warning",
            "LOGIT_GROWTH",
            _place(layer, hits),
            f"largest score {level:.1f} in head {where[1]}{grown}",
            "Scores grow; that is how a head learns to select, and harmless while it stops."
            if far
            else "Scores of this size lose digits in half precision and freeze the softmax.",
            "normalise query and key, cap the scores (softcap), or lower the learning rate of their projections.",
            "medium",
            f"level {limits.logit_warning:g}/{limits.logit_error:g}, growth x{limits.growth_ratio:g} above "
            f"{limits.growth_level:g}",
            _heads(hits),
            _picture(series, where, "max_score"),
        )


def drop(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> tuple[float, float, float, bool] | None:
        values = series.column(where, "normalized_entropy")
        window = max(2, min(8, len(values) // 4))
        if len(values) < 2 * window or not _same_length(series, where):
            return None
        falls = [
            (median(values[t - window : t]), median(values[t : t + window]), t)
            for t in range(window, len(values) - window + 1)
        ]
        before, after, when = max(falls, key=lambda f: f[0] - f[1])
        now = median(last(values))
        # heads that start by averaging all keys learn to select early in a run
        learned = values[0] > limits.untrained and 3 * when <= len(values) and now > limits.collapsed
        # a fall that healed is history, and a slow decline is learning
        return (
            (before - after, before, now, learned)
            if before - after > limits.entropy_drop and before - now > limits.entropy_drop / 2
            else None
        )

    for layer, hits in series.by_layer(test):
        where, (_, before, now, _) = max(hits, key=lambda h: h[1][0])
        first = all(learned for _, (_, _, _, learned) in hits)
        yield Finding(
            "info" if first else "warning",
            "ENTROPY_DROP",
            _place(layer, hits),
            f"H/log(visible) fell from {before:.2f} to {now:.2f} within a few steps in head {where[1]}",
            "A head that averaged all keys has begun to select: learning, unless the loss rises there."
            if first
            else "A sudden fall often comes before a spike of the loss.",
            "compare with the loss at that step; lower the learning rate, clip gradients, or add warm-up.",
            "low",
            f"fall > {limits.entropy_drop:g} between neighbouring windows",
            _heads(hits),
            _picture(series, where, "normalized_entropy"),
        )


def dilution(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> tuple[float, float, float, float] | None:
        by_length: dict[int, list[dict[str, float]]] = {}
        for row in series.heads[where]:
            if row["rows"] > 0 and row["effective_width"] > 0 and row["length"] > 0:
                by_length.setdefault(int(row["length"]), []).append(row)
        lengths = sorted(by_length)
        if len(lengths) < 2 or lengths[-1] / lengths[0] < limits.dilution_span:
            return None
        kept = lengths[:: max(1, len(lengths) // 48)]  # pairwise slopes: a few dozen lengths are enough
        width = [median([r["effective_width"] for r in by_length[n]]) for n in kept]
        visible = [median([r["visible"] for r in by_length[n]]) for n in kept]
        if median([r["normalized_entropy"] for r in by_length[lengths[0]]]) > limits.uniform:
            return None  # an average over all keys at any length: that is HEAD_UNIFORM
        value = slope([math.log(v) for v in visible], [math.log(w) for w in width])
        return (value, width[-1] / width[0], lengths[0], lengths[-1]) if value > limits.dilution_slope else None

    layers = list(series.by_layer(test))
    hits = [hit for _, layer_hits in layers for hit in layer_hits]
    if not hits:
        return
    share = len(hits) / len(series.heads)
    where, (value, ratio, short, long) = sorted(hits, key=lambda h: h[1][0])[len(hits) // 2]  # a typical one
    yield Finding(
        "warning" if share > 0.5 else "info",
        "LENGTH_DILUTION",
        f"{len(hits)} of {len(series.heads)} heads in {len(layers)} layer{'s' if len(layers) > 1 else ''}",
        f"effective width grows {ratio:.1f} times between {short} and {long} keys (exponent {value:.2f} in layer "
        f"{where[0]} head {where[1]})",
        "At greater lengths the same head spreads over proportionally more keys: what it picked out at the "
        "training length fades.",
        "a length-aware scale policy (partita.scale.LogLength or SqrtLogLength) or solving for a target width.",
        "high" if share > 0.5 else "medium",
        f"exponent > {limits.dilution_slope:g}",
        _heads(hits),
        _picture(series, where, "effective_width"),
    )


def duplicates(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> float | None:
        value = median(last(series.column(where, "twin_similarity")))
        idle = median(last(series.column(where, "normalized_entropy"))) > limits.uniform
        parked = median(last(series.column(where, "sink_top"))) > 0.9
        return value if value > limits.duplicate and not idle and not parked else None

    for layer, hits in series.by_layer(test):
        if len(hits) < 2:
            continue
        where, value = _worst(hits, largest=True)
        twin = int(median(last(series.column(where, "twin"))))
        yield Finding(
            "warning",
            "DUPLICATE_HEADS",
            _place(layer, hits),
            f"heads {where[1]} and {twin} attend alike (correlation {value:.4f})",
            "Two heads compute one distribution; the second adds no selection.",
            "prune one of them, or check the initialisation (tied or copied heads).",
            "medium",
            f"correlation > {limits.duplicate:g}",
            _heads(hits),
            _picture(series, where, "twin_similarity"),
        )


def nonfinite(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> float | None:
        count = sum(r["nonfinite"] for r in series.heads[where] if math.isfinite(r["nonfinite"]))
        return count if count > 0 else None

    for layer, hits in series.by_layer(test):
        total = int(sum(v for _, v in hits))
        yield Finding(
            "error",
            "NONFINITE",
            _place(layer, hits),
            f"{total} rows with NaN or infinite scores",
            "Their output is NaN or undefined, and the gradients of the whole batch with it.",
            "look at the inputs of this layer at the first bad step; half precision overflows above 65504.",
            "high",
            "any",
            _heads(hits),
            tuple(r["nonfinite"] for r in series.heads[hits[0][0]])[:48],
        )
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
        rows = [r for r in record.losses if r["name"] == name]

        def column(key: str, rows: list[dict[str, Any]] = rows) -> list[float]:
            return [float(r[key]) for r in rows if r.get(key) is not None and math.isfinite(float(r[key]))]

        where = f"loss {name}"
        norms = [median(last(column(k))) for k in ("norm_query", "norm_key") if column(k)]
        off = [n for n in norms if abs(n - 1) > limits.norm_tolerance]
        if off:
            yield Finding(
                "warning",
                "NOT_NORMALISED",
                where,
                f"vectors have norm {', '.join(f'{n:.2f}' for n in norms)}",
                "The scale then mixes with the norm: the temperature does not mean what it says.",
                "normalise both sides, or pass normalize=True.",
                "high",
                f"| |x| - 1 | > {limits.norm_tolerance:g}",
                (),
                tuple(column("norm_query"))[-48:],
            )
        candidates, negatives = median(last(column("candidates"))), median(last(column("effective_negatives")))
        if candidates >= limits.negatives_least and negatives < limits.negatives * (candidates - 1):
            yield Finding(
                "warning",
                "EFFECTIVE_NEGATIVES_LOW",
                where,
                f"{negatives:.1f} of {candidates - 1:.0f} negatives carry the gradient",
                "A few hard (or false) negatives decide every step; the rest of the batch is wasted.",
                "a higher temperature, or a look at near-duplicates in the batch.",
                "medium",
                f"effective / negatives < {limits.negatives:g}",
                (),
                tuple(column("effective_negatives"))[-48:],
            )
        bound, cap = median(last(column("bound"))), median(last(column("cap")))
        if cap > 0 and bound > limits.saturation * cap:
            yield Finding(
                "warning",
                "MI_SATURATED",
                where,
                f"mutual-information bound {bound:.2f} of at most log N = {cap:.2f} nats",
                "The bound cannot grow further with this many candidates: the loss no longer measures progress.",
                "more candidates (larger batch, gathered across ranks) or harder ones.",
                "high",
                f"bound / log N > {limits.saturation:g}",
                (),
                tuple(column("bound"))[-48:],
            )
        scale = median(last(column("scale")))
        if scale >= 0.99 * limits.scale_cap:
            yield Finding(
                "warning",
                "SCALE_AT_CAP",
                where,
                f"scale {scale:.1f} at its cap {limits.scale_cap:g}",
                "The learned scale wants to be sharper than it may; its gradient is cut off.",
                "check for duplicates, then raise the cap or fix the scale.",
                "medium",
                f"scale >= 0.99 * {limits.scale_cap:g}",
                (),
                tuple(column("scale"))[-48:],
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


RULES: tuple[Rule, ...] = (collapsed, uniform, sinks, growth, drop, dilution, duplicates, nonfinite, contrast, coverage)
