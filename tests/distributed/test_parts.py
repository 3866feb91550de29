"""Blocks go round in parts: nothing that is computed, and nothing that is sent, depends on how they are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.test_contrast import CASES as CONTRASTS
from tests.distributed.test_sequence import CASES as OPTIONS
from tests.distributed.test_sequence import SUPPORTS
from tests.distributed.world import World


def test_blocks_are_cut(world: World) -> None:
    """Without a cut the tests below would show nothing. 16 is the most; 6 heads, then their keys; keys alone."""
    for found in world.run("finely", "cuts"):
        assert found == (16, 18, 16)


@pytest.mark.parametrize("how", ["uneven", "empty"])
@pytest.mark.parametrize("case", CONTRASTS)
def test_info_nce(world: World, how: str, case: str) -> None:
    world.run("finely", "again", file="contrast", check="info_nce", how=how, n=29, **CONTRASTS[case])


@pytest.mark.parametrize("how", ["uneven", "empty"])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"return_stats": True}])
def test_clip(world: World, how: str, options: dict[str, Any]) -> None:
    world.run("finely", "again", file="contrast", check="clip", how=how, n=29, **options)


@pytest.mark.parametrize("labels", [3, 25])
@pytest.mark.parametrize("reference", [False, True])
def test_supcon(world: World, labels: int, reference: bool) -> None:
    arguments = {"labels": labels, "reference": reference, "return_stats": True}
    world.run("finely", "again", file="contrast", check="supcon", how="uneven", n=31, **arguments)


@pytest.mark.parametrize("order", ["rank", "zigzag"])
@pytest.mark.parametrize("seen", SUPPORTS)
def test_supports(world: World, seen: str | None, order: str) -> None:
    how = "uneven" if order == "rank" else "even"
    world.run("finely", "again", file="sequence", check="attention", how=how, order=order, seen=seen)


@pytest.mark.parametrize("case", OPTIONS)
def test_options(world: World, case: str) -> None:
    world.run("finely", "again", file="sequence", check="attention", how="uneven", **OPTIONS[case])


@pytest.mark.parametrize("name", ["poisoned", "lowered"])
def test_nan_and_autocast(world: World, name: str) -> None:
    world.run("finely", "again", file="sequence", check=name)


@pytest.mark.parametrize("return_stats", [False, True])
def test_classes(world: World, return_stats: bool) -> None:
    arguments = {"how": "uneven", "classes": 41, "return_stats": return_stats}
    world.run("finely", "again", file="classes", check="cross_entropy", **arguments)


@pytest.mark.parametrize("check", ["contrast", "classes"])
def test_float32_is_no_worse_than_twice_the_plain_formula(world: World, check: str) -> None:
    world.run("finely", "again", file="accuracy", check=check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_no_worse_than_twice_the_plain_formula(world: World, dtype: torch.dtype) -> None:
    """A backend rounds the gradients of each part to the dtype of its operand: many parts must not make it worse."""
    world.run("finely", "again", file="accuracy", check="sequence", dtype=dtype)


def test_the_same_call_twice_gives_the_same_bits(world: World) -> None:
    assert all(world.run("finely", "again", file="accuracy", check="deterministic"))


def test_parts_send_what_blocks_would(world: World) -> None:
    n, dim, W = 40, 8, world.size
    for sent, messages, parts in world.run("finely", "bytes_sent", n=n, dim=dim):
        assert parts > 1
        assert sent == 3 * (W - 1) * n * dim * 4
        assert messages == 3 * (W - 1) * parts
