"""Disagreement is an error on every rank before anything is computed; a rank that dies is an error on the others."""

from __future__ import annotations

import math

import pytest

from tests.distributed.trouble import DIFFERENT
from tests.distributed.world import World, Worlds


@pytest.mark.parametrize("what", [what for what, (_, words) in DIFFERENT.items() if words])
def test_disagreement_is_an_error_on_every_rank(world: World, what: str) -> None:
    for text in world.run("trouble", "disagree", what=what):
        assert text.startswith("BackendError"), text
        assert DIFFERENT[what][1] in text
    for value in world.run("trouble", "still_in_step"):
        assert value == pytest.approx(value_of_eyes(world.size))


def test_a_mistake_of_one_rank_is_an_error_on_the_others(world: World) -> None:
    out = world.run("trouble", "disagree", what="own mistake")
    assert out[-1].startswith("ShapeError"), out[-1]
    for text in out[:-1]:
        assert f"rank {world.size - 1}" in text
    world.run("trouble", "still_in_step")


def test_a_target_that_no_rank_has(world: World) -> None:
    for text in world.run("trouble", "target_outside"):
        assert text.startswith("TargetError") and f"0 <= target < {3 * world.size}" in text


def test_what_is_no_group(world: World) -> None:
    for texts in world.run("trouble", "no_group"):
        assert len(texts) == 3
        assert all(text.startswith("BackendError") and "torch.distributed" in text for text in texts)


def value_of_eyes(ranks: int) -> float:
    """info_nce_loss of eye(3) with itself on this many ranks: W copies of three candidates."""
    return math.log(ranks) + math.log(math.e + 2) - 1


def test_a_group_may_be_a_part_of_the_world_or_a_mesh(world: World) -> None:
    (whole, outside), *members = world.run("trouble", "part_of_the_world")
    assert whole == pytest.approx(value_of_eyes(world.size))
    assert "group" in outside
    for _, value in members:
        assert float(value) == pytest.approx(value_of_eyes(world.size - 1))


def test_a_mesh_of_two_dimensions_is_no_group(world: World) -> None:
    assert all("one dimension" in text for text in world.run("trouble", "flat_mesh_only"))


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_rank_that_dies_is_an_error_on_the_others(where: str, worlds: Worlds) -> None:
    """One of four is killed in the middle of a ring; the group's timeout is 20 s, the rest is for a busy machine."""
    world = World(4, timeout_s=20.0)
    try:
        out = world.attempt("trouble", "vanish", patience_s=150, grace_s=100, where=where)
    finally:
        world.close()
    assert out[2] == (False, None), "rank 2 was to die"
    for rank in (0, 1, 3):
        fine, heard = out[rank]
        assert fine, heard  # within our patience, or it would wait for ever
        assert heard != "no error", f"rank {rank} returned a number"
