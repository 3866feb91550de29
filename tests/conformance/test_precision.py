"""Below float64 accuracy is measured: at most twice the error of the plain torch formula in the same dtype."""

from __future__ import annotations

import pytest
import torch

from tests import reference
from tests.conformance.serving import serving
from tests.strategies import Problem, catalogue, problem
from tests.tolerances import assert_no_worse_than_naive

HALVES = (torch.bfloat16, torch.float16)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A matrix product in the operands' dtype, at its best: summed in float32, rounded once.

    torch's own half-precision product is avoided: where a processor advertises matrix units that its host does not
    grant, it ends the process.
    """
    return (a.float() @ b.float()).to(a.dtype)


def naive(p: Problem, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The plain torch formulas, all in this dtype."""
    q, k, v = (x.to(dtype) for x in (p.query, p.key, p.value))
    s = product(q, k.mT) * torch.as_tensor(p.scale, dtype=dtype)
    if p.visible is not None:
        s = s.masked_fill(~p.visible, -torch.inf)
    prob, log_prob = s.softmax(-1), s.log_softmax(-1)
    finite = torch.where(s.isneginf(), 0, s)
    mean = (prob * finite).sum(-1)
    return {
        "log_partition": s.logsumexp(-1),
        "entropy": -(prob * torch.where(s.isneginf(), 0, log_prob)).sum(-1),
        "mean_score": mean,
        "score_variance": (prob * (finite - mean[..., None]) ** 2).sum(-1),
        "expectation": product(prob, v),
        "nll": -log_prob.gather(-1, p.target[..., None])[..., 0],
    }


def ours(p: Problem) -> dict[str, torch.Tensor]:
    gibbs = p.gibbs()
    out = {name: getattr(gibbs, name)() for name in ("log_partition", "entropy", "mean_score", "score_variance")}
    return {**out, "expectation": gibbs.expectation(p.value), "nll": gibbs.nll(p.target)}


def truth(p: Problem) -> dict[str, torch.Tensor]:
    s = p.score()
    out = {name: getattr(reference, name)(s) for name in ("log_partition", "entropy", "mean_score", "score_variance")}
    return {**out, "expectation": reference.expectation(s, p.value), "nll": reference.nll(s, p.target)}


@pytest.mark.parametrize("kind", ["all", "causal", "segments"])
@pytest.mark.parametrize("scale", [0.125, 1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_error_is_at_most_twice_the_naive_formulas(natural, dtype, scale, kind):
    # Four draws at once: a largest error over 256 rows is a steadier thing to compare than one over 64.
    p = problem(64, 301, dim=64, dim_value=16, batch=(4,), support=catalogue(64, 301)[kind], dtype=dtype, scale=scale)
    expected, plain = truth(p), naive(p, dtype)
    with serving(natural):
        for name, actual in ours(p).items():
            assert_no_worse_than_naive(actual, plain[name], expected[name])


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_variance_over_many_blocks_of_keys(natural, scale):
    """Sums of one block say little of the next where a few keys hold the mass."""
    p = problem(64, 1501, dim=64, dim_value=16, batch=(4,), dtype=torch.float32, scale=scale)
    with serving(natural):
        actual = p.gibbs().score_variance()
    assert_no_worse_than_naive(actual, naive(p, torch.float32)["score_variance"], truth(p)["score_variance"])


def test_variance_far_below_the_peak(natural):
    """One high score and 2000 lower ones that hold the mass: E[c^2] - E[c]^2 about the peak loses its digits there."""
    g = torch.Generator().manual_seed(0)
    key = torch.cat([torch.tensor([[0.0]]), -4.0 + 0.1 * torch.randn(2000, 1, generator=g)])
    p = Problem(torch.ones(1, 1), key, key, torch.tensor([0]))
    with serving(natural):
        actual = p.gibbs().score_variance()
    assert_no_worse_than_naive(actual, naive(p, torch.float32)["score_variance"], truth(p)["score_variance"])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_gradient_error_is_at_most_twice_the_naive_formulas(natural, dtype):
    p = problem(33, 123, dim=16, support=catalogue(33, 123)["causal"], dtype=dtype, scale=0.25)
    names = ("query", "key", "value")

    def gradients(compute, low):
        leaves = {name: getattr(p, name).detach().to(low).requires_grad_() for name in names}
        out = compute(Problem(**{**p.__dict__, **leaves}))
        weight = torch.linspace(-1, 1, 33, dtype=torch.float64)
        loss = sum((out[name].double() * weight).sum() for name in ("log_partition", "entropy", "nll"))
        loss = loss + (out["expectation"].double() * weight[:, None]).sum()
        return dict(zip(names, torch.autograd.grad(loss, leaves.values()), strict=True))

    want, plain = gradients(truth, torch.float64), gradients(lambda x: naive(x, dtype), dtype)
    with serving(natural):
        got = gradients(ours, dtype)
    for name in names:
        assert got[name].dtype == dtype
        assert_no_worse_than_naive(got[name], plain[name], want[name], ulps=1)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_entropy_stays_between_zero_and_log_visible(natural, dtype, scale):
    """M-ENT-1: 0 <= H <= log n, also in low precision, where log Z - E[s] goes negative."""
    p = problem(41, 123, dim=32, support=catalogue(41, 123)["causal"], dtype=dtype, scale=scale)
    with serving(natural):
        stats = p.gibbs().stats()
        assert (stats.entropy >= 0).all()
        assert (stats.entropy <= stats.visible.log() + 1e-6 * stats.visible.log().clamp(min=1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_row_statistics_are_float32_at_least_and_values_keep_their_dtype(natural, dtype):
    p = problem(5, 7, dtype=dtype)
    with serving(natural):
        gibbs = p.gibbs()
        assert all(column.dtype == torch.float32 for column in gibbs.stats())
        assert gibbs.nll(p.target).dtype == torch.float32
        assert gibbs.expectation(p.value).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_large_common_offset_costs_no_digits_of_the_entropy(natural, dtype):
    """M-ENT-3: the uncentred form loses every digit at this offset."""
    p = problem(5, 513, dim=4, dtype=dtype)
    base = p.gibbs(bias=torch.zeros(1, 513, dtype=dtype)).entropy()
    with serving(natural):
        shifted = p.gibbs(bias=torch.full((1, 513), 4096.0, dtype=dtype)).entropy()
        # What adding the offset to the scores in float32 costs: half a unit in the last place of 4096 for each score.
        assert (shifted - base).abs().max() <= 2.0 * 4096 * torch.finfo(torch.float32).eps * 4
