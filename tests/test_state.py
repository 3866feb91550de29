"""State: a commutative monoid whose elements can be read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import partita
from partita import State, reference
from partita.errors import PartitaError
from tests.strategies import INF, problem, problems
from tests.tolerances import assert_exact, assert_same_statistics

FIELDS = ("peak", "mass", "first", "spread", "count", "moment")


def state_of(n_key: int, seed: int = 0):
    p = problem(7, n_key, seed=seed)
    return p.gibbs().state(p.value)


def assert_same_state(a, b) -> None:
    for name in FIELDS:
        assert_exact(getattr(a, name), getattr(b, name), magnitude=100)


def test_fields_are_their_sums():
    """Relative to the peak; spread is about the mean, where a raw second moment would cancel."""
    p = problem(7, 13)
    s, state = p.score(), p.gibbs().state(p.value)
    centred = s - s.amax(-1, keepdim=True)
    assert_exact(state.peak, s.amax(-1))
    assert_exact(state.mass, centred.exp().sum(-1))
    assert_exact(state.first, (centred.exp() * centred).sum(-1))
    mean = (reference.probs(s) * centred).sum(-1, keepdim=True)
    assert_exact(state.spread, (centred.exp() * (centred - mean) ** 2).sum(-1))
    assert_exact(state.moment, centred.exp() @ p.value)
    assert state.count.eq(13).all()


def test_a_state_without_a_value_has_no_moment():
    state = problem(7, 13).gibbs().state()
    assert state.moment is None
    with pytest.raises(PartitaError, match="value"):
        state.expectation()


@given(p=problems(), cut=st.integers(0, 13))
def test_merge_is_commutative(p, cut):
    a, b = halves(p, cut)
    assert_same_state(a.merge(b), b.merge(a))


def halves(p, cut):
    cut = min(cut, p.n_key)
    states = []
    for part in (slice(0, cut), slice(cut, p.n_key)):
        gibbs = partita.Gibbs(p.query, p.key[..., part, :], scale=p.scale, softcap=p.softcap)
        states.append(gibbs.state(p.value[..., part, :]))
    return states


@pytest.mark.parametrize("sizes", [(3, 5, 7), (1, 1, 1), (0, 3, 0)])
def test_merge_is_associative(sizes):
    a, b, c = (state_of(n, seed) for seed, n in enumerate(sizes))
    assert_same_state(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert_same_state(partita.merge(a, b, c), partita.merge(c, partita.merge(b, a)))


def test_the_state_of_no_keys_is_neutral():
    some, none = state_of(5), state_of(0)
    assert (none.peak == -INF).all()
    for name in ("mass", "first", "spread", "count", "moment"):
        assert (getattr(none, name) == 0).all()
    assert_same_state(some.merge(none), some)
    assert_same_state(none.merge(some), some)
    assert_same_state(none.merge(none), none)


def test_merging_far_apart_peaks_does_not_overflow():
    query = torch.ones(1, 1, dtype=torch.float64)
    low, high = (partita.Gibbs(query, torch.full((3, 1), x).double()).state() for x in (-1e6, 1e6))
    stats = low.merge(high).stats()
    assert float(stats.log_partition) == pytest.approx(1e6 + math.log(3), rel=1e-15)
    assert float(stats.entropy) == pytest.approx(math.log(3), abs=1e-12)
    assert float(stats.visible) == 6


def test_one_state_merges_to_itself():
    state = state_of(5)
    assert_same_statistics(partita.merge(state).stats(), state.stats())


def test_merge_refuses_states_that_do_not_belong_together():
    with_value, without = state_of(5), problem(7, 5).gibbs().state()
    with pytest.raises(PartitaError):
        partita.merge(with_value, without)
    with pytest.raises(PartitaError):
        partita.merge(with_value, problem(6, 5).gibbs().state(problem(6, 5).value))
    with pytest.raises(PartitaError):
        partita.merge()


def test_stats_fields_are_the_contract():
    assert partita.Stats._fields == (
        "log_partition",
        "entropy",
        "mean_score",
        "score_variance",
        "max_score",
        "visible",
    )


def test_half_precision_states_merge_in_float32():
    p = problem(7, 12, dtype=torch.bfloat16)
    parts = [partita.Gibbs(p.query, p.key[part]).state(p.value[part]) for part in (slice(0, 5), slice(5, 12))]
    merged = partita.merge(*parts)
    assert all(getattr(merged, name).dtype == torch.float32 for name in FIELDS)
    s = reference.score(p.query, p.key)
    torch.testing.assert_close(merged.stats().entropy.double(), reference.entropy(s), rtol=1e-5, atol=1e-5)


def test_explicit_scores_are_differentiable_twice():
    """State.of is what a caller with scores of his own has; merging changes no derivative."""
    scores = problem(3, 5).score().clone()
    scores[1, 2:4] = -INF
    keep = scores.isfinite()
    inputs = scores[keep].clone().requires_grad_()

    def read(values):
        s = torch.full_like(scores, -INF).masked_scatter(keep, values)
        out = []
        for state in (State.of(s), partita.merge(State.of(s[:, :2]), State.of(s[:, 2:]))):
            out += [state.log_partition(), state.entropy(), state.mean_score(), state.score_variance()]
        return tuple(out)

    assert gradcheck(read, inputs)
    assert gradgradcheck(read, inputs)


def test_explicit_scores_give_the_state_of_the_distribution():
    p = problem(7, 13)
    assert_same_state(State.of(p.score(), p.value), p.gibbs().state(p.value))
