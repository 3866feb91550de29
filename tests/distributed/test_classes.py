"""Classes spread over ranks: loss, gradients and statistics are those of one process; so are merged states."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import World, Worlds

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


TOKENS: list[dict[str, Any]] = [
    {}, {"many": 3}, {"kept": True}, {"many": 2, "kept": True}, {"temperature": True, "bias": True},
    *({"limits": x} for x in ({"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2})),
    {"limits": {"top_k": 9, "top_p": 0.9, "min_p": 0.05}, "many": 2, "bias": True, "temperature": True},
    {"limits": {"top_k": 40, "top_p": 1.0, "min_p": 0.0}, "kept": True},
]  # fmt: skip


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("case", TOKENS, ids=str)
def test_tokens(world: World, how: str, case: dict[str, Any]) -> None:
    world.run("classes", "tokens", how=how, **case)


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("kind", ["forward", "reverse", "cross_entropy", "js", "hellinger"])
def test_references(world: World, how: str, kind: str) -> None:
    world.run("classes", "references", how=how, kind=kind)
    for tail in ("ignore", "bucket") if kind in ("forward", "reverse") else ():
        world.run("classes", "references", how=how, kind=kind, listed=tail)


def test_tokens_on_four_ranks(worlds: Worlds) -> None:
    """All of it once; every split on four and eight ranks is slow."""
    for case in TOKENS:
        worlds.of(4).run("classes", "tokens", how="uneven", **case)
    for kind, listed in (("js", ""), ("reverse", "bucket")):
        worlds.of(4).run("classes", "references", how="empty", kind=kind, listed=listed)


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
