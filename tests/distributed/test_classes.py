"""Classes spread over ranks: loss, gradients and statistics are those of one process; so are merged states."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import World

SPLITS = ["even", "uneven", "empty"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "bias": {"bias": True},
    "ignored": {"ignored": True, "return_stats": True},
    "smoothing": {"label_smoothing": 0.1, "bias": True},
    "class weights": {"weight": True},
    "smoothing and class weights": {"label_smoothing": 0.2, "weight": True, "ignored": True, "reduction": "none"},
    "sample weights": {"sample": True, "weight": True, "label_smoothing": 0.1},
    "z-loss and entropy": {"z_loss": 0.01, "entropy_weight": 0.3},
    "softcap": {"softcap": 2.0, "bias": True, "label_smoothing": 0.1},
    "statistics": {"return_stats": True, "bias": True},
    "statistics, softcap": {"return_stats": True, "bias": True, "softcap": 1.5},
    "scales": {"learned_scale": True, "return_stats": True},
    "leading dimensions": {"lead": True, "return_stats": True, "reduction": "none"},
    "shifted": {"lead": True, "shift": 1},
    "everything": {
        "bias": True,
        "weight": True,
        "sample": True,
        "ignored": True,
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "entropy_weight": 0.1,
        "softcap": 5.0,
        "return_stats": True,
    },
}


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("case", CASES)
def test_cross_entropy(world: World, how: str, case: str) -> None:
    world.run("classes", "cross_entropy", how=how, **CASES[case])


@pytest.mark.parametrize("how", SPLITS)
def test_ends_of_rows(world: World, how: str) -> None:
    world.run("classes", "ends", how=how)


def test_replicated_input(world: World) -> None:
    world.run("classes", "replicated")


@pytest.mark.parametrize("how", SPLITS)
def test_merge(world: World, how: str) -> None:
    world.run("classes", "merged", how=how)


def test_merged_states_may_lie_far_apart(world: World) -> None:
    world.run("classes", "far_apart")
