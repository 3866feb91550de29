"""The study of the findings: it counts right, it can come out negative, and docs/guide/findings.md holds its table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from partita.monitor import CODES
from partita_theory.experiments.finding_quality import EXPERIMENT, HEAD, LOSS, judge, quality, quality_table

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "findings.md"


def row(code: str, planted: bool, raised: bool, **more: Any) -> dict[str, Any]:
    base = {"run": "x", "seed": 0, "code": code, "healthy": not planted, "planted": planted, "raised": raised}
    counts = {"heads_planted": 0, "heads_found": 0, "heads_wrong": 0}
    return {**base, **counts, "weakest_planted": math.nan, "worst_other": math.nan, **more}


def test_precision_and_recall_are_counted() -> None:
    told = [(True, True)] * 3 + [(True, False)] + [(False, True)] * 2 + [(False, False)] * 4
    rows = [row("HEAD_UNIFORM", planted, raised) for planted, raised in told]
    (found,) = [q for q in quality(rows) if q["code"] == "HEAD_UNIFORM"]
    assert (found["runs"], found["others"], found["false"]) == (4, 6, 2)
    assert found["recall"] == 3 / 4 and found["precision"] == 3 / 5


def test_the_gap_is_that_between_the_nearest() -> None:
    """Small is bad for a collapse: the largest of the planted against the smallest of the others."""
    values = [(0.001, 0.3), (0.004, 0.2), (math.nan, 0.5)]
    rows = [row("HEAD_COLLAPSED", True, True, weakest_planted=a, worst_other=b) for a, b in values]
    found = quality(rows)[CODES.index("HEAD_COLLAPSED")]
    assert (found["weakest_planted"], found["worst_other"]) == (0.004, 0.2)


def test_the_verdict_can_come_out_negative() -> None:
    fine = [row(code, planted, planted) for code in CODES for planted in (True, False)]
    assert judge(fine).answer == "holds"
    alarm = judge([*fine, row("SINK_HEAD", False, True)])
    assert alarm.answer == "holds within" and "SINK_HEAD" not in alarm.within
    missed = judge([*fine, row("NONFINITE", True, False)])
    assert "recall below 1 for NONFINITE" in missed.evidence
    assert judge([row(code, True, False) for code in CODES]).answer == "does not hold"


def test_a_planted_defect_is_found_and_a_healthy_run_is_left_in_peace() -> None:
    dead = {r["code"]: r for r in EXPERIMENT.run({"run": "a dead head", "steps": 16}, 0)}
    assert dead["HEAD_UNIFORM"]["heads_found"] == dead["HEAD_UNIFORM"]["heads_planted"] == 1
    assert not any(r["raised"] for r in EXPERIMENT.run({"run": "healthy: next byte", "steps": 16}, 0))


def test_the_page_holds_the_table_of_the_study() -> None:
    """Every finding, with the thresholds of today, each in its gap."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    table = {c[1].strip("` "): [v.strip() for v in c] for c in (line.split("|") for line in lines) if len(c) == 15}
    assert list(table) == list(CODES)
    head = quality_table([]).splitlines()[0]
    assert head in PAGE.read_text(encoding="utf-8")
    for code, (decides, low, _, threshold) in {**HEAD, **LOSS}.items():
        cells = table[code]
        worst, limit, weakest = (float(v) for v in cells[11:14])
        assert cells[10] == decides and limit == pytest.approx(threshold)
        assert (weakest < limit < worst) if low else (worst < limit < weakest), code
