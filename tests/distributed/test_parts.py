"""Blocks go round in parts: nothing that is computed, and nothing that is sent, depends on how they are cut."""

from __future__ import annotations

from typing import Any

import pytest

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
