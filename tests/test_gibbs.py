"""Gibbs by hand: values, options, caching, samples and the best keys."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

import partita
from partita.engine.backends.tiled import tile_shape
from partita.errors import TargetError
from tests import reference
from tests.strategies import INF, catalogue, problem
from tests.tolerances import assert_exact, assert_same_statistics


def two_keys(gap: float) -> partita.Gibbs:
    """One query, two keys whose scores are 0 and gap."""
    return partita.Gibbs(torch.ones(1, 1, dtype=torch.float64), torch.tensor([[0.0], [gap]], dtype=torch.float64))


def test_values_by_hand():
    """Two keys with odds 3:1."""
    stats = two_keys(math.log(3)).stats()
    assert float(stats.log_partition) == pytest.approx(math.log(4))
    assert float(stats.entropy) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert float(stats.mean_score) == pytest.approx(0.75 * math.log(3))
    assert float(stats.score_variance) == pytest.approx(0.75 * 0.25 * math.log(3) ** 2)
    assert float(stats.max_score) == pytest.approx(math.log(3))
    assert float(stats.visible) == 2
    assert two_keys(math.log(3)).probs().flatten().tolist() == pytest.approx([0.25, 0.75])
    p = problem()  # the default scale is 1
    assert_same_statistics(partita.Gibbs(p.query, p.key).stats(), partita.Gibbs(p.query, p.key, scale=1.0).stats())


def test_softcap_bounds_the_score_before_the_bias():
    """score = softcap(scale * <q, k>) + bias."""
    p = problem(scale=50.0, softcap=3.0)
    assert p.gibbs().max_score().max() <= 3.0
    lifted = p.gibbs(bias=torch.full((1, 1), 100.0, dtype=torch.float64))
    assert_exact(lifted.max_score(), p.gibbs().max_score() + 100.0)


def test_shape_of_every_read():
    p = problem(7, 13, dim_value=3, batch=(2, 5))
    gibbs = p.gibbs()
    for name in (*partita.Stats._fields, "effective_width"):
        assert getattr(gibbs, name)().shape == (2, 5, 7), name
    for name in ("nll", "log_prob", "target_rank"):
        assert getattr(gibbs, name)(p.target).shape == (2, 5, 7), name
    assert gibbs.expectation(p.value).shape == (2, 5, 7, 3)
    assert gibbs.probs().shape == (2, 5, 7, 13)
    assert gibbs.sample().shape == (2, 5, 7)
    assert all(x.shape == (2, 5, 7, 4) for x in gibbs.top(4))


def test_a_target_that_is_not_visible_is_infinitely_surprising():
    p = problem(4, 4, support=catalogue(4, 4)["causal"])
    last = torch.full((4,), 3)
    nll = p.gibbs().nll(last)
    assert nll[:3].eq(INF).all()
    assert nll[3].isfinite()
    assert p.gibbs().target_rank(last)[:3].tolist() == [1, 2, 3]  # every visible key is better than an invisible one


def test_rank_counts_only_strictly_better_visible_keys():
    key = torch.tensor([[3.0], [2.0], [2.0], [5.0], [1.0]], dtype=torch.float64)
    gibbs = partita.Gibbs(torch.ones(1, 1, dtype=torch.float64), key)
    assert [int(gibbs.target_rank(torch.tensor([j]))) for j in range(5)] == [1, 2, 2, 0, 4]
    hidden = partita.Gibbs(
        torch.ones(1, 1, dtype=torch.float64),
        key,
        support=partita.support.mask(torch.tensor([[True] * 3 + [False, True]])),
    )
    assert [int(hidden.target_rank(torch.tensor([j]))) for j in (0, 1, 4)] == [0, 1, 3]


def test_a_value_or_a_target_broadcasts_or_brings_the_batch():
    p = problem(7, 13, batch=(2,))
    shared = p.target[0]
    assert_exact(p.gibbs().nll(shared), reference.nll(p.score(), shared.expand(2, 7)))
    p = problem(5, 7)
    values, targets = torch.randn(3, 7, 2, dtype=torch.float64), torch.randint(0, 7, (3, 5))
    assert_exact(p.gibbs().expectation(values), reference.expectation(p.score(), values))
    for given in (targets, targets.int()):
        assert_exact(p.gibbs().nll(given), reference.nll(p.score(), targets))


@pytest.mark.parametrize("valued", [False, True])
def test_later_reads_are_free(monkeypatch, valued):
    """The first reduction fills all row statistics, that of a value too."""
    module = importlib.import_module("partita.gibbs")

    p, passes, reduce = problem(7, 13), [], module.execute
    monkeypatch.setattr(module, "execute", lambda *args, **kwargs: passes.append(1) or reduce(*args, **kwargs))
    gibbs = p.gibbs()
    assert passes == []  # making it computes nothing
    if valued:
        gibbs.expectation(p.value)
    for name in (*partita.Stats._fields, "effective_width", "stats"):
        getattr(gibbs, name)()
    assert len(passes) == 1


# Samples and the best keys


@pytest.mark.parametrize("backend_name", ["dense", "tiled"])
def test_sample_frequencies_are_the_probabilities(backend_name):
    """4000 draws of 3 rows: within five standard errors."""
    p = problem(3, 7, support=catalogue(3, 7)["causal"], scale=0.6)
    many = p.gibbs(query=p.query.expand(4000, 3, 5))
    with partita.backend(backend_name), tile_shape(2, 3):
        draws = many.sample(generator=torch.Generator().manual_seed(1))
    assert draws.dtype == torch.int64
    found = torch.nn.functional.one_hot(draws, 7).double().mean(0)
    expected = reference.probs(p.score())
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt()).all()


def test_sample_is_reproducible_from_its_generator():
    p = problem(7, 123, batch=(9,))
    a, b, c = (p.gibbs().sample(generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_sample_never_leaves_the_support():
    p = problem(7, 9, batch=(50,), support=catalogue(7, 9)["mask"])
    draws = p.gibbs().sample()
    empty = ~p.visible.any(-1)
    assert (draws[:, empty] == -1).all()
    rows = torch.arange(7).expand(50, 7)
    assert p.visible[rows[:, ~empty], draws[:, ~empty]].all()


def test_scores_of_top_have_the_gradient_of_the_chosen_keys():
    p = problem(5, 9, support=catalogue(5, 9)["mask"], bias=torch.randn(5, 9, dtype=torch.float64), softcap=3.0)
    query, key, bias = (x.clone().requires_grad_() for x in (p.query, p.key, p.bias))
    scores, indices = p.gibbs(query=query, key=key, bias=bias).top(2)
    s = reference.score(query, key, bias=bias, softcap=3.0, visible=p.visible)
    expected = s.gather(-1, indices.clamp(min=0))
    seen = indices >= 0
    for a, b in zip(
        torch.autograd.grad(scores[seen].sin().sum(), (query, key, bias)),
        torch.autograd.grad(expected[seen].sin().sum(), (query, key, bias)),
        strict=True,
    ):
        assert_exact(a, b)


# Shapes and strides


def test_strides_do_not_matter():
    """Transposed, sliced and expanded operands, with their gradients."""
    base = torch.randn(5, 2, 14, dtype=torch.float64)
    query, key = base.permute(1, 2, 0)[:, ::2], torch.randn(1, 9, 10, dtype=torch.float64)[..., ::2].expand(2, 9, 5)
    value = torch.randn(4, 9, dtype=torch.float64).mT.expand(2, 9, 4)
    grads = []
    for copy in (False, True):
        leaves = [(x.contiguous() if copy else x).detach().requires_grad_() for x in (query, key, value)]
        gibbs = partita.Gibbs(leaves[0], leaves[1])
        grads.append(torch.autograd.grad(gibbs.entropy().sum() + gibbs.expectation(leaves[2]).sin().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        assert_exact(a, b)


def test_inference_mode_works():
    p = problem(5, 7)
    with torch.inference_mode():
        assert_exact(p.gibbs().entropy().clone(), reference.entropy(p.score()))
        inside = partita.Gibbs(p.query.clone(), p.key.clone())
        assert_exact(inside.entropy().clone(), inside.entropy().clone())


def test_what_inference_mode_changes_is_seen_if_it_was_not_made_there():
    p = problem(5, 7)
    query, keep = p.query.detach().clone(), torch.ones(5, 7, dtype=torch.bool)
    gibbs = partita.Gibbs(query, p.key, support=partita.support.mask(keep))
    before = gibbs.entropy().clone()
    with torch.inference_mode():
        query.mul_(2.0)
    sharper = gibbs.entropy().clone()
    assert not torch.equal(sharper, before)
    with torch.inference_mode():
        keep[:, 3:] = False
    assert gibbs.visible().eq(3).all()
    assert_exact(gibbs.entropy(), partita.Gibbs(query, p.key[:3]).entropy())


def test_a_value_that_brings_the_batch_leaves_the_gradient_of_the_statistics_right():
    """The rows are copies along the value's batch, and their gradients add up."""
    query, key = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7))
    state = partita.Gibbs(query, key).state(torch.randn(3, 7, 2, dtype=torch.float64))
    (found,) = torch.autograd.grad(state.entropy().sum(), query)
    (alone,) = torch.autograd.grad(partita.Gibbs(query, key).entropy().sum(), query)
    torch.testing.assert_close(found, 3 * alone)


def test_a_target_may_be_ignored_and_there_may_be_several():
    p, ids = partita.Gibbs(torch.randn(2, 5, 3), torch.randn(2, 7, 3)), torch.randint(7, (2, 5, 5))
    columns = [p.nll(column) for column in ids.unbind(-1)]
    assert torch.equal(p.nll(ids), torch.stack(columns, -1))
    assert torch.equal(p.target_rank(ids)[..., 2], p.target_rank(ids[..., 2].contiguous()))
    one = ids[..., 0].clone()
    one[0, 3] = -100
    assert p.nll(one)[0, 3] == 0 and p.target_rank(one)[0, 3] == -1
    assert torch.equal(p.log_prob(one)[1], -columns[0][1])
    with pytest.raises(TargetError, match="target must name a key"):
        p.nll(one - 3 * (one == -100).logical_not())
