"""What makes a finding: a table of texts, one rule for each code, and one evaluator, `Judge`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby, pairwise
from typing import Any

from partita.monitor.findings import KINDS, Finding, Series, Thresholds, Where, last, median, slope
from partita.monitor.record import LOSS_COLUMNS, Record

BIN = 1 / 256  # of the histogram that quantiles are read from: nothing finer is known
Hits = list[tuple[Where, Any]]  # heads, and the number by which a rule holds for each

# what it means and what to try, by code and by case; "frozen": a model that was not trained while it was watched
TEXTS = {
    "HEAD_COLLAPSED": (
        "Most rows put all their mass on one key, so little gradient reaches the scores.",
        "a smaller scale or a normalised query and key; check the learning rate of their projections.",
    ),
    "HEAD_COLLAPSED frozen": (
        "Most rows put all their mass on one key.",
        "a smaller scale, if this head should weigh several keys.",
    ),
    "HEAD_UNIFORM": (
        "The head averages all keys: it selects nothing (normal at initialisation, a waste after training).",
        "more steps, a larger scale, or removing it.",
    ),
    "HEAD_UNIFORM frozen": ("", "a larger scale, or removing the head."),
    "SINK_HEAD": (
        "Heads park attention they do not need on one key. Common and often harmless; it matters for "
        "quantising, cutting the cache, and maps.",
        "keep that key when cutting a cache; an explicit sink (attention(sink=...)) frees the first token.",
    ),
    "LOGIT_GROWTH": (
        "Scores of this size lose digits in half precision and freeze the softmax.",
        "normalise query and key, cap the scores (softcap), or lower the learning rate of their projections.",
    ),
    "LOGIT_GROWTH frozen": ("", "keep the scores in float32, or cap them (softcap)."),
    "LOGIT_GROWTH below": (
        "Scores grow; that is how a head learns to select, and harmless while it stops below {logit_warning:g}.",
        "",
    ),
    "ENTROPY_DROP": (
        "A sudden fall often comes before a spike of the loss.",
        "compare with the loss at that step; lower the learning rate, clip gradients, or add warm-up.",
    ),
    "ENTROPY_DROP learned": ("The head has begun to select, and the loss did not rise with it: learning.", ""),
    "LENGTH_DILUTION": (
        "Longer inputs are read with a wider attention. Within the lengths a model was trained at that is how it "
        "learned to read them.",
        "",
    ),
    "LENGTH_DILUTION beyond": (
        "Beyond the length it was trained at the model spreads over proportionally more keys: what it picked out there "
        "may fade.",
        "",
    ),
    "LENGTH_DILUTION below critical": (
        "Below its critical scale a row's best key is outweighed by those that compete with it: it averages over more "
        "keys the more there are.",
        "",
    ),
    "LENGTH_DILUTION above critical": (
        "Above its critical scale a row keeps its mass on a few keys, however many there are.",
        "",
    ),
    "DUPLICATE_HEADS": (
        "Two heads compute one distribution; the second adds no selection.",
        "prune one of them, or check the initialisation (tied or copied heads).",
    ),
    "NONFINITE": (
        "Their output is NaN or undefined, and the gradients of the batch with it.",
        "look at what this layer is given at the first bad {unit}; half precision overflows above 65504.",
    ),
    "NONFINITE frozen": ("Their output is NaN or undefined.", ""),
    "NONFINITE ours": (
        "A fault of partita, not of the model. They are left out of tables and pages.",
        "report the model's kind of attention and this line as an issue of partita.",
    ),
    "NONFINITE loss": ("The loss is NaN or infinite.", "look at the logits of the first bad step."),
    "NOT_NORMALISED": (
        "The scale then mixes with the norm: the temperature does not mean what it says.",
        "normalise both sides, or pass normalize=True.",
    ),
    "EFFECTIVE_NEGATIVES_LOW": (
        "A few hard (or false) negatives decide every step; the rest of the batch is wasted.",
        "a higher temperature, or a look at near-duplicates in the batch.",
    ),
    "MI_SATURATED": (
        "The bound cannot grow further with this many candidates: the loss no longer measures progress.",
        "more candidates (larger batch, gathered across ranks) or harder ones.",
    ),
    "SCALE_AT_CAP": (
        "The learned scale wants to be sharper than it may; its gradient is cut off.",
        "check for duplicates, then raise the cap or fix the scale.",
    ),
    "COVERAGE": (
        "What was not seen is not judged.",
        "w.observe(query, key, ...) inside that module, or F.scaled_dot_product_attention there.",
    ),
}


class Judge:
    """One record, judged by all rules."""

    def __init__(self, record: Record, limits: Thresholds) -> None:
        self.record, self.limits, self.series = record, limits, Series(record)
        self.words = asdict(limits) | {"unit": record.unit}

    def findings(self) -> Iterator[Finding]:
        rules = (
            *(self.collapsed, self.uniform, self.sinks, self.growth, self.drop, self.dilution, self.below_critical),
            *(self.duplicates, self.nonfinite, self.losses, self.coverage),
        )
        for rule in rules:
            yield from rule()

    def finding(
        self, severity: str, code: str, where: str, evidence: str, hits: Hits | None = None, *,
        picture: tuple[Where, str] | None = None, series: Iterable[float] = (), case: str = "", **changes: Any,
    ) -> Finding:  # fmt: skip
        """A finding of these heads; case: which of a code's texts. The picture is a column of a head, or the series."""
        cases = TEXTS.get(f"{code} {case or 'frozen' * self.series.frozen}", ("", "")), TEXTS[code]
        meaning, action = (next(filter(None, texts), "") for texts in zip(*cases, strict=True))
        confidence, threshold = KINDS[code]
        if picture is not None:
            values = self.series.column(*picture)
            series = values[:: max(1, len(values) // 48)]
        heads = tuple(where for where, _ in hits or ())
        meaning, action, threshold = (text.format(**self.words) for text in (meaning, action, threshold))
        text = (evidence, meaning, action, confidence, threshold)
        return replace(Finding(severity, code, where, *text, heads, tuple(series)), **changes)

    def hits(self, measure: Callable[[Where], Any], holds: Callable[[Any], Any] = bool) -> Hits:
        """The heads for whose number a rule holds."""
        return [(where, value) for where in sorted(self.series.heads) if holds(value := measure(where))]

    def above(self, limit: float, measure: Callable[[Where], float]) -> Iterator[tuple[Hits, Where, float]]:
        """Of each layer the heads whose number is above a limit, and the worst of them with its number."""
        for hits in _by_layer(self.hits(measure, lambda value: value > limit)):
            yield hits, *max(hits, key=lambda h: h[1])

    # ---- heads -------------------------------------------------------------------------------------------------------

    def collapsed(self) -> Iterator[Finding]:
        late, column = self.series.late, "normalized_entropy_p50"
        for hits in _by_layer(self.hits(lambda w: late(w, column), lambda value: value < self.limits.collapsed)):
            where, value = min(hits, key=lambda h: h[1])
            mean, width = (late(where, name) for name in ("normalized_entropy", "effective_width"))
            evidence = (
                f"half of the rows of head {where[1]} have H / log n below {max(value, BIN):.3f} (mean over rows "
                f"{mean:.3f}, mean width {width:.2f} keys; {self.series.window})"
            )
            yield self.finding("warning", "HEAD_COLLAPSED", _place(hits), evidence, hits, picture=(where, column))

    def uniform(self) -> Iterator[Finding]:
        column = "normalized_entropy"
        for hits, where, value in self.above(self.limits.uniform, lambda w: self.series.late(w, column)):
            evidence = f"mean over rows of H / log n is {value:.4f} in head {where[1]} ({self.series.window})"
            yield self.finding("warning", "HEAD_UNIFORM", _place(hits), evidence, hits, picture=(where, column))

    def sinks(self) -> Iterator[Finding]:
        """A habit of the whole model: one finding, not one per layer."""
        late, limits, heads = self.series.late, self.limits, len(self.series.heads)

        def measure(where: Where) -> tuple[float, float] | None:
            first, top = late(where, "sink_first"), late(where, "sink_top")
            # one of very few keys gets much mass without being a sink
            enough = max(first, top) > max(limits.sink, 4.0 / max(late(where, "visible"), 1.0))
            return (max(first, top), first) if enough else None

        if not (hits := self.hits(measure)):
            return
        where, (value, first) = max(hits, key=lambda h: h[1][0])
        share, layers = len(hits) / heads, len({w[0] for w, _ in hits})
        key = "key 0" if first >= value - 1e-9 else f"key {_whole(late(where, 'sink_key'))}"
        picture = where, "sink_first" if key == "key 0" else "sink_top"
        place = f"{len(hits)} of {heads} heads in {layers} layers" if layers > 1 else _place(hits)
        evidence = (
            f"{value:.0%} of the mass of layer {where[0]} head {where[1]} is on {key} ({self.series.window}); "
            f"{share:.0%} of all heads are sinks"
        )
        severity = "warning" if share > limits.sink_share else "info"
        yield self.finding(severity, "SINK_HEAD", place, evidence, hits, picture=picture)

    def growth(self) -> Iterator[Finding]:
        hits = self.hits(self._level_and_growth)
        for found in _by_layer([hit for hit in hits if hit[1][0] >= self.limits.logit_warning]):
            yield self._grown(_place(found), found)
        # a model that learns from scratch grows its scores too: below the level that hurts, that is news, no fault
        if below := [hit for hit in hits if hit[1][0] < self.limits.logit_warning]:
            yield self._grown(f"{len(below)} of {len(self.series.heads)} heads", below)

    def _level_and_growth(self, where: Where) -> tuple[float, float] | None:
        """The largest score, and how it grew over the run (1 where it did not), if either is worth a look."""
        series, limits = self.series, self.limits
        values = series.column(where, "max_score", weight="length")
        if not values:
            return None
        level, ratio, quarter = series.late(where, "max_score", weight="length"), 1.0, len(values) // 4
        # inputs of a frozen model have an order, and no history
        if quarter and not series.frozen and _same_length(series, where):
            parts = [median(values[i * quarter : (i + 1) * quarter]) for i in range(4)]
            if all(a < b for a, b in pairwise(parts)):
                ratio = level / max(abs(parts[0]), 1e-6)
        grown = ratio >= limits.growth_ratio and level >= limits.growth_level
        return (level, ratio) if grown or level >= limits.logit_warning else None

    def _grown(self, place: str, hits: Hits) -> Finding:
        where, (level, ratio) = max(hits, key=lambda h: h[1][0])
        grown = f", {ratio:.1f} times the first quarter of the run" if ratio > 1 else ""
        below = level < self.limits.logit_warning
        severity = "error" if level >= self.limits.logit_error else "info" if below else "warning"
        evidence = f"largest score {level:.1f} in layer {where[0]} head {where[1]} ({self.series.window}){grown}"
        case, picture = "below" * below, (where, "max_score")
        return self.finding(severity, "LOGIT_GROWTH", place, evidence, hits, case=case, picture=picture)

    def drop(self) -> Iterator[Finding]:
        for found in _by_layer([] if self.series.frozen else self.hits(self._fall)):  # inputs have no history
            for learned in (False, True):
                if hits := [hit for hit in found if hit[1][3] == learned]:
                    where, (_, before, now, _) = max(hits, key=lambda h: h[1][0])
                    severity, case = ("info", "learned") if learned else ("warning", "")
                    evidence = (
                        f"mean H / log n fell from {before:.2f} to {now:.2f} within a few steps in head {where[1]}"
                    )
                    picture = where, "normalized_entropy"
                    yield self.finding(
                        severity, "ENTROPY_DROP", _place(hits), evidence, hits, case=case, picture=picture
                    )

    def _fall(self, where: Where) -> tuple[float, float, float, bool] | None:
        """How far H / log n fell, from where, what it is now, and whether the head learned by it."""
        series, limits = self.series, self.limits
        found = largest_fall(series, where)
        if found is None:
            return None
        values = series.column(where, "normalized_entropy")
        before, after, when, window = found
        now = series.late(where, "normalized_entropy")
        # a fall that healed is history, and a slow decline is learning
        if before - after <= limits.entropy_drop or before - now <= limits.entropy_drop / 2:
            return None
        # heads that start by averaging all keys learn to select early in a run
        early = values[0] > limits.untrained and 3 * when <= len(values)
        calm = early or _loss_went_on_falling(self.record, when, window, len(values))
        return before - after, before, now, calm and series.late(where, "normalized_entropy_p50") > limits.collapsed

    def dilution(self) -> Iterator[Finding]:
        hits = self.hits(
            lambda w: width_law(self.series, w, self.limits), lambda f: f and f[0] > self.limits.dilution_slope
        )
        if not hits:
            return
        heads, layers, trained = len(self.series.heads), len({w[0] for w, _ in hits}), trained_length(self.record)
        where, (value, ratio, short, long) = sorted(hits, key=lambda h: h[1][0])[len(hits) // 2]  # a typical one
        beyond, most = trained is not None and long > trained, len(hits) > 0.5 * heads
        place = f"{len(hits)} of {heads} heads in {layers} layer{'s' if layers > 1 else ''}"
        evidence = (
            f"effective width grows {ratio:.1f} times between {short} and {long} keys (exponent {value:.2f} in layer "
            f"{where[0]} head {where[1]})" + (f"; trained at up to {trained}" if trained is not None else "")
        )
        severity, certain = "warning" if beyond and most else "info", "high" if most else "medium"
        yield self.finding(
            severity, "LENGTH_DILUTION", place, evidence, hits, case="beyond" * beyond, confidence=certain,
            picture=(where, "effective_width"), action=_policy_advice(self.record),
        )  # fmt: skip

    def below_critical(self) -> Iterator[Finding]:
        """Whether scales suffice for the length that was read, and how both grow with it."""
        laws = self.hits(lambda w: critical_law(self.series, w))
        if not laws:
            return
        longest = max(law[-1][0] for _, law in laws)
        long = [hit for hit in laws if hit[1][-1][0] == longest]
        below = [hit for hit in long if hit[1][-1][1] > 1]
        shown = sorted(below or long, key=lambda hit: hit[1][-1][1])
        where, law = shown[len(shown) // 2]  # a typical one
        side = "below" if below else "above"
        evidence = (
            f"the scale is {side} its critical value at {longest} keys: {1 / law[-1][1]:.2f} of it in layer {where[0]} "
            f"head {where[1]}{_growths(law, self.limits)}"
        )
        yield self.finding(
            "info", "LENGTH_DILUTION", f"{len(below)} of {len(long)} heads", evidence, below, case=f"{side} critical",
            threshold="scale < critical scale", series=[c for _, c, *_ in law if math.isfinite(c)][:48],
        )  # fmt: skip

    def duplicates(self) -> Iterator[Finding]:
        alike = self.above(self.limits.duplicate, lambda where: likeness(self.series, where, self.limits))
        for hits, where, value in alike:
            if len(hits) > 1:
                twin = _whole(self.series.late(where, "twin"))
                evidence = f"heads {where[1]} and {twin} attend alike (correlation {value:.4f})"
                picture = where, "twin_similarity"
                yield self.finding("warning", "DUPLICATE_HEADS", _place(hits), evidence, hits, picture=picture)

    def nonfinite(self) -> Iterator[Finding]:
        def count(where: Where) -> float:
            return sum(r["nonfinite"] for r in self.series.heads[where] if math.isfinite(r["nonfinite"]))

        for hits in _by_layer(self.hits(count)):
            evidence = f"{int(sum(v for _, v in hits))} rows with NaN or infinite scores"
            series = [r["nonfinite"] for r in self.series.heads[hits[0][0]]][:48]
            yield self.finding("error", "NONFINITE", _place(hits), evidence, hits, series=series)
        if wrong := self.record.coverage.get("impossible"):
            evidence = f"{len(wrong)} numbers that cannot be, first {wrong[0]}"
            yield self.finding("error", "NONFINITE", "partita itself", evidence, case="ours")

    # ---- losses, and what was not seen -------------------------------------------------------------------------------

    def losses(self) -> Iterator[Finding]:
        for name, rows in self.record.losses_by_name().items():
            if bad := sum(int(r.get("nonfinite") or 0) for r in rows):
                evidence = f"{bad} rows with NaN or infinite scores"
                yield self.finding("error", "NONFINITE", f"loss {name}", evidence, case="loss")
        for name, rows in self.record.losses_by_name("contrastive").items():
            for severity, code, evidence, column in _contrast(rows, self.limits, self.record.frozen):
                yield self.finding(severity, code, f"loss {name}", evidence, series=_finite(rows, column)[-48:])

    def coverage(self) -> Iterator[Finding]:
        missed = self.record.coverage.get("missed") or []
        if missed:
            names = ", ".join(str(m["name"])[:60] for m in missed[:3]) + (" ..." if len(missed) > 3 else "")
            text = str(self.record.coverage.get("text", ""))[:400]
            yield self.finding("info" if self.record.blocks else "warning", "COVERAGE", names, text)


def _by_layer(hits: Hits) -> Iterator[Hits]:
    for _, group in groupby(hits, key=lambda hit: hit[0][0]):
        yield list(group)


def _place(hits: Hits) -> str:
    heads = [str(w[1]) for w, _ in hits]
    shown = ", ".join(heads[:8]) + (f" and {len(heads) - 8} more" if len(heads) > 8 else "")
    return f"layer {hits[0][0][0]} head{'s' if len(heads) > 1 else ''} {shown}"


def _whole(value: float) -> str:
    return str(int(value)) if math.isfinite(value) else "unknown"


# ---- numbers that rules read -----------------------------------------------------------------------------------------


def _same_length(series: Series, where: Where) -> bool:
    """Steps compare over time only if their inputs are about as long: a longer one has larger maxima by itself."""
    lengths = series.column(where, "length", weight="length")
    return bool(lengths) and max(lengths) <= 1.5 * min(lengths)


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
    """Whether the first loss that the run has at every step is no higher after the fall than before."""
    for rows in record.losses_by_name().values():
        values = _finite(rows, "loss")
        if len(values) == steps:
            after = max(median(values[when : when + window]), median(values[-window:]))
            return after <= median(values[when - window : when])
    return False


def _finite(rows: list[dict[str, Any]], column: str) -> list[float]:
    return [float(r[column]) for r in rows if r.get(column) is not None and math.isfinite(float(r[column]))]


def trained_length(record: Record) -> int | None:
    """The longest input the model was trained at: as it was given, as it was seen, or its number of positions."""
    given = record.provenance.get("training_length")
    if isinstance(given, (int, float)) and given > 0:
        return int(given)
    seen = [v for b in record.blocks if b.training for v in b.column("length") if math.isfinite(v)]
    has = record.provenance.get("positions")
    return int(max(seen)) if seen else int(has) if isinstance(has, (int, float)) and has > 0 else None


def _by_length(series: Series, where: Where, kept: Callable[[dict[str, float]], bool]) -> dict[int, Any]:
    """length -> a function that gives the median of a column over the rows of that length, in order of length."""
    found: dict[int, list[dict[str, float]]] = {}
    for row in series.heads[where]:
        if row["rows"] > 0 and kept(row):
            found.setdefault(int(row["length"]), []).append(row)
    return {n: lambda name, rows=rows: median([r[name] for r in rows]) for n, rows in sorted(found.items())}


def width_law(series: Series, where: Where, limits: Thresholds) -> tuple[float, float, int, int] | None:
    """d log(width) / d log(visible keys) over inputs of several lengths, the growth of the width, and the lengths."""
    middle = _by_length(series, where, lambda row: row["effective_width"] > 0 and row["length"] > 0)
    lengths = list(middle)
    if len(lengths) < 2 or lengths[-1] / lengths[0] < limits.dilution_span:
        return None
    if middle[lengths[0]]("normalized_entropy") > limits.uniform:
        return None  # an average over all keys at any length: that is HEAD_UNIFORM
    kept = lengths[:: max(1, len(lengths) // 48)]  # pairwise slopes: a few dozen lengths are enough
    width, visible = ([middle[n](name) for n in kept] for name in ("effective_width", "visible"))
    value = slope([math.log(v) for v in visible], [math.log(w) for w in width])
    return value, width[-1] / width[0], lengths[0], lengths[-1]


def critical_law(series: Series, where: Where) -> list[tuple[int, float, float, float]]:
    """(length, critical scale in units of the present one, present scale, rivals) of a head by length, if measured."""
    middle = _by_length(series, where, lambda row: not math.isnan(row["critical"]))
    return [(n, at("critical"), at("scale"), at("rivals")) for n, at in middle.items()]


def _growths(law: list[tuple[int, float, float, float]], limits: Thresholds) -> str:
    """How the critical scale, the scale and the rivals grow from the shortest to the longest input."""
    (short, first, before, few), (long, second, after, many) = law[0], law[-1]
    if long < limits.dilution_span * short or not all(0 < x < math.inf for x in (first, second)):
        return ""
    grown = after / before if before > 0 and math.isfinite(after) else 1.0
    ratio = second / first * grown
    between = f"; from {short} to {long} keys the critical scale grows {ratio:.2f} times"
    if min(short, long) > 2 and ratio > 0:
        between += f" (as log n to the {math.log(ratio) / math.log(math.log(long) / math.log(short)):.2f})"
    between += f" and the scale {grown:.2f} times"
    if 0 < few < math.inf and 0 < many < math.inf:  # a record of before has none
        power = math.log(many / few) / math.log(long / short)
        between += f"; keys within a nat of the best: {few:.1f} and {many:.1f} (as n to the {power:.2f})"
    return between


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


def _contrast(rows: list[dict[str, Any]], limits: Thresholds, frozen: bool) -> Iterator[tuple[str, str, str, str]]:
    """Severity, code, evidence and shown column for the rows of one contrastive loss."""
    late = {name: median(last(_finite(rows, name))) for name in LOSS_COLUMNS}
    norms = [late[k] for k in ("norm_query", "norm_key") if not math.isnan(late[k])]
    if any(abs(n - 1) > limits.norm_tolerance for n in norms):
        yield "warning", "NOT_NORMALISED", f"vectors have norm {', '.join(f'{n:.2f}' for n in norms)}", "norm_query"
    others, negatives = late["candidates"] - 1, late["effective_negatives"]
    if others + 1 >= limits.negatives_least and negatives < limits.negatives * others:
        evidence = f"{negatives:.1f} of {others:.0f} negatives carry the gradient"
        yield "warning", "EFFECTIVE_NEGATIVES_LOW", evidence, "effective_negatives"
    bound, cap = late["bound"], late["cap"]
    if cap > 0 and bound > limits.saturation * cap:
        evidence = f"mutual-information bound {bound:.2f} of at most log N = {cap:.2f} nats"
        yield "info" if frozen else "warning", "MI_SATURATED", evidence, "bound"  # if frozen, nothing learns from it
    if abs(late["scale"] - limits.scale_cap) <= 0.01 * limits.scale_cap:  # beyond it the scale is not clamped
        yield "warning", "SCALE_AT_CAP", f"scale {late['scale']:.1f} at its cap {limits.scale_cap:g}", "scale"
