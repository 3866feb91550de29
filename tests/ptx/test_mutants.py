"""Kernels with one mistake each: the suite's own run of them reports it, or gives values that it does not accept."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import partita
from tests.ptx.cases import Problem, agrees
from tests.ptx.memory import Fault
from tests.ptx.mutants import KINDS, Mutant
from tests.triton.test_compiles import same_triton

S = partita.support
BF = torch.bfloat16
PROBLEMS = {
    "causal": functools.partial(Problem, BF, 150, 150, 64, support=S.causal(), differentiate=False),
    "decode": functools.partial(Problem, BF, 3, 600, 64, differentiate=False),
    "back": functools.partial(
        Problem, BF, 70, 130, 64, batch=(1,), support=S.segments(torch.arange(70) // 40, torch.arange(130) // 40)
    ),
}
# Problem, kernel, mistake, which of the lines that can have it, and what reports it.
CAUGHT = [
    (*key, place, by)
    for *key, places, by in [
        ("causal", "forward", "barrier dropped", (0, 5, 9, 13, 22, 28), "race"),
        ("causal", "forward", "wait dropped", (0, 1), "race"),
        ("causal", "forward", "wrong mask", (66, 98), "log_partition"),
        ("causal", "forward", "index swapped", (55, 77), "log_partition"),
        ("causal", "forward", "index swapped", (91, 103), "mean"),
        ("causal", "forward", "index swapped", (149,), "race"),
        ("causal", "forward", "predicate missing", (6, 8), "out of bounds"),
        ("causal", "forward", "predicate missing", (18, 32, 48), "race"),
        ("decode", "forward", "barrier dropped", (3, 11), "race"),
        ("decode", "forward", "wait dropped", (0, 1), "race"),
        ("decode", "forward", "wrong mask", (16, 24, 26, 32), "log_partition"),
        ("decode", "forward", "index swapped", (38,), "max_score"),
        ("decode", "forward", "index swapped", (51,), "score_variance"),
        ("decode", "forward", "predicate missing", (16, 18), "race"),
        ("decode", "merge", "barrier dropped", (1, 4), "race"),
        ("decode", "merge", "wrong mask", (2,), "out of bounds"),
        ("decode", "merge", "index swapped", (0, 2), "out of bounds"),
        ("decode", "merge", "index swapped", (1,), "uninitialised"),
        ("decode", "merge", "predicate missing", (2, 23), "out of bounds"),
        ("back", "rows", "barrier dropped", (0, 7), "race"),
        ("back", "rows", "wait dropped", (0,), "race"),
        ("back", "rows", "wrong mask", (38, 61), "d query"),
        ("back", "rows", "index swapped", (27, 45, 64, 74), "d query"),
        ("back", "rows", "index swapped", (17,), "out of bounds"),
        ("back", "rows", "predicate missing", (6, 8, 16, 18), "out of bounds"),
        ("back", "keys", "barrier dropped", (2, 8, 9, 11), "race"),
        ("back", "keys", "wrong mask", (39, 93), "d value"),
        ("back", "keys", "wrong mask", (87,), "d key"),
        ("back", "keys", "index swapped", (25, 111, 120), "d key"),
        ("back", "keys", "index swapped", (84, 90), "d value"),
        ("back", "keys", "predicate missing", (26, 40), "out of bounds"),
    ]
    for place in places
]


@functools.cache
def problem(name: str) -> Problem:
    """With what it is compared to, worked out once."""
    made = PROBLEMS[name]()
    for method in ("truth", "plainly"):
        setattr(made, method, functools.cache(getattr(made, method)))
    return made


def reported(given: Problem, mutate: Any) -> str:
    """The kind of fault, the first result that is not right, or "nothing"."""
    try:
        found, _ = given.results(mutate=mutate)
        agrees(given, found)
    except Fault as fault:
        return fault.kind
    except AssertionError as error:
        return str(error).split(":")[0]
    return "nothing"


def test_the_list_is_long_enough():
    assert len(CAUGHT) >= 30
    assert {kind for _, _, kind, _, _ in CAUGHT} == set(KINDS) and len(KINDS) == 5


@pytest.mark.parametrize(("of", "kernel", "kind", "place", "by"), CAUGHT)
def test_a_mistake_is_reported(of, kernel, kind, place, by):
    same_triton()
    assert reported(problem(of), Mutant(kernel, kind, place)) == by


@pytest.mark.parametrize("of", PROBLEMS)
def test_no_mistake_is_reported_where_there_is_none(of):
    assert reported(problem(of), None) == "nothing"
