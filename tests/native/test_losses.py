"""The native losses against torch in float64: cross entropy in chunks, row and column sums from one product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from partita.engine.backends.native import losses as native_losses
from partita.engine.backends.native import reduce as native

pytestmark = pytest.mark.skipif(native.load() is None, reason=f"no native library: {native.why_not()}")

NEAR = {torch.float32: 2e-5, torch.float64: 1e-12}


def assert_near(got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> None:
    assert got is not None and want is not None and got.shape == want.shape
    error = (got.double() - want).abs().max().item()
    assert error <= NEAR[dtype] * max(1.0, want.abs().max().item()), f"error {error:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("terms", ["nll", "square", "spread", "all"])
@pytest.mark.parametrize("n_class", [1, 7, 16, 33, 1001])
def test_cross_entropy_in_chunks_agrees_with_autograd(dtype: torch.dtype, terms: str, n_class: int) -> None:
    N, D = 29, 19
    input, weight = torch.randn(N, D, dtype=dtype), torch.randn(n_class, D, dtype=dtype)
    bias = torch.randn(n_class, dtype=dtype)
    target = torch.randint(0, n_class, (N,))
    target[3] = -1  # no target: only the other terms act
    scale = 0.1 + torch.rand(N, dtype=dtype)
    acts = [terms in (name, "all") for name in ("nll", "square", "spread")]
    nll, square, spread = (torch.rand(N, dtype=dtype) if on else None for on in acts)
    nll = torch.zeros(N, dtype=dtype) if nll is None else nll
    nll[3] = 0.0
    given = (input, weight, bias, target, scale, nll, square, spread)
    found = native_losses.linear_cross_entropy(*given, needs=(True,) * 4, rank=True, chunk_bytes=11 * n_class * 8)
    assert found is not None
    sums, grads = found

    x, w, b, a = (t.double().requires_grad_() for t in (input, weight, bias, scale))
    s = a[:, None] * (x @ w.T) + b
    log_z = s.logsumexp(-1)
    p = s.softmax(-1)
    entropy = log_z - (p * s).sum(-1)
    picked = s.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    loss = nll.double() * (log_z - picked)
    if square is not None:
        loss = loss + square.double() * log_z**2
    if spread is not None:
        loss = loss + spread.double() * entropy
    loss.sum().backward()
    assert_near(sums.peak + sums.mass.log(), log_z.detach(), dtype)
    assert_near(sums.mass.log() - sums.first / sums.mass, entropy.detach(), dtype)
    kept = target >= 0
    assert_near(sums.target_score[kept], picked.detach()[kept], dtype)
    assert sums.rank is not None
    assert torch.equal(sums.rank[kept], (s > picked[:, None]).sum(-1)[kept])
    for got, want in zip(grads, (x, w, b, a), strict=True):
        assert_near(got, want.grad, dtype)


def test_a_row_of_weight_zero_has_gradient_zero() -> None:
    input, weight = torch.randn(4, 3), torch.randn(9, 3)
    target, nll = torch.tensor([1, -100, 2, -100]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    given = (input, weight, None, target, torch.ones(1), nll, None, None)
    found = native_losses.linear_cross_entropy(*given, needs=(True, True, False, False))
    assert found is not None and found[1].input is not None
    assert not found[1].input[1].any() and not found[1].input[3].any() and found[1].input[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 3), (33, 65, 17), (130, 600, 40), (513, 450, 64)])
def test_row_and_column_sums_come_from_one_pass(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    N, M, D = sizes
    query, key = torch.randn(N, D, dtype=dtype), torch.randn(M, D, dtype=dtype)
    scale = 0.3 + torch.rand(N, dtype=dtype)
    target = torch.randint(0, M, (N,))
    found = native_losses.reduce_both(query, key, scale, target)
    assert found is not None
    sums, columns = found
    q, k, a = (t.double().requires_grad_() for t in (query, key, scale))
    s = a[:, None] * (q @ k.T)
    rows, cols = s.logsumexp(1), s.logsumexp(0)
    assert_near(sums.peak + sums.mass.log(), rows.detach(), dtype)
    assert_near(columns.peak + columns.mass.log(), cols.detach(), dtype)
    p = s.softmax(0)
    entropy = cols - (p * s).sum(0)
    assert_near(columns.mass.log() - columns.first / columns.mass, entropy.detach(), dtype)
    spread = (p * s**2).sum(0) - (p * s).sum(0) ** 2
    mine = columns.second / columns.mass - (columns.first / columns.mass) ** 2
    assert (mine.double() - spread.detach()).abs().max().item() < 20 * NEAR[dtype]

    # sum of both log partitions, minus the targets' scores, plus the columns' entropies
    (rows.sum() + cols.sum() - s.gather(1, target[:, None]).sum() + entropy.sum()).backward()
    one = torch.ones(N, dtype=dtype)
    mean = columns.first / columns.mass
    upstream = native.ColumnSums(columns.peak, 2 / columns.mass + mean / columns.mass, -1 / columns.mass, None)
    grads = native_losses.reduce_both_backward(
        query, key, scale, target, sums.peak, (one / sums.mass, None, None, -one), upstream, (True, True, True)
    )
    assert grads is not None
    for got, want in zip((grads.query, grads.key, grads.scale), (q, k, a), strict=True):
        assert_near(got, want.grad, dtype)
    again = native_losses.reduce_both_backward(
        query, key, scale, target, sums.peak, (one / sums.mass, None, None, -one), upstream, (True, True, True)
    )
    assert again is not None and all(torch.equal(x, y) for x, y in zip(grads, again, strict=True) if x is not None)


def test_clip_loss_of_a_batch_agrees_with_two_cross_entropies() -> None:
    torch.manual_seed(3)
    image, text = F.normalize(torch.randn(70, 24), dim=1), F.normalize(torch.randn(70, 24), dim=1)
    scale, target = torch.tensor([14.0]), torch.arange(70)
    found = native_losses.reduce_both(image, text, scale, target)
    assert found is not None
    sums, columns = found
    loss = ((sums.peak + sums.mass.log()) + (columns.peak + columns.mass.log()) - 2 * sums.target_score).mean() / 2
    logits = 14.0 * image @ text.T
    want = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    torch.testing.assert_close(loss.float(), want)
