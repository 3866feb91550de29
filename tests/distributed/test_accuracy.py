"""float32 and below, bitwise repeatability, bytes on the wire."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.world import World

CHECKS: list[tuple[str, dict[str, Any]]] = [
    ("contrast", {}),
    ("classes", {}),
    ("sequence", {"dtype": torch.float32}),
    ("sequence", {"dtype": torch.bfloat16}),
]


@pytest.fixture(params=["blocks", "parts"])
def run(request: pytest.FixtureRequest, world: World) -> Callable[..., list[Any]]:
    """Runs a check, with blocks whole or cut finely."""
    if request.param == "blocks":
        return functools.partial(world.run, "accuracy")
    return lambda check, **given: world.run("finely", "again", file="accuracy", check=check, **given)


@pytest.mark.parametrize(("check", "given"), CHECKS)
def test_the_error_is_no_worse_than_twice_that_of_the_plain_formula(
    run: Any, check: str, given: dict[str, Any]
) -> None:
    """A backend rounds the gradients of each part to the dtype of its operand: many parts must not make it worse."""
    run(check, **given)


def test_the_same_call_twice_gives_the_same_bits(run: Any) -> None:
    assert all(run("deterministic"))


def test_for_ddp_undoes_the_average(world: World) -> None:
    world.run("accuracy", "for_ddp")


def test_bytes_on_the_wire_are_as_documented(run: Any, world: World) -> None:
    """Forward W - 1 hops of the keys; backward the same, and W - 1 hops of their gradients; parts send as blocks do."""
    n, dim, W = 40, 8, world.size
    for sent, messages, parts in run("bytes_sent", n=n, dim=dim):
        assert sent == 3 * (W - 1) * n * dim * 4
        assert messages == 3 * (W - 1) * parts
        assert (parts > 1) == (run.__class__ is not functools.partial)
