"""Tiles come from a table, or from a device that was asked."""

from __future__ import annotations

import itertools

import pytest
import torch

import partita
from partita.engine.backends.triton import tiles
from partita.engine.backends.triton.launch import interpreted

KINDS = ("forward", "decode", "backward_rows", "backward_keys", "backward_pairs")
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_103", "sm_120", "gfx90a", "gfx942", "gfx950")


@pytest.mark.parametrize("target", TARGETS)
def test_every_request_has_a_tile(target) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for kind, dim, dtype, level in itertools.product(KINDS, (16, 32, 64, 128, 256), dtypes, (0, 1, 2)):
        found = tiles.tile(kind, dim, dtype, level, target)
        assert found.rows % 16 == found.keys % 16 == 0 and found.rows >= 16 and found.keys >= 16
        assert found in tiles.candidates(tiles.Key(kind, dim, dtype, level, target))


def test_a_device_without_a_row_takes_one_that_is_no_larger() -> None:
    assert tiles.tile("forward", 64, torch.float16, 0, "sm_89") == tiles.tile("forward", 64, torch.float16, 0, "sm_80")
    # consumer Blackwell has the shared memory of an sm_80, not of an sm_100
    assert tiles.tile("forward", 64, torch.float16, 0, "sm_120") == tiles.tile("forward", 64, torch.float16, 0, "sm_80")


@pytest.fixture
def forgetful(monkeypatch):
    """What is tuned in a test is forgotten after it."""
    monkeypatch.setattr(tiles, "_tuned", {})


def test_the_fastest_tile_is_kept_and_one_that_fails_is_not(forgetful, monkeypatch) -> None:
    key = tiles.Key("forward", 64, torch.float16, 0, "sm_80")
    slow, broken, fast, *_ = tiles.candidates(key)
    times = {slow: 3.0, fast: 1.0}

    def seconds(call, device):
        tile = tiles.tile(*key)
        if tile == broken:
            raise RuntimeError("out of resource: shared memory")
        return times.get(tile, 2.0)

    monkeypatch.setattr(tiles, "_seconds", seconds)
    monkeypatch.setenv("PARTITA_TRITON_AUTOTUNE", "1")
    calls = []
    query = torch.zeros(1, 2)
    request = partita.Gibbs(query, query).request()
    tiles.autotuned(lambda request: calls.append(tiles.tile(*key)))(request)
    assert calls == [slow, fast]  # once to see what it asks for, once as it should be
    tiles.autotuned(lambda request: calls.append(tiles.tile(*key)))(request)
    assert calls[2:] == [fast, fast]  # what is known is not tried again


@pytest.mark.skipif(not interpreted(), reason="runs kernels in Triton's interpreter: make test-triton")
def test_a_tuned_pass_gives_the_same_numbers(forgetful, monkeypatch) -> None:
    query, key = torch.randn(1, 20, 8, dtype=torch.float64), torch.randn(1, 30, 8, dtype=torch.float64)
    with partita.backend("triton"):
        want = partita.Gibbs(query, key).entropy()
        monkeypatch.setenv("PARTITA_TRITON_AUTOTUNE", "1")
        found = partita.Gibbs(query, key).entropy()
    assert tiles._tuned  # something was tried
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
