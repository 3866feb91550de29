"""A sequence spread over ranks: outputs, gradients and statistics are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import World

SPLITS = ["even", "uneven", "empty"]
SUPPORTS = [
    None, "causal", "bottom-right", "window", "causal window", "lengths", "padded causal", "nothing seen", "segments",
    "packed causal", "not self", "union", "mask",
]  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "torch's causal": {"is_causal": True, "return_stats": False},
    "grouped": {"heads": 2, "seen": "causal"},
    "grouped, padded": {"heads": 1, "seen": "padded causal", "return_stats": False},
    "number": {"policy": "number"},
    "log length": {"policy": "log", "seen": "padded causal"},
    "log length, not self": {"policy": "log", "seen": "not self"},
    "learned scale": {"policy": "learned", "seen": "causal"},
    "softcap": {"softcap": 1.5, "seen": "causal"},
    "bias": {"bias": "whole"},
    "bias of these rows": {"bias": "rows", "seen": "causal"},
    "bias per key": {"bias": "per key", "policy": "log", "heads": 2},
    "mask": {"attn_mask": "whole", "policy": "log"},
    "mask of these rows": {"attn_mask": "rows", "seen": "causal", "heads": 2},
    "sink": {"sink": True, "seen": "causal"},
    "cross": {"cross": True},
    "cross, causal": {"cross": True, "seen": "bottom-right"},
}


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("seen", SUPPORTS)
def test_supports(world: World, how: str, seen: str | None) -> None:
    world.run("sequence", "attention", how=how, seen=seen)


@pytest.mark.parametrize("how", ["uneven", "empty"])
@pytest.mark.parametrize("case", CASES)
def test_options(world: World, how: str, case: str) -> None:
    world.run("sequence", "attention", how=how, **CASES[case])


@pytest.mark.parametrize("seen", SUPPORTS)
def test_zigzag(world: World, seen: str | None) -> None:
    world.run("sequence", "attention", how="even", order="zigzag", seen=seen)


@pytest.mark.parametrize("case", CASES)
def test_zigzag_options(world: World, case: str) -> None:
    world.run("sequence", "attention", how="even", order="zigzag", **CASES[case])


def test_what_is_masked_cannot_poison(world: World) -> None:
    world.run("sequence", "poisoned")


def test_autocast(world: World) -> None:
    world.run("sequence", "lowered")


def test_shard_and_gather(world: World) -> None:
    world.run("sequence", "pieces")


def test_zigzag_makes_causal_work_even(world: World) -> None:
    work = world.run("sequence", "even_work")
    by_rank, zigzag = ([w[i] for w in work] for i in (0, 1))
    assert max(by_rank) > 1.4 * sum(by_rank) / len(by_rank)
    assert max(zigzag) <= 1.05 * sum(zigzag) / len(zigzag)
