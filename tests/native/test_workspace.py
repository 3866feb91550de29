"""The memory kept between calls: lent to one call at a time, written in any mode, never part of a result."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import partita
from partita.engine.backends.native import losses as kept
from partita.engine.backends.native.losses import workspace


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    kept._spare.clear()
    yield
    kept._spare.clear()


def test_the_same_memory_serves_the_next_call_and_a_larger_one_replaces_it() -> None:
    with workspace(4, 100, torch.float32) as first:
        at = first.data_ptr()
    with workspace(2, 100, torch.float64) as second:
        assert second.data_ptr() == at
    with workspace(8, 100, torch.float32) as third:
        assert third.shape == (8, 100)
    (memory,) = kept._spare
    assert memory.numel() >= 8 * 100 * 4


def test_no_two_calls_share_it() -> None:
    with workspace(4, 100, torch.float32) as outer, workspace(4, 100, torch.float32) as inner:
        assert outer.data_ptr() != inner.data_ptr()
    assert len(kept._spare) == 1


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 32, 1000, 1024, 32768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_an_odd_number_of_cache_lines_long(columns: int, dtype: torch.dtype) -> None:
    with workspace(3, columns, dtype) as matrix:
        apart = matrix.stride(0) * dtype.itemsize
        assert apart % 128 == 64 and apart >= columns * dtype.itemsize
        assert matrix.data_ptr() % 64 == 0


def test_what_is_too_large_or_left_by_an_error() -> None:
    with workspace(1, kept.KEPT // 4 + 1, torch.float32):
        pass
    assert not kept._spare
    with pytest.raises(ValueError, match="mine"), workspace(2, 2, torch.float32):
        raise ValueError("mine")
    assert len(kept._spare) == 1


def test_made_in_inference_mode_it_serves_training() -> None:
    torch.manual_seed(0)
    x, w, target = torch.randn(9, 8), torch.randn(50, 8), torch.randint(50, (9,))
    with torch.inference_mode():
        partita.linear_cross_entropy(x, w, target)
    x.requires_grad_()
    loss = partita.linear_cross_entropy(x, w, target)
    loss.backward()
    truth = torch.nn.functional.cross_entropy((x @ w.T).double(), target)
    torch.testing.assert_close(loss.double(), truth, atol=1e-6, rtol=1e-6)


def test_losses_of_several_threads_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    w = torch.randn(3000, 32)
    given = [(torch.randn(40, 32), torch.randint(3000, (40,))) for _ in range(4)]
    truth = [torch.nn.functional.cross_entropy(x @ w.T, target) for x, target in given]
    found: list[list[torch.Tensor]] = [[] for _ in given]

    def work(i: int) -> None:
        x, target = given[i]
        x = x.clone().requires_grad_()
        for _ in range(20):
            loss = partita.linear_cross_entropy(x, w, target)
            loss.backward()
            found[i].append(loss.detach())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for losses, expected in zip(found, truth, strict=True):
        assert len(losses) == 20
        torch.testing.assert_close(torch.stack(losses), expected.expand(20), atol=1e-5, rtol=1e-5)
