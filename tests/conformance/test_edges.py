"""Rows without keys, one key, and what must not leak: nan and inf in places a row may not see."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import partita
from tests.conformance.serving import serving
from tests.strategies import INF, catalogue, masked, problem
from tests.tolerances import assert_exact, assert_same_statistics


def test_an_empty_row_has_its_documented_values_and_no_gradient(backend):
    """log Z = -inf, everything else 0, nll +inf, gradient 0, never nan."""
    keep = torch.rand(7, 11) < 0.5
    keep[3] = False
    p = problem(7, 11, support=masked(keep))
    query, key, value = (x.clone().requires_grad_() for x in (p.query, p.key, p.value))
    with serving(backend):
        gibbs = p.gibbs(query=query, key=key)
        stats, out = gibbs.stats(), gibbs.expectation(value)
        assert stats.log_partition[3] == -INF
        assert stats.max_score[3] == -INF
        for name in ("entropy", "mean_score", "score_variance", "visible"):
            assert getattr(stats, name)[3] == 0
        assert (out[3] == 0).all()
        assert gibbs.nll(p.target)[3] == INF
        assert gibbs.log_prob(p.target)[3] == -INF
        assert gibbs.effective_width()[3] == 1
        assert (gibbs.probs()[3] == 0).all()
        assert gibbs.sample()[3] == -1
        total = sum(getattr(stats, name)[3] for name in ("log_partition", "entropy", "mean_score", "score_variance"))
        (total + out[3].sum() + gibbs.nll(p.target)[3]).backward()
        for leaf in (query, key, value):
            assert (leaf.grad == 0).all()


def test_an_empty_row_leaves_the_gradients_of_the_others_alone(backend):
    keep = torch.rand(7, 11) < 0.7
    keep[3] = False
    p = problem(7, 11, support=masked(keep))
    others = [0, 1, 2, 4, 5, 6]

    with serving(backend):
        grads = []
        for rows in (list(range(7)), others):
            leaves = [x.clone().requires_grad_() for x in (p.query, p.key, p.value)]
            support = partita.support.mask(keep[rows])
            gibbs = partita.Gibbs(leaves[0][rows], leaves[1], support=support)
            loss = gibbs.entropy().sum() + gibbs.expectation(leaves[2]).sin().sum()
            finite = gibbs.log_partition()
            loss = loss + finite[finite.isfinite()].sum()
            grads.append(torch.autograd.grad(loss, leaves))
        for a, b in zip(*grads, strict=True):
            assert_exact(a, b)


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
@pytest.mark.parametrize("kind", ["lengths", "mask", "causal & lengths", "(causal & not-self) | lengths"])
def test_a_masked_key_poisons_nothing(backend, kind, poison):
    """nan or inf in a key and value that no row may see: values and gradients are those of any other number there."""
    support, visible = catalogue(9, 11)[kind]
    hidden = ~visible.any(0)
    hidden[10] = True
    support, visible = partita.support.mask(~hidden[None]) & support, visible & ~hidden
    results = []
    for filler in (0.0, poison):
        p = problem(9, 11, support=(support, visible))
        key, value = (x.clone() for x in (p.key, p.value))
        key[hidden], value[hidden] = filler, filler
        leaves = [x.requires_grad_() for x in (p.query.clone(), key, value)]
        with serving(backend):
            gibbs = p.gibbs(query=leaves[0], key=key)
            out = [*gibbs.stats(), gibbs.expectation(value)]
            loss = gibbs.entropy().sum() + out[-1].sum() + gibbs.score_variance().sum()
            grads = torch.autograd.grad(loss, leaves)
        results.append([x.detach() for x in (*out, grads[0], grads[1][~hidden], grads[2][~hidden])])
        assert (grads[1][hidden] == 0).all()
        assert (grads[2][hidden] == 0).all()
    for a, b in zip(*results, strict=True):
        assert_exact(b, a)


@pytest.mark.parametrize("poison", [math.nan, INF])
def test_a_row_is_not_poisoned_by_what_only_others_see(backend, poison):
    """Causal: nan in the last key and value reaches the last row alone, forward and in its own gradient."""
    p = problem(6, 6, support=catalogue(6, 6)["causal"])
    key, value = p.key.clone(), p.value.clone()
    key[5], value[5] = poison, poison
    query = p.query.clone().requires_grad_()
    with serving(backend):
        gibbs = p.gibbs(query=query, key=key)
        clean = p.gibbs()
        out = gibbs.expectation(value)
        assert_exact(out[:5].detach(), clean.expectation(p.value)[:5])
        assert_exact(gibbs.entropy()[:5].detach(), clean.entropy()[:5])
        assert out[5].isnan().all()
        (grad,) = torch.autograd.grad(out[:5].sum() + gibbs.entropy()[:5].sum(), query)
        want = p.query.clone().requires_grad_()
        again = p.gibbs(query=want)
        (expected,) = torch.autograd.grad(again.expectation(p.value)[:5].sum() + again.entropy()[:5].sum(), want)
        assert_exact(grad[:5], expected[:5])


def test_nan_or_inf_in_a_masked_place_of_the_bias_changes_nothing(backend):
    support, visible = catalogue(7, 9)["causal"]
    p = problem(7, 9, support=(support, visible), bias=torch.randn(7, 9).double())
    bad = p.bias.clone()
    bad[~visible] = torch.tensor([math.nan, INF]).double().repeat(30)[: int((~visible).sum())]
    with serving(backend):
        assert_same_statistics(p.gibbs(bias=bad).stats(), p.gibbs().stats(), p.magnitude)
        leaves = bad.clone().requires_grad_(), p.query.clone().requires_grad_()
        gibbs = p.gibbs(bias=leaves[0], query=leaves[1])
        grads = torch.autograd.grad(gibbs.entropy().sum() + gibbs.expectation(p.value).sum(), leaves)
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][~visible] == 0).all()


def test_minus_infinity_in_the_bias_is_a_mask(backend):
    support, visible = catalogue(7, 9)["mask"]
    p, q = problem(7, 9, support=(support, visible)), problem(7, 9)
    bias = torch.zeros(7, 9, dtype=torch.float64).masked_fill(~visible, -INF)
    with serving(backend):
        assert_same_statistics(q.gibbs(bias=bias).stats(), p.gibbs().stats())
        assert_exact(q.gibbs(bias=bias).nll(p.target), p.gibbs().nll(p.target))


@pytest.mark.parametrize("place", ["query", "key", "value", "bias"])
def test_nan_in_a_visible_place_hits_exactly_the_rows_that_see_it(backend, place):
    support, visible = catalogue(7, 9)["mask"]
    p = problem(7, 9, support=(support, visible), bias=torch.randn(7, 9).double())
    changed = {name: getattr(p, name).clone() for name in ("query", "key", "value", "bias")}
    rows = visible[:, 4].clone()
    if place == "query":
        changed["query"][2, 0] = math.nan
        rows = torch.arange(7) == 2
    elif place == "bias":
        row = int(rows.nonzero()[0])
        changed["bias"][row, 4] = math.nan
        rows = torch.arange(7) == row
    else:
        changed[place][4] = math.nan
    with serving(backend):
        gibbs = replace(p, **changed).gibbs()
        out = gibbs.expectation(changed["value"])
        assert torch.equal(out.isnan().all(-1), rows)
        assert torch.equal(out.isnan().any(-1), rows)
        if place != "value":
            for name in ("log_partition", "entropy", "mean_score", "score_variance", "max_score"):
                assert torch.equal(getattr(gibbs, name)().isnan(), rows), name


def test_a_hidden_target_has_no_gradient_and_spoils_none(backend):
    """nll is +inf there: a constant."""
    p = problem(5, 5, support=catalogue(5, 5)["causal"])
    query = p.query.clone().requires_grad_()
    target = torch.tensor([0, 4, 1, 4, 4])
    with serving(backend):
        nll = p.gibbs(query=query).nll(target)
        assert nll.isinf().tolist() == [False, True, False, True, False]
        (grad,) = torch.autograd.grad(nll.sum(), query)
        (expected,) = torch.autograd.grad(p.gibbs(query=query).nll(target)[[0, 2, 4]].sum(), query)
    assert (grad[[1, 3]] == 0).all()
    assert_exact(grad, expected)
