"""The judges of the studies of scales and normalisers can come out either way, on rows made here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from partita_theory.experiment import grid
from partita_theory.experiments import find
from partita_theory.results import Row

SEEDS = [0, 1, 2]


def relevant_rows(**wrong: float) -> list[Row]:
    """Powers of log n and of n; `wrong` overrides one of them, or what a rule costs at the longest rows."""
    made = {"number": (1.4, 0.0, 0.0), "share": (0.2, 0.7, 0.3)}
    rows = grid(arm=list(made), noise=[0.3, 1.0], n=[256, 1024, 4096], seed=SEEDS)
    for row in rows:
        arm, jitter = row["arm"], 1e-3 * row["seed"]
        power, slope, rivals = (wrong.get(f"{arm} {what}", v) for what, v in zip(POWERS, made[arm], strict=True))
        log = math.log(row["n"])
        row |= {"best": log ** (power + jitter), "entropy": 1 + (slope + jitter) * log, "promised": 1.0, "error": 0.1}
        row["rivals"] = row["n"] ** (rivals + jitter)
        right, other = ("log n", "constant") if arm == "number" else ("constant", "log n")
        row |= {right: 1.1 + jitter, other: wrong.get(f"{arm} other", 2.0), "BestFor": wrong.get(f"{arm} solved", 1.0)}
    return rows


def best_rows(**wrong: float) -> list[Row]:
    """Errors at each normaliser's best; `wrong` overrides what one reads of a task, or what spoils it."""
    rows = grid(
        task=["one", "number", "share"], n=[256, 4096], normaliser=["softmax", "sigmoid", "ReLU", "L1"], seed=SEEDS
    )
    for row in rows:
        task, kind = row["task"], row["normaliser"]
        level = {"softmax": 0.4, "sigmoid": 0.4 if task == "one" else 0.3, "ReLU": 0.35, "L1": 0.9}[kind]
        level = wrong.get(f"{task} {kind}", level) + 1e-4 * row["seed"]
        adds = {"noisy": 0.1, "outlier": 0.5, "carried": 0.2}
        row |= {"error": level, "sharpness": 1.0, "threshold": 1.0}
        row |= {
            name: level + (wrong.get(f"{task} {name}", by / 3) if kind == "sigmoid" else by)
            for name, by in adds.items()
        }
    return rows


def learned_rows(**wrong: float) -> list[Row]:
    """Errors of what was trained at 256 keys and read at 4096, and rivals that are powers of n."""
    ways = ["softmax", "softmax, log n", "sigmoid", "sigmoid from 0"]
    rows = grid(task=["one", "number", "share"], way=ways, n=[256, 4096], seed=SEEDS)
    for row in rows:
        task, way, long = row["task"], row["way"], row["n"] > 256
        sigmoid = wrong.get(f"{task} sigmoid", 0.0 if task == "one" else -0.1) * (way == "sigmoid")
        log = wrong.get(f"{task} log", 0.2 if task == "share" else -0.2) * (way == "softmax, log n") * long
        jitter = 1e-3 * row["seed"]
        row["error"] = 0.4 + sigmoid + log + jitter * (1 + len(way))
        row["rivals"] = (wrong.get(f"{task} rivals", 0.3 if task == "share" else 0.0) + jitter) * math.log(row["n"])
    return rows


def linear_rows(**wrong: float) -> list[Row]:
    """Entropies that are straight lines in log n, and shares that are powers of n."""
    made = {"elu + 1": 1.0, "exp": 0.6, "exp, log n": 0.1, "softmax": 0.9, "softmax, log n": 0.5} | wrong
    rows = grid(
        map=["elu + 1", "exp", "exp, log n", "softmax", "softmax, log n"],
        sharpness=[1.0, 16.0],
        n=[64, 1024],
        seed=SEEDS,
    )
    for row in rows:
        jitter = 1e-3 * row["seed"]
        row["entropy"] = (made[row["map"]] + jitter) * math.log(row["n"])
        row["share"] = row["n"] ** (wrong.get("share", -1.0) + jitter)
    return rows


POWERS = ("power", "slope", "rivals")
SPOILT: dict[str, tuple[Callable[..., list[Row]], list[dict[str, Any]]]] = {
    "relevant_keys": (
        relevant_rows,
        [{"number power": 0.5}, {"number slope": 0.5}, {"number slope": -0.5}, {"number rivals": 0.3},
         {"number other": 1.0}, {"number solved": 1.1}, {"share power": 1.0}, {"share slope": 0.2},
         {"share rivals": 0.0}, {"share other": 1.0}, {"share solved": 1.1}],
    ),
    "why_softmax": (
        best_rows,
        [{"one sigmoid": 0.3}, {"one sigmoid": 0.5}, {"number sigmoid": 0.4}, {"share sigmoid": 0.4},
         {"number noisy": 0.2}, {"share noisy": 0.2}, {"number outlier": 0.6}, {"share outlier": 0.6},
         {"share carried": 0.5}, {"one L1": 0.3}, {"share L1": 0.3}],
    ),
    "linear_entropy": (
        linear_rows,
        [{"elu + 1": 0.8}, {"exp": 0.99}, {"exp": 0.1}, {"exp, log n": 0.5}, {"share": -0.5}],
    ),
    "trained_retrieval": (
        learned_rows,
        [{"one sigmoid": 0.1}, {"one sigmoid": -0.1}, {"number sigmoid": 0.1}, {"share sigmoid": 0.1},
         {"one log": 0.1}, {"number log": 0.1}, {"share log": -0.1}, {"one rivals": 0.3}, {"number rivals": 0.3},
         {"share rivals": 0.0}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_rows_as_expected_are_said_to_hold(name: str) -> None:
    assert find(name).judge(SPOILT[name][0]()).answer == "holds"


@pytest.mark.parametrize(("name", "wrong"), [(n, wrong) for n, (_, each) in SPOILT.items() for wrong in each], ids=str)
def test_each_claim_can_fail(name: str, wrong: dict[str, Any]) -> None:
    found = find(name).judge(SPOILT[name][0](**wrong))
    assert found.answer == "does not hold" and "Contradicted: " in found.evidence
