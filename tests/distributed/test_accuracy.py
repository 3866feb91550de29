"""float32 and below, bitwise repeatability, bytes on the wire."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.world import World


@pytest.mark.parametrize("face", ["contrast", "classes"])
def test_float32_is_no_worse_than_twice_the_plain_formula(world: World, face: str) -> None:
    world.run("accuracy", face)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_no_worse_than_twice_the_plain_formula(world: World, dtype: torch.dtype) -> None:
    world.run("accuracy", "sequence", dtype=dtype)


def test_the_same_call_twice_gives_the_same_bits(world: World) -> None:
    assert all(world.run("accuracy", "deterministic"))


def test_for_ddp_undoes_the_average(world: World) -> None:
    world.run("accuracy", "for_ddp")


def test_bytes_on_the_wire_are_as_documented(world: World) -> None:
    """Forward W - 1 hops of the keys; backward as many, and W - 1 hops of their gradients."""
    n, dim, W = 40, 8, world.size
    block = n * dim * 4
    for sent, messages in world.run("accuracy", "bytes_sent", n=n, dim=dim):
        assert sent == 3 * (W - 1) * block
        assert messages == 3 * (W - 1)
