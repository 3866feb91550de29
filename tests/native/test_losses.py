"""The native losses against torch in float64: cross entropy in chunks, row and column sums from one product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from partita.engine.backends.native import library
from partita.engine.backends.native import losses as native_losses
from partita.engine.backends.native import reduce as native

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native library: {library.why_not()}")

NEAR = {torch.float32: 2e-5, torch.float64: 1e-12}


def assert_near(got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> None:
    assert got is not None and want is not None and got.shape == want.shape
    error = (got.double() - want).abs().max().item()
    assert error <= NEAR[dtype] * max(1.0, want.abs().max().item()), f"error {error:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_class", [1, 7, 16, 33, 1001])
def test_cross_entropy_in_chunks_agrees_with_autograd(dtype: torch.dtype, n_class: int) -> None:
    N, D = 29, 19
    input, weight = torch.randn(N, D, dtype=dtype), torch.randn(n_class, D, dtype=dtype)
    bias = torch.randn(n_class, dtype=dtype)
    target = torch.randint(0, n_class, (N,))
    target[3] = -1  # no target, and no weight
    scale, nll = 0.1 + torch.rand(N, dtype=dtype), torch.rand(N, dtype=dtype)
    nll[3] = 0.0
    given = (input, weight, bias, scale, target, nll)
    found = native_losses.weighted_nll(*given, (True,) * 4, chunk_bytes=11 * n_class * 8)
    assert found is not None
    sums, grads = found

    x, w, b, a = (t.double().requires_grad_() for t in (input, weight, bias, scale))
    s = a[:, None] * (x @ w.T) + b
    log_z = s.logsumexp(-1)
    picked = s.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    (nll.double() * (log_z - picked)).sum().backward()
    assert_near(sums.peak + sums.mass.log(), log_z.detach(), dtype)
    kept = target >= 0
    assert_near(sums.target_score[kept], picked.detach()[kept], dtype)
    for got, want in zip(grads, (x, w, b, a), strict=True):
        assert_near(got, want.grad, dtype)


def test_a_row_of_weight_zero_has_gradient_zero() -> None:
    input, weight = torch.randn(4, 3), torch.randn(9, 3)
    target, nll = torch.tensor([1, -100, 2, -100]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    found = native_losses.weighted_nll(input, weight, None, torch.ones(1), target, nll, (True, True, False, False))
    assert found is not None and found[1].query is not None
    assert not found[1].query[1].any() and not found[1].query[3].any() and found[1].query[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 3), (33, 65, 17), (130, 600, 40), (513, 450, 64)])
def test_row_and_column_sums_come_from_one_pass(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    N, M, D = sizes
    query, key = torch.randn(N, D, dtype=dtype), torch.randn(M, D, dtype=dtype)
    scale = 0.3 + torch.rand(N, dtype=dtype)
    target = torch.randint(0, M, (N,))
    found = native_losses.both_ways(query, key, scale, target)
    assert found is not None
    sums, columns = found
    assert sums.first is None and sums.statistics is None and sums.rank is None  # nobody reads them
    q, k, a = (t.double().requires_grad_() for t in (query, key, scale))
    s = a[:, None] * (q @ k.T)
    rows, cols = s.logsumexp(1), s.logsumexp(0)
    assert_near(sums.peak + sums.mass.log(), rows.detach(), dtype)
    assert_near(columns.peak + columns.mass.log(), cols.detach(), dtype)

    # the sum of both log partitions, the columns' twice, minus the targets' scores
    (rows.sum() + 2 * cols.sum() - s.gather(1, target[:, None]).sum()).backward()
    one = torch.ones(N, dtype=dtype)
    upstream = native.ColumnSums(columns.peak, 2 / columns.mass)
    given = (query, key, scale, target, sums.peak, (one / sums.mass, -one), upstream, (True, True, True))
    grads = native_losses.both_ways_backward(*given)
    assert grads is not None
    for got, want in zip((grads.query, grads.key, grads.scale), (q, k, a), strict=True):
        assert_near(got, want.grad, dtype)
    again = native_losses.both_ways_backward(*given)
    assert again is not None and all(torch.equal(x, y) for x, y in zip(grads, again, strict=True) if x is not None)


def test_clip_loss_of_a_batch_agrees_with_two_cross_entropies() -> None:
    torch.manual_seed(3)
    image, text = F.normalize(torch.randn(70, 24), dim=1), F.normalize(torch.randn(70, 24), dim=1)
    scale, target = torch.tensor([14.0]), torch.arange(70)
    found = native_losses.both_ways(image, text, scale, target)
    assert found is not None
    sums, columns = found
    loss = ((sums.peak + sums.mass.log()) + (columns.peak + columns.mass.log()) - 2 * sums.target_score).mean() / 2
    logits = 14.0 * image @ text.T
    want = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    torch.testing.assert_close(loss.float(), want)
