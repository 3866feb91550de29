"""How often a finding of the monitor is right, and how often it misses what is there.

Small models are trained and watched, healthy ones and ones with a defect planted in heads that we know (_watched_runs).
A finding counts as raised at warning or above; COVERAGE, which is about what was not seen, counts at any level.

    recall = runs with the defect in which it was raised / runs with the defect
    precision = runs with the defect in which it was raised / runs in which it was raised

The thresholds of `partita.monitor.Thresholds` lie in the gaps between the worst healthy value and the weakest planted
one. Defects are planted with a strong hand: what is measured is that the findings tell them apart, not how faint a
defect may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from partita.monitor import CODES, Record, Thresholds
from partita.monitor.findings import Series, Where, last, median
from partita.monitor.rules import largest_fall, likeness
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._watched_runs import RUNS, record_of
from partita_theory.figure import Line, Panel
from partita_theory.results import Row, note
from partita_theory.verdict import Verdict, settle

LIMITS = Thresholds()
HeadValue = Callable[[Series, Where], float]


def _fall(series: Series, where: Where) -> float:
    found = largest_fall(series, where)
    return math.nan if found is None or series.frozen else found[0] - found[1]


# what decides a finding about a head: its name, whether small is bad, how it is read, the threshold
HEAD: dict[str, tuple[str, bool, HeadValue, float]] = {
    "HEAD_COLLAPSED": (
        "H / log n, median row",
        True,
        lambda s, w: s.late(w, "normalized_entropy_p50"),
        LIMITS.collapsed,
    ),
    "HEAD_UNIFORM": ("H / log n, mean", False, lambda s, w: s.late(w, "normalized_entropy"), LIMITS.uniform),
    "SINK_HEAD": (
        "mass on one key",
        False,
        lambda s, w: max(s.late(w, "sink_first"), s.late(w, "sink_top")),
        LIMITS.sink,
    ),
    "LOGIT_GROWTH": ("largest score", False, lambda s, w: s.late(w, "max_score", "length"), LIMITS.logit_warning),
    "ENTROPY_DROP": ("fall of H / log n", False, _fall, LIMITS.entropy_drop),
    "DUPLICATE_HEADS": ("correlation", False, lambda s, w: likeness(s, w, LIMITS), LIMITS.duplicate),
}
# and about a contrastive loss
LOSS: dict[str, tuple[str, bool, Callable[[dict[str, float]], float], float]] = {
    "NOT_NORMALISED": ("distance of the norm from 1", False, lambda r: abs(r["norm_query"] - 1), LIMITS.norm_tolerance),
    "EFFECTIVE_NEGATIVES_LOW": (
        "effective / all negatives",
        True,
        lambda r: r["effective_negatives"] / (r["candidates"] - 1),
        LIMITS.negatives,
    ),
    "MI_SATURATED": ("bound / log N", False, lambda r: r["bound"] / r["cap"], LIMITS.saturation),
}


def measure(seed: int, run: str, steps: int) -> Iterable[Row]:
    plan, record = RUNS[run], record_of(run, steps, seed)
    findings = [f for f in record.findings() if f.severity != "info" or f.code == "COVERAGE"]
    series = Series(record)
    for code in CODES:
        if code in plan.allowed:
            continue
        heads = set(plan.planted.get(code, ()))
        raised = [f for f in findings if f.code == code]
        hit = {w for f in raised for w in f.heads}
        weakest, strongest = _extremes(code, record, series, heads, code in plan.planted)
        yield {
            "code": code,
            "healthy": not plan.planted,
            "planted": code in plan.planted,
            "raised": bool(raised),
            "heads_planted": len(heads),
            "heads_found": len(heads & hit),
            "heads_wrong": len(hit - heads) if heads or code not in plan.planted else 0,
            "weakest_planted": weakest,
            "worst_other": strongest,
        }


def _extremes(code: str, record: Record, series: Series, heads: set[Where], planted: bool) -> tuple[float, float]:
    """The weakest value where the defect is, and the worst where it is not; NaN where there is none."""
    inside: list[float] = []
    outside: list[float] = []
    low = False
    if code in HEAD:
        _, low, value, _ = HEAD[code]
        for where in series.heads:
            (inside if where in heads else outside).append(value(series, where))
    elif code in LOSS and (rows := [r for r in record.losses if r.get("type") == "contrastive"]):
        _, low, of, _ = LOSS[code]
        (inside if planted else outside).append(median(last([of(r) for r in rows])))
    inside, outside = ([v for v in values if math.isfinite(v)] for values in (inside, outside))
    weakest, worst = (max, min) if low else (min, max)
    return weakest(inside, default=math.nan), worst(outside, default=math.nan)


# ---- what the rows say ---------------------------------------------------------------------------------------------


def quality(rows: list[Row]) -> list[Row]:
    """One row for each code: runs with the defect, how many were found, how many were accused wrongly, and the gap."""
    found = []
    for code in CODES:
        own = [r for r in rows if r["code"] == code]
        planted, others = [r for r in own if r["planted"]], [r for r in own if not r["planted"]]
        true, false = sum(r["raised"] for r in planted), sum(r["raised"] for r in others)
        name, low, _, threshold = {**HEAD, **LOSS}.get(code, ("", False, None, math.nan))
        weakest, worst = (max, min) if low else (min, max)
        at = [[r[k] for r in own if math.isfinite(r[k])] for k in ("weakest_planted", "worst_other")]
        found.append(
            {
                "code": code,
                "runs": len(planted),
                "recall": true / len(planted) if planted else math.nan,
                "others": len(others),
                "false": false,
                "precision": true / (true + false) if true + false else math.nan,
                "heads": sum(r["heads_planted"] for r in planted),
                "heads_found": sum(r["heads_found"] for r in planted),
                "heads_wrong": sum(r["heads_wrong"] for r in own),
                "decides": name,
                "threshold": threshold,
                "weakest_planted": weakest(at[0], default=math.nan),
                "worst_other": worst(at[1], default=math.nan),
            }
        )
    return found


def quality_table(rows: list[Row]) -> str:
    """The table of docs/guide/findings.md."""
    lines = [
        "| finding | runs with it | recall | runs without it | false alarms | precision | heads with it | found | "
        "accused wrongly | decided by | worst without it | threshold | weakest with it |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for q in quality(rows):
        heads = [q["heads"], q["heads_found"], q["heads_wrong"]] if q["heads"] else ["", "", q["heads_wrong"] or ""]
        cells = [f"`{q['code']}`", q["runs"], _share(q["recall"]), q["others"], q["false"], _share(q["precision"])]
        numbers = [_digits(q[k]) for k in ("worst_other", "threshold", "weakest_planted")]
        lines.append("| " + " | ".join(str(c) for c in [*cells, *heads, q["decides"], *numbers]) + " |")
    return "\n".join(lines)


def _share(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ""


def _digits(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else ""


def judge(rows: list[Row]) -> Verdict:
    table = quality(rows)
    healthy = {(r["run"], r["seed"]) for r in rows if r["healthy"]}
    alarmed = {(r["run"], r["seed"]) for r in rows if r["healthy"] and r["raised"]}
    known = [q for q in table if q["runs"]]
    missed = [q["code"] for q in known if q["recall"] < 1]
    wrong = [q["code"] for q in table if q["false"]]
    heads, found = sum(q["heads"] for q in table), sum(q["heads_found"] for q in table)
    says = (
        f"{len(alarmed)} of {len(healthy)} healthy runs earn a warning; {len(known)} findings were planted, recall "
        f"below 1 for {', '.join(missed) or 'none'}, precision below 1 for {', '.join(wrong) or 'none'}; {found} of "
        f"{heads} planted heads named, {sum(q['heads_wrong'] for q in table)} accused wrongly."
    )
    good = [q["code"] for q in known if q["code"] not in (*missed, *wrong)]
    return settle(says, whole=not (missed or wrong or alarmed), within=", ".join(good))


def _planted(rows: list[Row]) -> list[Row]:
    return [q for q in quality(rows) if q["runs"]]


def panels(rows: list[Row]) -> list[Panel]:
    table = _planted(rows)
    at = [float(i + 1) for i in range(len(table))]
    lines = [Line(name, at, [q[name] for q in table], kind="points") for name in ("recall", "precision")]
    return [Panel("By finding", "finding", "share of runs", lines)]


def _numbered(rows: list[Row]) -> str:
    return f"{note(rows)}. " + "; ".join(f"{i} {q['code']}" for i, q in enumerate(_planted(rows), 1))


EXPERIMENT = experiment(
    __name__,
    question="How often is a finding of the monitor right, and how often does it miss what is there?",
    expected="No warning in a healthy run; every planted defect named, to the head; a gap around every threshold.",
    ids=("M-ENT-1", "M-SCL-0"),
    tiny=Size(grid(run=["healthy: next byte", "a dead head"], steps=16), seeds=1, seconds=1.0),
    quick=Size(grid(run=list(RUNS), steps=48), seeds=2, seconds=1.25),
    full=Size(grid(run=list(RUNS), steps=200), seeds=3, seconds=5.0),
    note=_numbered,
)
