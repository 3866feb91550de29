"""Every backend, statistic, support and dtype against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import partita
from partita import Gibbs
from tests import reference
from tests.conformance.serving import serving
from tests.differences import gradcheck
from tests.strategies import SUPPORTS, Problem, catalogue, problem, problems
from tests.tolerances import assert_exact

ROW_STATISTICS = ("log_partition", "entropy", "mean_score", "score_variance", "max_score", "visible", "effective_width")
TARGET_STATISTICS = ("nll", "log_prob", "target_rank")


def assert_all_exact(p: Problem) -> None:
    """Everything a Gibbs can be asked, against the definitions."""
    s, gibbs, magnitude = p.score(), p.gibbs(), p.magnitude
    for name in ROW_STATISTICS:
        expected = getattr(reference, name)(s)
        # A variance is a square: its rounding grows with the square of the scores.
        size = magnitude**2 if name == "score_variance" else magnitude
        assert_exact(getattr(gibbs, name)(), expected.double(), magnitude=size)
    for name in TARGET_STATISTICS:
        assert_exact(getattr(gibbs, name)(p.target), getattr(reference, name)(s, p.target), magnitude=magnitude)
    assert gibbs.target_rank(p.target).dtype == torch.int64
    assert_exact(gibbs.expectation(p.value), reference.expectation(s, p.value), magnitude=magnitude)
    assert_exact(gibbs.probs(), reference.probs(s), magnitude=magnitude)
    for name, column in zip(partita.Stats._fields, gibbs.stats(), strict=True):
        assert torch.equal(column, getattr(gibbs, name)()), name


@given(p=problems())
def test_every_statistic_is_its_definition(backend, p):
    """M-GIB-1, M-ENT-1."""
    with serving(backend):
        assert_all_exact(p)


@pytest.mark.parametrize("kind", SUPPORTS)
def test_every_support_is_its_matrix(backend, kind):
    with serving(backend):
        assert_all_exact(problem(11, 13, batch=(2,), support=catalogue(11, 13, (2,))[kind], scale=0.7))


@pytest.mark.parametrize("kind", SUPPORTS)
def test_every_support_is_its_matrix_beyond_one_block_of_keys(natural, kind):
    """More keys than a native block, more rows than a block of rows, and more than one tile of each."""
    with serving(natural):
        assert_all_exact(problem(67, 523, dim=9, support=catalogue(67, 523)[kind], scale=0.5))


def test_query_groups_share_keys_without_repeating_them(backend):
    """(batch, key heads, group, n_query, dim) against (batch, key heads, 1, n_key, dim)."""
    p = problem(7, 11, batch=(2, 3, 4), support=catalogue(7, 11, (2, 3, 4))["mask"], scale=0.8)
    shared = Problem(
        **{**p.__dict__, "key": p.key[:, :, :1], "value": p.value[:, :, :1]},
    )
    with serving(backend):
        assert_all_exact(shared)


def test_batches_broadcast_in_every_direction(backend):
    p = problem(5, 7)
    with serving(backend):
        gibbs = partita.Gibbs(p.query.expand(3, 1, 5, 5), p.key.expand(2, 7, 5), scale=torch.rand(3, 2, 5).double())
        s = reference.score(p.query.expand(3, 1, 5, 5), p.key.expand(2, 7, 5), scale=gibbs.scale)
        assert_exact(gibbs.entropy(), reference.entropy(s))
        assert_exact(gibbs.expectation(p.value), reference.expectation(s, p.value))


def test_a_bias_may_bring_the_batch(backend):
    p = problem(5, 7)
    bias = torch.randn(2, 3, 1, 7, dtype=torch.float64)
    with serving(backend):
        s = reference.score(p.query, p.key, bias=bias)
        gibbs = partita.Gibbs(p.query, p.key, bias=bias)
        assert_exact(gibbs.log_partition(), reference.log_partition(s))
        assert_exact(gibbs.expectation(p.value), reference.expectation(s, p.value))


@pytest.mark.parametrize("n_query", [0, 1, 7])
@pytest.mark.parametrize("n_key", [0, 1, 123])
def test_degenerate_sizes(backend, n_query, n_key):
    p = problem(n_query, n_key)
    with serving(backend):
        s, gibbs = p.score(), p.gibbs()
        for name in ROW_STATISTICS:
            assert_exact(getattr(gibbs, name)(), getattr(reference, name)(s).double(), magnitude=100)
        assert_exact(gibbs.expectation(p.value), reference.expectation(s, p.value))


def test_top_is_the_sorted_scores(backend):
    p = problem(9, 31, batch=(2,), support=catalogue(9, 31, (2,))["mask"])
    with serving(backend):
        for k in (1, 5, 31):
            scores, indices = p.gibbs().top(k)
            want_scores, want_indices = reference.top(p.score(), k)
            assert_exact(scores, want_scores)
            assert torch.equal(indices, want_indices)


@pytest.mark.parametrize("kind", ["all", "causal", "mask", "window | mask"])
def test_top_beyond_one_block_of_keys(natural, kind):
    """Up to 64 a native kernel of its own serves, past it the tiles; rows in several chunks."""
    p = problem(1131, 723, dim=9, support=catalogue(1131, 723)[kind], scale=0.5)
    with serving(natural):
        for k in (1, 7, 64, 65):
            scores, indices = p.gibbs().top(k)
            want_scores, want_indices = reference.top(p.score(), k)
            assert_exact(scores, want_scores, magnitude=20)
            assert torch.equal(indices, want_indices)


def test_top_puts_the_lower_of_two_copies_first(natural):
    query, key = torch.ones(3, 1).double(), torch.tensor([2.0, 3.0, 1.0]).double().repeat(300)[:, None]
    with serving(natural):
        if natural != "native":
            pytest.skip("torch's topk says nothing about ties")
        scores, indices = Gibbs(query, key).top(5)
        assert indices.tolist() == [[1, 4, 7, 10, 13]] * 3
        assert_exact(scores, torch.full((3, 5), 3.0, dtype=torch.float64))


def test_log_prob_of_the_top_is_that_of_its_keys(backend):
    p = problem(9, 31, support=catalogue(9, 31)["mask"])
    with serving(backend):
        found, index = p.gibbs().top_log_prob(3)
        expected = reference.log_probs(p.score()).gather(-1, index.clamp(min=0)).masked_fill(index < 0, -torch.inf)
        assert_exact(found, expected)
        query = p.query.clone().requires_grad_()
        assert gradcheck(lambda x: p.gibbs(query=x).top_log_prob(2)[0][:4].exp(), query)


def test_the_same_call_twice_is_bitwise_equal(natural):
    p = problem(67, 211, batch=(3,), support=catalogue(67, 211)["causal"])
    with serving(natural):
        first, second = ([*p.gibbs().stats(), p.gibbs().expectation(p.value)] for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
