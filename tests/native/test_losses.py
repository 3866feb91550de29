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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("scale", "dim"), [(1.0, 528), (0.7, 528), (1.0, 527)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_long_rows_come_in_chunks_and_spans(
    dtype: torch.dtype, scale: float, dim: int, threads: int
) -> None:
    """More rows than are packed at a time, more classes than a span, and ranges of classes that are added in turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        query, key = torch.randn(1101, dim, dtype=dtype), dim**-0.5 * torch.randn(2000, dim, dtype=dtype)
        target, above = torch.randint(2000, (1101,)), torch.randn(2, 1101, dtype=dtype)
        request = Request(query, key, None, torch.full((1,), scale, dtype=dtype), None, target, (), None)
        sums = passes.forward(request)
        assert sums is not None
        g = SumGrads(above[0] / sums.mass, None, None, None, above[1])
        found = passes.backward(request, sums.peak, g, (True, True, False, True, False))
        again = passes.backward(request, sums.peak, g, (True, True, False, True, False))
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert again is not None
    assert all(torch.equal(found[name], again[name]) for name in found)
    leaves = [x.double().requires_grad_() for x in (query, key, torch.full((1101,), scale, dtype=dtype))]
    score = leaves[2][:, None] * (leaves[0] @ leaves[1].T)
    own = score.gather(1, target[:, None])[:, 0]
    wanted = torch.autograd.grad((score.logsumexp(-1) * above[0] + own * above[1]).sum(), leaves)
    for name, want in zip(("query", "key", "scale"), wanted, strict=True):
        got = found[name]
        assert_near(got, want if got.shape == want.shape else want.sum().expand(got.shape), dtype)
