"""DistributedDataParallel averages what has to be summed: found out, and mended by what the warning says."""

from __future__ import annotations

import inspect

import pytest

import partita
from tests.distributed.averaging import GLOBAL
from tests.distributed.world import World


def faces() -> list[str]:
    """Public functions with group=."""
    named = {name: getattr(partita, name) for name in partita.__all__}
    plain = {name: inspect.unwrap(f) for name, f in named.items() if inspect.isfunction(f)}
    return [name for name, f in plain.items() if "group" in inspect.signature(f).parameters]


def test_every_face_with_a_group_names_the_remedy() -> None:
    assert len(faces()) >= 7
    for name in faces():
        assert "DDP" in getattr(partita, name).__doc__, name
        assert {name} - {"attention"} <= {
            what.split(",")[0] for what in (*GLOBAL, "linear_cross_entropy", "token_stats", "token_divergence")
        }, name


@pytest.mark.parametrize("what", GLOBAL)
def test_a_bare_loss_is_warned_of_and_the_remedy_mends_it(world: World, what: str) -> None:
    for heard in world.run("averaging", "encoders", what=what):
        (bare, *others) = heard
        assert f"it keeps is 1/{world.size} of the gradient" in bare
        assert "partita.distributed.for_ddp(loss, group).backward()" in bare
        by_hand = next(text for text in others if text.startswith("by hand"))
        assert "silence this with" in by_hand  # warned of too, as it cannot be known, and right all the same
        assert [text for text in others if text != by_hand] == ["for_ddp", "forward only", "another sum"]


def test_classes_in_slices_are_mended_at_their_input(world: World) -> None:
    for heard in world.run("averaging", "classes"):
        assert ["partita.distributed.replicate(input, group)" in text for text in heard] == [True, True, False, False]
        assert heard[2:] == ["replicate", "replicate"]


def test_what_ddp_averages_rightly_is_not_warned_of(world: World) -> None:
    world.run("averaging", "right_without")


def test_one_warning_is_enough(world: World) -> None:
    assert [len(heard) for heard in world.run("averaging", "once")] == [1] * world.size
