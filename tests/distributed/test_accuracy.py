"""float32 and below, bitwise repeatability, bytes on the wire and memory per rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.world import World

MB = 1 << 20


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
    """Forward W - 1 hops of the keys; backward as many, and W hops of their gradients."""
    n, dim, W = 40, 8, world.size
    block = n * dim * 4
    for sent, messages in world.run("accuracy", "bytes_sent", n=n, dim=dim):
        assert sent == (3 * W - 2) * block
        assert messages == 3 * W - 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc, which only Linux has")
def test_memory_of_a_rank_falls_with_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 8192 pairs of 1024 features: 32 MB for each side on one rank."""
    # glibc keeps freed blocks of this size for later; what is measured here is what is in use
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    peaks = {}
    for size in (1, 2, 4, 8):
        world = World(size, start="spawn")
        try:
            peaks[size] = max(world.run("accuracy", "peak", n=8192, dim=1024)) / MB
        finally:
            world.close()
    shown = {size: round(value, 1) for size, value in peaks.items()}
    print(shown)
    for size in (2, 4):
        assert peaks[2 * size] < 0.65 * peaks[size], shown
    assert peaks[8] < peaks[1] / 3, shown
