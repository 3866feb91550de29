"""The native losses against torch in float64: cross entropy in chunks, row and column sums from one product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from partita.engine.backends.native import library, passes
from partita.engine.backends.native import losses as native_losses
from partita.engine.request import Request
from partita.engine.sums import SumGrads

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
    request = Request(input, weight, None, scale, bias[None], target, (), None)
    found = native_losses.weighted_nll(request, nll, (True,) * 5, chunk_bytes=11 * n_class * 8)
    assert found is not None
    rows, grads = found

    x, w, b, a = (t.double().requires_grad_() for t in (input, weight, bias, scale))
    s = a[:, None] * (x @ w.T) + b
    log_z = s.logsumexp(-1)
    picked = s.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    (nll.double() * (log_z - picked)).sum().backward()
    kept = target >= 0
    assert not grads["query"][3].any()
    assert_near(rows[kept], (log_z - picked).detach()[kept], dtype)
    for name, want in {"query": x.grad, "key": w.grad, "bias": b.grad[None], "scale": a.grad}.items():
        assert_near(grads[name], want, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 3), (33, 65, 17), (130, 600, 40), (513, 450, 64)])
def test_row_and_column_sums_come_from_one_pass(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    N, M, D = sizes
    query, key = torch.randn(N, D, dtype=dtype), torch.randn(M, D, dtype=dtype)
    scale = 0.3 + torch.rand(N, dtype=dtype)
    target = torch.randint(0, M, (N,))
    request = Request(query, key, None, scale, None, target, (), None)
    found = native_losses.both_ways(request)
    assert found is not None
    sums, columns = found
    assert sums.first is None and sums.statistics is None and sums.rank is None  # not wanted
    q, k, a = (t.double().requires_grad_() for t in (query, key, scale))
    s = a[:, None] * (q @ k.T)
    rows, cols = s.logsumexp(1), s.logsumexp(0)
    assert_near(sums.peak + sums.mass.log(), rows.detach(), dtype)
    assert_near(columns.peak + columns.mass.log(), cols.detach(), dtype)

    # the sum of both log partitions, the columns' twice, minus the targets' scores
    (rows.sum() + 2 * cols.sum() - s.gather(1, target[:, None]).sum()).backward()
    one = torch.ones(N, dtype=dtype)
    upstream = SumGrads(one / sums.mass, target=-one), (True, True, False, True, False)
    given = (request, sums.peak, *upstream, passes.ColumnSums(columns.peak, 2 / columns.mass))
    grads, again = passes.backward(*given), passes.backward(*given)
    assert grads is not None and again is not None
    for name, true in {"query": q.grad, "key": k.grad, "scale": a.grad}.items():
        assert_near(grads[name], true, dtype)
        assert torch.equal(grads[name], again[name])
