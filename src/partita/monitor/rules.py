"""One function per finding code: (record, series, thresholds) -> findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from partita.monitor.findings import Finding, Series, Thresholds, Where, median, slope
from partita.monitor.record import Record

BIN = 1 / 256  # of the histogram that quantiles are read from: nothing finer can be said
Rule = Callable[[Record, Series, Thresholds], Iterator[Finding]]
Hits = list[tuple[Where, Any]]


def _place(layer: int, hits: Hits) -> str:
    heads = [str(w[1]) for w, _ in hits]
    shown = ", ".join(heads[:8]) + (f" and {len(heads) - 8} more" if len(heads) > 8 else "")
    return f"layer {layer} head{'s' if len(heads) > 1 else ''} {shown}"


def _whole(value: float) -> str:
    return str(int(value)) if math.isfinite(value) else "unknown"


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


def _above(series: Series, limit: float, measure: Callable[[Where], float]) -> Iterator[tuple[int, Hits, Where, float]]:
    """Each layer with heads whose number lies above a limit, those heads, and the worst of them with its number."""

    def test(where: Where) -> float | None:
        value = measure(where)
        return value if value > limit else None

    for layer, hits in series.by_layer(test):
        yield layer, hits, *max(hits, key=lambda h: h[1])


def collapsed(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> float | None:
        value = series.late(where, "normalized_entropy_p50")
        return value if value < limits.collapsed else None

    for layer, hits in series.by_layer(test):
        where, value = min(hits, key=lambda h: h[1])
        value = max(value, BIN)
        mean, width = (series.late(where, name) for name in ("normalized_entropy", "effective_width"))
        yield Finding(
            "warning",
            "HEAD_COLLAPSED",
            _place(layer, hits),
            f"half of the rows of head {where[1]} have H / log n below {value:.3f} (mean over rows {mean:.3f}, mean "
            f"width {width:.2f} keys; {series.window})",
            "Most rows put all their mass on one key."
            if series.frozen
            else "Most rows put all their mass on one key, so little gradient reaches the scores.",
            "a smaller scale, if this head should weigh several keys."
            if series.frozen
            else "a smaller scale or a normalised query and key; check the learning rate of their projections.",
            "medium",
            f"collapsed < {limits.collapsed:g}",
            _heads(hits),
            _picture(series, where, "normalized_entropy_p50"),
        )


def uniform(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    entropies = _above(series, limits.uniform, lambda where: series.late(where, "normalized_entropy"))
    for layer, hits, where, value in entropies:
        yield Finding(
            "warning",
            "HEAD_UNIFORM",
            _place(layer, hits),
            f"mean over rows of H / log n is {value:.4f} in head {where[1]} ({series.window})",
            "The head averages all keys: it selects nothing (normal at initialisation, a waste after training).",
            "a larger scale, or removing the head." if series.frozen else "more steps, a larger scale, or removing it.",
            "medium",
            f"uniform > {limits.uniform:g}",
            _heads(hits),
            _picture(series, where, "normalized_entropy"),
        )


def sinks(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> tuple[float, float] | None:
        first, top = series.late(where, "sink_first"), series.late(where, "sink_top")
        length = series.late(where, "visible")
        # one of very few keys gets much mass without being a sink
        return (max(first, top), first) if max(first, top) > max(limits.sink, 4.0 / max(length, 1.0)) else None

    layers = list(series.by_layer(test))
    hits = [hit for _, found in layers for hit in found]  # a habit of the whole model: one finding, not one per layer
    share = len(hits) / max(1, len(series.heads))
    common = share > limits.sink_share
    if hits:
        where, (value, first) = max(hits, key=lambda h: h[1][0])
        many = f"{len(hits)} of {len(series.heads)} heads in {len(layers)} layers"
        place = many if len(layers) > 1 else _place(where[0], hits)
        key = "key 0" if first >= value - 1e-9 else f"key {_whole(series.late(where, 'sink_key'))}"
        yield Finding(
            "warning" if common else "info",
            "SINK_HEAD",
            place,
            f"{value:.0%} of the mass of layer {where[0]} head {where[1]} lies on {key} ({series.window}); "
            f"{share:.0%} of all heads are sinks",
            "Heads park attention they do not need on one key. Common and often harmless; it matters for "
            "quantising, cutting the cache, and maps.",
            "keep that key when cutting a cache; an explicit sink (attention(sink=...)) frees the first token.",
            "high",
            f"sink > {limits.sink:g}, of more than {limits.sink_share:.0%} of the heads",
            _heads(hits),
            _picture(series, where, "sink_first" if key == "key 0" else "sink_top"),
        )


def growth(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> tuple[float, float] | None:
        values = series.column(where, "max_score", weight="length")
        if not values:
            return None
        level = series.late(where, "max_score", weight="length")
        quarter = max(1, len(values) // 4)
        parts = [median(values[i * quarter : (i + 1) * quarter]) for i in range(4)] if len(values) >= 4 else [level]
        start = max(abs(parts[0]), 1e-6)
        # inputs of a frozen model have an order, and no history
        grows = len(parts) == 4 and not series.frozen and _same_length(series, where)
        ratio = level / start if grows and all(a < b for a, b in pairwise(parts)) else 1.0
        if level >= limits.logit_warning or (ratio >= limits.growth_ratio and level >= limits.growth_level):
            return level, ratio
        return None

    layers = list(series.by_layer(test))
    for layer, found in layers:  # above the line of the chart
        if hits := [hit for hit in found if hit[1][0] >= limits.logit_warning]:
            yield _growth(series, limits, _place(layer, hits), hits)
    # a model that learns from scratch grows its scores too: below the level that hurts, that is news, no fault
    below = [hit for _, found in layers for hit in found if hit[1][0] < limits.logit_warning]
    if below:
        yield _growth(series, limits, f"{len(below)} of {len(series.heads)} heads", below)


def _growth(series: Series, limits: Thresholds, place: str, hits: Hits) -> Finding:
    where, (level, ratio) = max(hits, key=lambda h: h[1][0])
    grown = f", {ratio:.1f} times the first quarter of the run" if ratio > 1 else ""
    below = level < limits.logit_warning
    return Finding(
        "error" if level >= limits.logit_error else "info" if below else "warning",
        "LOGIT_GROWTH",
        place,
        f"largest score {level:.1f} in layer {where[0]} head {where[1]} ({series.window}){grown}",
        f"Scores grow; that is how a head learns to select, and harmless while it stops below {limits.logit_warning:g}."
        if below
        else "Scores of this size lose digits in half precision and freeze the softmax.",
        "keep the scores in float32, or cap them (softcap)."
        if series.frozen
        else "normalise query and key, cap the scores (softcap), or lower the learning rate of their projections.",
        "medium",
        f"level {limits.logit_warning:g}/{limits.logit_error:g}, growth x{limits.growth_ratio:g} above "
        f"{limits.growth_level:g}",
        _heads(hits),
        _picture(series, where, "max_score"),
    )


def drop(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> tuple[float, float, float, bool] | None:
        found = largest_fall(series, where)
        if found is None:
            return None
        values = series.column(where, "normalized_entropy")
        before, after, when, window = found
        now = series.late(where, "normalized_entropy")
        calm = _loss_went_on_falling(record, when, window, len(values))
        # heads that start by averaging all keys learn to select early in a run
        early = values[0] > limits.untrained and 3 * when <= len(values)
        learned = (early or calm) and series.late(where, "normalized_entropy_p50") > limits.collapsed
        # a fall that healed is history, and a slow decline is learning
        return (
            (before - after, before, now, learned)
            if before - after > limits.entropy_drop and before - now > limits.entropy_drop / 2
            else None
        )

    layers = [] if series.frozen else list(series.by_layer(test))  # inputs have no history
    for layer, found, harmless in ((n, found, kind) for n, found in layers for kind in (False, True)):
        hits = [hit for hit in found if hit[1][3] == harmless]
        if not hits:
            continue
        where, (_, before, now, _) = max(hits, key=lambda h: h[1][0])
        yield Finding(
            "info" if harmless else "warning",
            "ENTROPY_DROP",
            _place(layer, hits),
            f"mean H / log n fell from {before:.2f} to {now:.2f} within a few steps in head {where[1]}",
            "The head has begun to select, and the loss did not rise with it: learning."
            if harmless
            else "A sudden fall often comes before a spike of the loss.",
            "compare with the loss at that step; lower the learning rate, clip gradients, or add warm-up.",
            "low",
            f"fall > {limits.entropy_drop:g} between neighbouring windows",
            _heads(hits),
            _picture(series, where, "normalized_entropy"),
        )


def largest_fall(series: Series, where: Where) -> tuple[float, float, int, int] | None:
    """H / log n before and after its largest fall between neighbouring windows, when it was, and how long they are."""
    values = series.column(where, "normalized_entropy")
    window = max(2, min(8, len(values) // 4))
    if len(values) < 2 * window or not _same_length(series, where):
        return None
    falls = [
        (median(values[t - window : t]), median(values[t : t + window]), t, window)
        for t in range(window, len(values) - window + 1)
    ]
    return max(falls, key=lambda f: f[0] - f[1])


def _loss_went_on_falling(record: Record, when: int, window: int, steps: int) -> bool:
    """Whether the losses of the run, where it has them at every step, are no higher after the fall than before."""
    for name in dict.fromkeys(r["name"] for r in record.losses):
        rows = [r for r in record.losses if r["name"] == name]
        values = [float(r["loss"]) for r in rows if r.get("loss") is not None and math.isfinite(float(r["loss"]))]
        if len(values) == steps:
            return max(median(values[when : when + window]), median(values[-window:])) <= median(
                values[when - window : when]
            )
    return False


def trained_length(record: Record) -> int | None:
    """The longest input the model was trained at: as it was told, as it was seen, or as many as it has positions."""
    told = record.provenance.get("training_length")
    if isinstance(told, (int, float)) and told > 0:
        return int(told)
    seen = [v for b in record.blocks if b.training for v in b.column("length") if math.isfinite(v)]
    has = record.provenance.get("positions")
    return int(max(seen)) if seen else int(has) if isinstance(has, (int, float)) and has > 0 else None


def width_law(series: Series, where: Where, limits: Thresholds) -> tuple[float, float, float, float] | None:
    """d log(width) / d log(visible keys) over inputs of several lengths, the growth of the width, and the lengths."""
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
    return value, width[-1] / width[0], lengths[0], lengths[-1]


def dilution(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    def test(where: Where) -> tuple[float, float, float, float] | None:
        found = width_law(series, where, limits)
        return found if found is not None and found[0] > limits.dilution_slope else None

    layers = list(series.by_layer(test))
    hits = [hit for _, layer_hits in layers for hit in layer_hits]
    if not hits:
        return
    share, trained = len(hits) / len(series.heads), trained_length(record)
    where, (value, ratio, short, long) = sorted(hits, key=lambda h: h[1][0])[len(hits) // 2]  # a typical one
    beyond = trained is not None and long > trained
    yield Finding(
        "warning" if beyond and share > 0.5 else "info",
        "LENGTH_DILUTION",
        f"{len(hits)} of {len(series.heads)} heads in {len(layers)} layer{'s' if len(layers) > 1 else ''}",
        f"effective width grows {ratio:.1f} times between {short} and {long} keys (exponent {value:.2f} in layer "
        f"{where[0]} head {where[1]})" + (f"; trained at up to {trained}" if trained is not None else ""),
        "Beyond the length it was trained at the model spreads over proportionally more keys: what it picked out there "
        "may fade."
        if beyond
        else "Longer inputs are read with a wider attention. Within the lengths a model was trained at that is how it "
        "learned to read them.",
        _policy_advice(record),
        "high" if share > 0.5 else "medium",
        f"exponent > {limits.dilution_slope:g}",
        _heads(hits),
        _picture(series, where, "effective_width"),
    )


def critical_law(series: Series, where: Where) -> list[tuple[int, float, float]]:
    """(length, critical scale in units of the present one, present scale) of a head, by length; if it was measured."""
    by_length: dict[int, list[dict[str, float]]] = {}
    for row in series.heads[where]:
        if not math.isnan(row["critical"]) and row["rows"] > 0:
            by_length.setdefault(int(row["length"]), []).append(row)
    return [
        (n, median([r["critical"] for r in rows]), median([r["scale"] for r in rows]))
        for n, rows in sorted(by_length.items())
    ]


def below_critical(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Whether scales suffice for the length that was read, and how both grow with it."""
    laws = {where: law for where in sorted(series.heads) if (law := critical_law(series, where))}
    if not laws:
        return
    longest = max(law[-1][0] for law in laws.values())
    long = {where: law for where, law in laws.items() if law[-1][0] == longest}
    below = [(where, law) for where, law in long.items() if law[-1][1] > 1]
    shown = sorted(below or list(long.items()), key=lambda hit: hit[1][-1][1])
    where, law = shown[len(shown) // 2]  # a typical one
    yield Finding(
        "info",
        "LENGTH_DILUTION",
        f"{len(below)} of {len(long)} heads",
        f"the scale is {'below' if below else 'above'} its critical value at {longest} keys: {1 / law[-1][1]:.2f} of "
        f"it in layer {where[0]} head {where[1]}{_growths(law, limits)}",
        "Below its critical scale a row's best key is outweighed by those that compete with it: it averages over more "
        "keys the more there are."
        if below
        else "Above its critical scale a row keeps its mass on a few keys, however many there are.",
        "",
        "medium",
        "scale < critical scale",
        tuple(w for w, _ in below),
        tuple(c for _, c, _ in law if math.isfinite(c))[:48],
    )


def _growths(law: list[tuple[int, float, float]], limits: Thresholds) -> str:
    """How the critical scale and the scale grow from the shortest to the longest input."""
    (short, first, before), (long, second, after) = law[0], law[-1]
    if long < limits.dilution_span * short or not all(0 < x < math.inf for x in (first, second)):
        return ""
    grown = after / before if before > 0 and math.isfinite(after) else 1.0
    ratio = second / first * grown
    between = f"; from {short} to {long} keys the critical scale grows {ratio:.2f} times"
    if min(short, long) > 2 and ratio > 0:
        between += f" (as log n to the {math.log(ratio) / math.log(math.log(long) / math.log(short)):.2f})"
    return f"{between} and the scale {grown:.2f} times"


def _policy_advice(record: Record) -> str:
    """What this record's own study of scale policies shows at its greatest length; without one, to make one."""
    rows = [r for r in record.studies if r.get("study") == "scale-policy"]
    rows = [r for r in rows if all(isinstance(r.get(k), (int, float)) for k in ("loss", "length"))]
    longest = max((float(r["length"]) for r in rows), default=0.0)
    at: dict[str, list[float]] = {}
    for row in rows:
        if float(row["length"]) == longest:
            at.setdefault(str(row.get("policy")), []).append(float(row["loss"]))
    if len(at) < 2:
        return (
            "compare scale policies at that length on held-out text (LogLength, SqrtLogLength, a solved width): which "
            "one helps depends on the model."
        )
    mean = {policy: sum(v) / len(v) for policy, v in at.items()}
    best, worst = min(mean, key=lambda p: mean[p]), max(mean, key=lambda p: mean[p])
    return (
        f"of the scale policies studied here, {best} has the lowest loss at {longest:.0f} tokens ({mean[best]:.3f}, "
        f"against {mean[worst]:.3f} under {worst})."
    )


def likeness(series: Series, where: Where, limits: Thresholds) -> float:
    """Correlation with the most similar head; NaN where averaging or a sink makes heads alike without any choice."""
    idle = series.late(where, "normalized_entropy") > limits.uniform
    parked = series.late(where, "sink_top") > limits.parked
    return math.nan if idle or parked else series.late(where, "twin_similarity")


def duplicates(record: Record, series: Series, limits: Thresholds) -> Iterator[Finding]:
    for layer, hits, where, value in _above(series, limits.duplicate, lambda where: likeness(series, where, limits)):
        if len(hits) < 2:
            continue
        twin = _whole(series.late(where, "twin"))
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
            "Their output is NaN or undefined"
            + ("." if series.frozen else ", and the gradients of the batch with it."),
            f"look at what this layer is given at the first bad {record.unit}; half precision overflows above 65504.",
            "high",
            "any",
            _heads(hits),
            tuple(r["nonfinite"] for r in series.heads[hits[0][0]])[:48],
        )
    wrong = record.coverage.get("impossible") or ()
    if wrong:
        yield Finding(
            "error",
            "NONFINITE",
            "partita itself",
            f"{len(wrong)} numbers that cannot be, first {wrong[0]}",
            "A fault of partita, not of the model. They are left out of tables and pages.",
            "report the model's kind of attention and this line as an issue of partita.",
            "high",
            "any",
        )


RULES: tuple[Rule, ...] = (collapsed, uniform, sinks, growth, drop, dilution, below_critical, duplicates, nonfinite)
