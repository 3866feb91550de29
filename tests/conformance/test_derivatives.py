"""Gradients against their closed forms (section 3 of the specification)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

import partita
from tests import reference
from tests.conformance.serving import serving
from tests.strategies import problems
from tests.tolerances import assert_exact


def biased(p):
    """The problem with a bias that is a leaf, so that the gradient of the bias is the gradient of the scores."""
    bias = torch.zeros(*p.batch, p.n_query, p.n_key, dtype=torch.float64) if p.bias is None else p.bias
    bias = bias.expand(*p.batch, p.n_query, p.n_key).clone().requires_grad_()
    return bias, p.gibbs(bias=bias)


@given(p=problems())
def test_gradient_of_log_partition_is_the_weights(backend, p):
    """M-DER-2: d log Z / d s = p."""
    with serving(backend):
        bias, gibbs = biased(p)
        log_z = gibbs.log_partition()
        (grad,) = torch.autograd.grad(log_z[log_z.isfinite()].sum(), bias)
        assert_exact(grad, reference.probs(p.score()), magnitude=p.magnitude)


@given(p=problems())
def test_gradient_of_an_expectation_is_a_covariance(backend, p):
    """M-DER-1: the softmax Jacobian is p (delta - p), here against the weights v of an expectation."""
    with serving(backend):
        bias, gibbs = biased(p)
        prob = reference.probs(p.score())
        out = gibbs.expectation(p.value)
        (grad,) = torch.autograd.grad(out.sum(), bias)
        total = p.value.sum(-1)[..., None, :]
        mean = reference.expectation(p.score(), p.value).sum(-1)[..., None]
        assert_exact(grad, prob * (total - mean), magnitude=p.magnitude)


@given(p=problems())
def test_gradient_of_entropy_with_respect_to_scores(backend, p):
    """M-DER-3: d H / d s_j = -p_j (s_j - E[s]), which sums to 0."""
    with serving(backend):
        bias, gibbs = biased(p)
        (grad,) = torch.autograd.grad(gibbs.entropy().sum(), bias)
        s = p.score()
        centred = torch.where(reference.seen(s), s - reference.mean_score(s)[..., None], 0.0)
        assert_exact(grad, -reference.probs(s) * centred, magnitude=p.magnitude)
        assert_exact(grad.sum(-1), torch.zeros_like(grad[..., 0]), magnitude=p.magnitude)


@given(p=problems(with_softcap=False, scales=("row",)))
def test_derivatives_with_respect_to_the_scale(backend, p):
    """M-DER-2, M-DER-4, M-DER-5: dlogZ/dl = E[r], dH/dl = -Cov(s, r), dE[v]/dl = Cov(v, r), with r the raw scores."""
    scale = p.scale.expand(*p.batch, p.n_query).clone().requires_grad_()
    s = p.score()
    prob = reference.probs(s)
    raw = torch.where(reference.seen(s), (p.query @ p.key.mT).expand(s.shape), 0.0)
    safe = torch.where(reference.seen(s), s, 0.0)

    def mean(x):
        return (prob * x).sum(-1)

    with serving(backend):
        gibbs = p.gibbs(scale=scale)
        log_z = gibbs.log_partition()
        (grad,) = torch.autograd.grad(log_z[log_z.isfinite()].sum(), scale, retain_graph=True)
        assert_exact(grad, mean(raw), magnitude=p.magnitude)
        (grad,) = torch.autograd.grad(gibbs.entropy().sum(), scale)
        assert_exact(grad, -(mean(safe * raw) - mean(safe) * mean(raw)), magnitude=p.magnitude**2)
        out = p.gibbs(scale=scale).expectation(p.value)
        (grad,) = torch.autograd.grad(out.sum(), scale)
        total = p.value.sum(-1)[..., None, :]
        assert_exact(grad, mean(total * raw) - mean(total) * mean(raw), magnitude=p.magnitude**2)


def test_entropy_is_not_monotone_in_the_scale_under_a_bias(backend):
    """M-DER-4: b = -2 s cancels the scores at scale 2."""
    raw = torch.randn(1, 200, dtype=torch.float64)
    with serving(backend):
        entropies = [
            float(partita.Gibbs(torch.ones(1, 1).double(), raw.mT, scale=float(x), bias=-2 * raw).entropy())
            for x in range(5)
        ]
    assert entropies[0] < entropies[1] < entropies[2] > entropies[3] > entropies[4]
    assert entropies[2] == pytest.approx(math.log(200), abs=1e-12)
