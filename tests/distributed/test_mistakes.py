"""What one rank gets wrong is an error on all of them at once, before the group's timeout."""

from __future__ import annotations

import pytest

from tests.distributed.mistakes import CALLS, text
from tests.distributed.test_trouble import value_of_eyes
from tests.distributed.world import World

SOON_S = 100.0  # the group's own timeout is 240 s; the machine may be busy


def answers(world: World, name: str, **arguments: str) -> list[str]:
    out = world.attempt("mistakes", name, patience_s=SOON_S, **arguments)
    assert all(fine for fine, _ in out), out
    return [answer for _, answer in out]


@pytest.mark.parametrize("what", CALLS)
def test_a_mistake_of_one_rank_is_an_error_on_all(world: World, what: str) -> None:
    *others, last = answers(world, "one_rank", what=what)
    assert last.split(":")[0].endswith(CALLS[what][1]), last
    assert not last.startswith("BackendError"), last
    for heard in others:
        assert heard.startswith("BackendError"), heard
        assert f"rank {world.size - 1} of the group refused" in heard
    assert answers(world, "all_right", what=what) == ["no error"] * world.size
    for value in world.run("trouble", "still_in_step"):
        assert value == pytest.approx(value_of_eyes(world.size))


def test_bytes_of_every_rank(world: World) -> None:
    expected = [text(rank) for rank in range(world.size)]
    assert world.run("mistakes", "texts") == [expected] * world.size
