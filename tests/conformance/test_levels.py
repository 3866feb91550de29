"""A pass gives the moments of the score that it was asked for, and what was not asked for is not there."""

from __future__ import annotations

import pytest
import torch

import partita
from partita import passes as reads
from tests.conformance.serving import serving
from tests.strategies import catalogue, problem
from tests.tolerances import assert_exact


@pytest.mark.parametrize("kind", ["all", "causal", "segments"])
def test_without_the_variance_everything_else_is_the_same(backend, kind):
    """Results and gradients; a GPU's kernel of this level is another one."""
    p = problem(5, 7, dim=3, dim_value=2, support=catalogue(5, 7)[kind])
    found = {}
    for variance in (True, False):
        query, key, value = (x.clone().requires_grad_() for x in (p.query, p.key, p.value))
        with serving(backend):
            sums = p.gibbs(query=query, key=key).reduce(value, p.target, variance=variance, mean=True)
            rows = (sums.state.entropy(), sums.state.mean_score(), sums.nll())
            rows = tuple(torch.where(x.isfinite(), x, torch.zeros_like(x)) for x in rows)
            total = (rows[0] - 0.3 * rows[1] + 0.7 * rows[2]).sum() + sums.mean.sin().sum()
        found[variance] = (*rows, sums.mean, *torch.autograd.grad(total, (query, key, value)))
        assert (sums.spread is None) != variance
        assert sums.state.score_variance().isnan().all() == (not variance)
    for less, full in zip(found[False], found[True], strict=True):
        assert_exact(less.detach(), full.detach())


def test_a_pass_without_the_variance_is_not_what_later_reads_find(backend):
    p = problem(4, 6, dim=3, dim_value=2, support=catalogue(4, 6)["all"])
    with serving(backend):
        gibbs = p.gibbs()
        gibbs.reduce(variance=False)
        assert_exact(gibbs.score_variance(), p.gibbs().score_variance())


@pytest.mark.parametrize(
    ("options", "level"),
    [({"z_loss": 0.1}, 0), ({"entropy_weight": 0.1}, 1), ({"entropy_weight": 0.1, "return_stats": True}, 2)],
)
def test_a_loss_asks_for_what_it_reads(monkeypatch, options, level):
    seen = []
    execute = reads.execute

    def watched(request):
        seen.append(request.level)
        return execute(request)

    monkeypatch.setattr(reads, "execute", watched)
    x, weight, target = torch.randn(4, 3), torch.randn(6, 3, requires_grad=True), torch.arange(4)
    partita.losses.linear_cross_entropy(x, weight, target, **options)
    assert seen == [level]
