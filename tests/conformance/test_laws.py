"""What is true of every softmax, whatever computes it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import partita
from partita.engine.backends.tiled import tile_shape
from tests import reference
from tests.conformance.serving import serving
from tests.strategies import INF, masked, problems
from tests.tolerances import assert_exact, assert_same_statistics

# Shift, permutation, duplication --------------------------------------------------------------------------------------


@given(p=problems(), shift=st.sampled_from([-300.0, 0.7, 50.0, 1e4]))
def test_a_shift_of_all_scores_moves_log_partition_and_nothing_else(backend, p, shift):
    """M-GIB-2: log Z(s + c) = log Z(s) + c; weights, entropy and variance stay."""
    offset = torch.full((p.n_query, 1), shift, dtype=torch.float64)
    moved = replace(p, bias=offset if p.bias is None else p.bias + offset)
    magnitude = p.magnitude + abs(shift)
    with serving(backend):
        a, b = p.gibbs().stats(), moved.gibbs().stats()
        assert_same_statistics(a, b, magnitude, but=("log_partition", "mean_score", "max_score"))
        seen = a.visible > 0
        for name in ("log_partition", "mean_score", "max_score"):
            assert_exact(getattr(b, name)[seen], getattr(a, name)[seen] + shift, magnitude=magnitude)
        assert_exact(moved.gibbs().expectation(p.value), p.gibbs().expectation(p.value), magnitude=magnitude)
        assert torch.equal(moved.gibbs().target_rank(p.target), p.gibbs().target_rank(p.target))


@given(p=problems(), seed=st.integers(0, 99))
def test_the_order_of_keys_does_not_matter(backend, p, seed):
    order = torch.randperm(p.n_key, generator=torch.Generator().manual_seed(seed))
    visible = torch.ones(p.n_query, p.n_key, dtype=torch.bool) if p.visible is None else p.visible
    support, visible = masked(visible[..., order])
    bias = p.bias if p.bias is None or p.bias.shape[-1] == 1 else p.bias[..., order]
    key, value = p.key[..., order, :], p.value[..., order, :]
    mixed = replace(p, key=key, value=value, bias=bias, support=support, visible=visible)
    where = order.argsort()[p.target]
    with serving(backend):
        assert_same_statistics(mixed.gibbs().stats(), p.gibbs().stats(), p.magnitude)
        assert_exact(mixed.gibbs().expectation(mixed.value), p.gibbs().expectation(p.value), magnitude=p.magnitude)
        assert_exact(mixed.gibbs().nll(where), p.gibbs().nll(p.target), magnitude=p.magnitude)
        assert torch.equal(mixed.gibbs().target_rank(where), p.gibbs().target_rank(p.target))


@given(p=problems(with_support=False), copies=st.integers(2, 4))
def test_copies_of_every_key_add_log_copies(backend, p, copies):
    """log Z and H grow by log(copies); E[v], E[s], Var[s] and max stay; the number of visible keys multiplies."""

    def repeat(x, dim):
        return torch.cat([x] * copies, dim)

    bias = p.bias if p.bias is None or p.bias.shape[-1] == 1 else repeat(p.bias, -1)
    more = replace(p, key=repeat(p.key, -2), value=repeat(p.value, -2), bias=bias)
    with serving(backend):
        a, b = p.gibbs().stats(), more.gibbs().stats()
        assert_same_statistics(a, b, p.magnitude, but=("log_partition", "entropy", "visible"))
        assert torch.equal(b.visible, copies * a.visible)
        grown = math.log(copies) * (a.visible > 0).double()
        assert_exact(b.log_partition, a.log_partition + grown, magnitude=p.magnitude)
        assert_exact(b.entropy, a.entropy + grown, magnitude=p.magnitude)
        assert_exact(more.gibbs().expectation(more.value), p.gibbs().expectation(p.value), magnitude=p.magnitude)


# Tiles and merging ----------------------------------------------------------------------------------------------------


@given(p=problems(), rows=st.integers(1, 12), cols=st.integers(1, 12))
def test_tile_size_changes_nothing(p, rows, cols):
    with serving("dense"):
        whole, mean, nll = p.gibbs().stats(), p.gibbs().expectation(p.value), p.gibbs().nll(p.target)
        rank = p.gibbs().target_rank(p.target)
    with tile_shape(rows, cols), partita.backend("tiled"):
        assert_same_statistics(p.gibbs().stats(), whole, p.magnitude)
        assert_exact(p.gibbs().expectation(p.value), mean, magnitude=p.magnitude)
        assert_exact(p.gibbs().nll(p.target), nll, magnitude=p.magnitude)
        assert torch.equal(p.gibbs().target_rank(p.target), rank)


def parts_of(p, cuts):
    """The same rows over consecutive slices of the keys, as states."""
    edges = [0, *sorted(cuts), p.n_key]
    visible = torch.ones(p.n_query, p.n_key, dtype=torch.bool) if p.visible is None else p.visible
    states = []
    for a, b in itertools.pairwise(edges):
        bias = p.bias if p.bias is None or p.bias.shape[-1] == 1 else p.bias[..., a:b]
        support, _ = masked(visible[..., a:b])
        part = replace(p, key=p.key[..., a:b, :], value=p.value[..., a:b, :], bias=bias, support=support)
        states.append(part.gibbs().state(part.value))
    return states


@st.composite
def split_problems(draw):
    p = draw(problems())
    return p, draw(st.lists(st.integers(0, p.n_key), max_size=4)), draw(st.randoms(use_true_random=False))


@given(case=split_problems())
def test_any_split_of_the_keys_in_any_order_and_grouping_gives_the_same(backend, case):
    """M-GIB-9, empty blocks included: by their states, and by their log partitions alone.

    With P = softmax over blocks of log Z_B, H = H(P) + sum P_B H_B and o = sum P_B o_B.
    """
    p, cuts, random = case
    with serving(backend):
        states = parts_of(p, cuts)
        log_z = torch.stack([state.stats().log_partition for state in states], -1)
        share = reference.probs(log_z)
        inside = torch.stack([state.stats().entropy for state in states], -1)
        outputs = torch.stack([state.expectation() for state in states], -1)
        stats, mean = p.gibbs().stats(), p.gibbs().expectation(p.value)
        assert_exact(stats.log_partition, reference.log_partition(log_z), magnitude=p.magnitude)
        assert_exact(stats.entropy, reference.entropy(log_z) + (share * inside).sum(-1), magnitude=p.magnitude)
        assert_exact(mean, (share[..., None, :] * outputs).sum(-1), magnitude=p.magnitude)
        random.shuffle(states)
        while len(states) > 1:  # any grouping: merge two that are anywhere
            a, b = (states.pop(random.randrange(len(states))) for _ in range(2))
            states.append(partita.merge(a, b))
        assert_same_statistics(states[0].stats(), stats, p.magnitude)
        assert_exact(states[0].expectation(), mean, magnitude=p.magnitude)


# Limits of the scale --------------------------------------------------------------------------------------------------


@given(p=problems(with_bias=False, with_softcap=False, scales=(0.0,)))
def test_scale_zero_is_uniform(backend, p):
    """M-GIB-3, M-ENT-2: H = log n, E[v] is the mean of the visible values."""
    with serving(backend):
        stats, s = p.gibbs().stats(), p.score()
        seen = stats.visible > 0
        assert_exact(stats.entropy[seen], stats.visible[seen].log())
        assert_exact(stats.log_partition[seen], stats.visible[seen].log())
        weight = reference.seen(s).double() / stats.visible.clamp(min=1)[..., None]
        assert_exact(p.gibbs().expectation(p.value), weight @ p.value)


@given(p=problems(with_bias=False, with_softcap=False, scales=(1e7,)))
def test_scale_to_infinity_is_the_best_key(backend, p):
    """M-GIB-3: one-hot at a unique maximum, as soon as scale * gap exceeds log n by far."""
    s = p.score()
    best = s.topk(min(2, s.shape[-1]), -1).values
    clear = (best[..., 0] > -INF) & ((best[..., 0] - best[..., -1] > 1e3) | (reference.visible(s) == 1))
    with serving(backend):
        stats = p.gibbs().stats()
        assert_exact(stats.entropy[clear], torch.zeros_like(stats.entropy[clear]))
        best_value = (reference.probs(s) @ p.value)[clear]
        assert_exact(p.gibbs().expectation(p.value)[clear], best_value)
        assert torch.equal(p.gibbs().max_score()[clear], stats.log_partition[clear])


@pytest.mark.parametrize("ties", [1, 2, 5])
def test_scale_to_infinity_shares_between_ties(backend, ties):
    """M-GIB-3: the limit is uniform on the maximisers, H = log m."""
    key = torch.zeros(13, 1, dtype=torch.float64)
    key[2 : 2 + ties] = 1.0
    with serving(backend):
        stats = partita.Gibbs(torch.ones(1, 1, dtype=torch.float64), key, scale=1e5).stats()
        assert_exact(stats.entropy, torch.tensor([math.log(ties)], dtype=torch.float64))


@given(p=problems(scales=(1e4, 1e6, 1e8)))
def test_scores_of_any_magnitude_stay_exact(backend, p):
    """Scores of 1e4 and far beyond: no overflow, no nan, statistics to the digits that the scores have."""
    s = p.score()
    with serving(backend):
        stats = p.gibbs().stats()
        for name in ("log_partition", "entropy", "mean_score", "max_score"):
            assert_exact(getattr(stats, name), getattr(reference, name)(s), magnitude=p.magnitude)
        assert_exact(stats.score_variance, reference.score_variance(s), magnitude=p.magnitude**2)
        assert_exact(p.gibbs().expectation(p.value), reference.expectation(s, p.value), magnitude=p.magnitude)


# Identities -----------------------------------------------------------------------------------------------------------


@given(p=problems(), seed=st.integers(0, 99))
def test_the_weights_and_their_log_partition(backend, p, seed):
    """M-GIB-1, M-GIB-4: sum 1, 0 where masked; log p_i - log p_j = s_i - s_j whatever else is masked.

    M-GIB-5: max s <= log Z <= max s + log n. M-GIB-6: log Z = <q, s> + H(q) + KL(q || p) for every q; the gap vanishes
    at p.
    """
    s = p.score()
    seen, slack = reference.seen(s), 1e-11 * max(1.0, p.magnitude)
    other = torch.where(seen, torch.randn(s.shape, generator=torch.Generator().manual_seed(seed)).double(), -INF)
    q, log_q = reference.probs(other), reference.log_probs(other)
    with serving(backend):
        stats, prob, log_prob = p.gibbs().stats(), p.gibbs().probs(), p.gibbs().log_prob(p.target)
    rows = stats.visible > 0
    assert (prob[~seen] == 0).all()
    assert_exact(prob.sum(-1), rows.double(), magnitude=p.magnitude)
    own = reference.target_score(s, p.target)
    fine, best = own.isfinite(), stats.max_score - stats.log_partition
    assert_exact((log_prob - best)[fine], (own - reference.max_score(s))[fine], magnitude=p.magnitude)
    gap = -best[rows]
    assert (gap >= -slack).all()
    assert (gap <= stats.visible[rows].log() + slack).all()
    log_p = torch.where(seen, s - stats.log_partition[..., None], 0.0)
    kl = (q * torch.where(seen, log_q - log_p, 0.0)).sum(-1)
    value = (q * torch.where(seen, s, 0.0)).sum(-1) + reference.entropy(other)
    assert_exact((value + kl)[rows], stats.log_partition[rows], magnitude=p.magnitude)
    assert (kl >= -slack).all()
    assert_exact((stats.mean_score + stats.entropy)[rows], stats.log_partition[rows], magnitude=p.magnitude)


@given(p=problems())
def test_entropy_and_width(backend, p):
    """M-ENT-1, M-ENT-2: H = log n - KL(p || uniform), 0 <= H <= log n. M-ENT-5: exp of nats is 2 to the bits.

    M-ENT-4: 1 <= 1 / sum p^2 <= exp(H) <= n. M-ENT-6, without a bias: H >= log n - scale * (max s - mean s), the mean
    over the visible keys.
    """
    with serving(backend):
        stats, width, prob, s = p.gibbs().stats(), p.gibbs().effective_width(), p.gibbs().probs(), p.score()
    rows, log_n = stats.visible > 0, stats.visible.clamp(min=1).log()
    kl = (torch.special.xlogy(prob, prob * stats.visible[..., None])).sum(-1)
    assert_exact(stats.entropy[rows], (log_n - kl)[rows], magnitude=p.magnitude)
    assert (stats.entropy >= 0).all()
    assert (stats.entropy <= log_n + 1e-12).all()
    size = 1 / (prob**2).sum(-1)
    assert (size[rows] >= 1 - 1e-9).all()
    assert (size[rows] <= width[rows] * (1 + 1e-9)).all()
    assert (width[rows] <= stats.visible[rows] * (1 + 1e-9)).all()
    assert_exact(width, 2.0 ** (stats.entropy / math.log(2)))
    mean = torch.where(reference.seen(s), s, 0.0).sum(-1) / stats.visible.clamp(min=1)
    bound = log_n - (stats.max_score - mean)
    assert (stats.entropy[rows] >= bound[rows] - 1e-11 * max(1.0, p.magnitude)).all()
