"""The losses' kernels, in Triton's interpreter: against float64, in chunks, in half precision, and where they give up.

What they are besides (equal to the pass, with second derivatives) is asked of every backend in conformance.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from partita.engine.backends.triton import BACKEND, losses
from partita.engine.backends.triton.launch import interpreted
from partita.engine.request import Request
from tests.tolerances import assert_no_worse_than_naive

pytestmark = pytest.mark.skipif(not interpreted(), reason="runs kernels in Triton's interpreter: make test-triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = (True, True, False, True, True)
CHUNK = 37 * 4 * 10  # bytes: three chunks of the 29 rows below, none of the size of another


def classifier(dtype: torch.dtype, bias: bool = True) -> tuple[list[Tensor], Tensor, Tensor]:
    operands = [torch.randn(29, 11).to(dtype), torch.randn(37, 11).to(dtype), torch.rand(29) + 0.5]
    operands += [torch.randn(1, 37)] if bias else []
    return operands, torch.randint(37, (29,)), torch.rand(29)


def request_of(operands: list[Tensor], target: Tensor) -> Request:
    query, key, scale, *bias = operands
    gibbs = partita.Gibbs(query, key, scale=scale, bias=bias[0] if bias else None)
    found = gibbs.asking(target=target, statistics=False)
    assert found is not None
    return found


def by_hand(operands: list[Tensor], target: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The plain formula in the dtype of its operands, and its gradients."""
    query, key, scale, *bias = leaves = [t.detach().clone().requires_grad_() for t in operands]
    logits = scale.to(query.dtype)[:, None] * (query @ key.T) + (bias[0].to(query.dtype) if bias else 0.0)
    nll = F.cross_entropy(logits, target, reduction="none")
    return nll.detach(), torch.autograd.grad((nll * weight.to(nll.dtype)).sum(), leaves)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_classifier_in_chunks_is_no_worse_than_the_plain_formula(dtype, bias) -> None:
    operands, target, weight = classifier(dtype, bias)
    found = losses.weighted_nll(request_of(operands, target), weight, ALL, chunk_bytes=CHUNK)
    assert found is not None
    truth, true_grads = by_hand([t.double() for t in operands], target, weight.double())
    naive, naive_grads = by_hand(operands, target, weight)
    assert_no_worse_than_naive(found[0], naive, truth)
    names = ("query", "key", "scale", "bias")[: len(operands)]
    for name, operand, plain, true in zip(names, operands, naive_grads, true_grads, strict=True):
        made = found[1][name]
        assert made.shape == operand.shape and made.dtype == operand.dtype
        assert_no_worse_than_naive(made, plain, true, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_contrast_in_chunks_is_no_worse_than_the_plain_formula(dtype) -> None:
    query, key = (torch.randn(41, 9).to(dtype) for _ in range(2))
    scale, own = torch.tensor([0.7]), torch.arange(41)
    upstream = torch.rand(41) / 41, torch.rand(41) / 41  # as of a mean: in float16 a probability times it is nothing
    request = replace(partita.Gibbs(query, key, scale=scale[0]).request(), target=own)
    found = losses.both_ways(request, chunk_bytes=CHUNK)
    assert found is not None
    rows, columns = found
    sums = (rows.peak, rows.mass, columns.peak, columns.mass)
    made = losses.both_ways_backward(request, sums, upstream, (True, True, False, True, False), chunk_bytes=CHUNK)

    def plainly(*given: Tensor) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in given]
        logits = leaves[0] @ leaves[1].T * leaves[2].to(leaves[0].dtype)
        both = [F.cross_entropy(x, own, reduction="none") for x in (logits, logits.T)]
        # in half precision with the upstream in full, as a scaler of gradients would have it
        unit = 41 if given[0].dtype == torch.float16 else 1
        grads = torch.autograd.grad(both, leaves, [unit * g.to(both[0].dtype) for g in upstream])
        return [*(x.detach() for x in both), *(g / unit for g in grads)]

    truth, naive = plainly(query.double(), key.double(), scale.double()), plainly(query, key, scale)
    ours = [rows.nll(), columns.nll(), made["query"], made["key"], made["scale"]]
    for a, b, c in zip(ours, naive, truth, strict=True):
        assert_no_worse_than_naive(a, b, c)


def test_chunks_change_nothing_but_rounding_and_twice_is_the_same() -> None:
    operands, target, weight = classifier(torch.float64)
    operands[2:] = [t.double() for t in operands[2:]]
    request = request_of(operands, target)
    whole, cut, again = (
        losses.weighted_nll(request, weight.double(), ALL, chunk_bytes=size) for size in (1 << 20, CHUNK, CHUNK)
    )
    assert whole is not None and cut is not None and again is not None
    assert torch.equal(cut[0], again[0])
    for name, grad in whole[1].items():
        # sums of 37 terms of size one, in another order
        torch.testing.assert_close(cut[1][name], grad, rtol=1e-13, atol=1e-13)
        assert torch.equal(cut[1][name], again[1][name])


def test_more_features_than_a_pass_can_hold() -> None:
    """torch makes the products of a loss: a hidden state of 300 features has no pass here, and has a loss."""
    x, w = torch.randn(5, 300, requires_grad=True), torch.randn(7, 300, requires_grad=True)
    target = torch.randint(7, (5,))
    request = partita.Gibbs(x, w).request()
    assert BACKEND.why_not(request) is not None
    with partita.backend("triton"):
        loss = partita.Gibbs(x, w).weighted_nll(target, torch.ones(5))
        assert type(loss.grad_fn).__name__ == "FastPathBackward"
        found = torch.autograd.grad(loss, (x, w))
        with pytest.raises(partita.errors.BackendError, match="256 features"):
            partita.Gibbs(x, w).nll(target)
    want = torch.autograd.grad(F.cross_entropy(x @ w.T, target, reduction="sum"), (x, w))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # logits of size 50 with 300 roundings each: 2e-5


def test_a_hidden_class_is_served_and_what_is_not_finite_is_not() -> None:
    operands, target, weight = classifier(torch.float32)
    with torch.no_grad():
        operands[3][0, 5] = -torch.inf  # no row sees class 5
    target[target == 5] = 6
    found = losses.weighted_nll(request_of(operands, target), weight, ALL)
    assert found is not None
    _, true_grads = by_hand([t.double() for t in operands], target, weight.double())
    torch.testing.assert_close(found[1]["query"].double(), true_grads[0], rtol=1e-5, atol=1e-5)
    assert not found[1]["key"][5].any()
    for place, value in ((0, torch.nan), (1, torch.inf)):
        spoiled = [t.clone() for t in operands]
        spoiled[place][3, 0] = value
        assert losses.weighted_nll(request_of(spoiled, target), weight, ALL) is None
    # a product of -inf has no weight, but 0 * inf in the gradient is nan: that too is left to the pass
    spoiled = [t.clone() for t in operands]
    spoiled[0][:, 0], spoiled[1][3, 0] = -spoiled[0][:, 0].abs() - 1, torch.inf
    assert losses.weighted_nll(request_of(spoiled, torch.where(target == 3, 4, target)), weight, ALL) is None
    target[0] = 5
    assert losses.weighted_nll(request_of(operands, target), weight, ALL) is None  # its nll is infinite


@pytest.mark.parametrize("capped", [False, True])
def test_what_the_kernel_does_not_know_goes_the_long_way(capped) -> None:
    operands, target, weight = classifier(torch.float32, bias=False)
    request = request_of(operands, target)
    given = replace(request, softcap=5.0) if capped else replace(request, bias=torch.zeros(29, 37))
    assert losses.weighted_nll(given, weight, ALL) is None
