"""State: a commutative monoid whose elements can be read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import partita
from partita import State
from partita.engine.state import raw_gradients
from partita.errors import PartitaError
from tests import reference
from tests.conformance.serving import serving
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
    cut = min(cut, p.n_key)
    a, b = (
        partita.Gibbs(p.query, p.key[..., part, :], scale=p.scale, softcap=p.softcap).state(p.value[..., part, :])
        for part in (slice(0, cut), slice(cut, p.n_key))
    )
    assert_same_state(a.merge(b), b.merge(a))


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
    assert_same_statistics(partita.merge(some).stats(), some.stats())


def test_merging_far_apart_peaks_does_not_overflow():
    query = torch.ones(1, 1, dtype=torch.float64)
    low, high = (partita.Gibbs(query, torch.full((3, 1), x).double()).state() for x in (-1e6, 1e6))
    stats = low.merge(high).stats()
    assert float(stats.log_partition) == pytest.approx(1e6 + math.log(3), rel=1e-15)
    assert float(stats.entropy) == pytest.approx(math.log(3), abs=1e-12)
    assert float(stats.visible) == 6


def test_merge_refuses_states_that_do_not_belong_together():
    with_value, without = state_of(5), problem(7, 5).gibbs().state()
    with pytest.raises(PartitaError):
        partita.merge(with_value, without)
    with pytest.raises(PartitaError):
        partita.merge(with_value, problem(6, 5).gibbs().state(problem(6, 5).value))
    with pytest.raises(PartitaError):
        partita.merge()


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


READS = ("log_partition", "entropy", "mean_score", "score_variance")
GAPS = (0, 1, 10, 80, 86, 88, 95, 103, 104, 150, 700, 745, 800, 1000)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("read", [*READS, "expectation"])
def test_gradients_through_merge_are_right_at_any_gap(read: str, dtype: torch.dtype) -> None:
    """Where the sums of the lower state underflow, its gradient is 0, and that of the higher one is its own.

    Within a state scores differ by less than 1. A gradient is a sum of 8 terms e^-g (g + 1)^2 <= 1.5, so below 12, each
    made by some 20 roundings; it is rounded once more to the dtype of the scores.
    """
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    near = torch.rand(5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64).sub(1)
    value = torch.rand(8, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for gap in GAPS:
        given = torch.cat([near, near.flip(0) - gap], -1).to(dtype)
        s = given.double().clone().requires_grad_()
        p, log_p = s.softmax(-1), s.log_softmax(-1)
        mean = (p * s).sum(-1)
        dense = {
            "log_partition": s.logsumexp(-1),
            "entropy": -(p * log_p).sum(-1),
            "mean_score": mean,
            "score_variance": (p * (s - mean[:, None]) ** 2).sum(-1),
            "expectation": p @ value,
        }
        dense[read].sum().backward()
        for order in ((0, 1), (1, 0)):
            scores = given.clone().requires_grad_()
            halves = scores[:, :4], scores[:, 4:]
            states = [State.of(halves[i], value[4 * i : 4 * i + 4]) for i in order]
            getattr(partita.merge(*states), read)().sum().backward()
            off = (scores.grad.double() - s.grad).abs()
            allowed = 20 * 12 * eps + torch.finfo(dtype).eps * s.grad.abs()
            assert (off <= allowed).all(), (gap, order, off.max())


@pytest.mark.parametrize("read", READS)
def test_gradients_of_blocks_of_keys_are_right_at_any_gap(read: str, backend: str) -> None:
    """Through the states of a pass, as `blockwise_attention` merges them; float32, whose exponentials end at e^-103.

    Scores are numbers of a key times 1, exact. A gradient is a sum of 8 terms below 12 made by some 20 roundings each,
    as above; the pass adds those of its own sums.
    """
    near = torch.rand(4, 1, generator=torch.Generator().manual_seed(3)).sub(1)
    query, value = torch.ones(3, 1), torch.rand(8, 2, generator=torch.Generator().manual_seed(4))
    for gap in GAPS:
        given = torch.cat([near, near.flip(0) - gap])
        wide = given.double().requires_grad_()
        whole = getattr(State.of(wide.mT.expand(3, 8)), read)()
        whole.sum().backward()
        key = given.clone().requires_grad_()
        with serving(backend):
            _, stats = partita.attn.blockwise_attention(query, key, value, 4, scale=1.0, return_stats=True)
            getattr(stats, read).sum().backward()
        off = (key.grad.double() - wide.grad).abs().max().item()
        assert off <= 3 * 40 * 12 * torch.finfo(torch.float32).eps, (gap, off)


def test_adding_in_place_is_merging():
    """With the peak kept in float64 and the sums in their own dtype, as a pass over many blocks does it."""
    parts = [state_of(n, seed) for seed, n in enumerate((0, 3, 0, 5, 7))]
    merged = partita.merge(*parts)
    total = State(*(getattr(state_of(0), name).clone() for name in FIELDS))
    for part in parts:
        total.add_(part)
    assert_same_state(total, merged)
    small = [State(*(getattr(part, name).float() for name in FIELDS)) for part in parts]
    total = State(small[0].peak.double(), *(getattr(small[0], name).clone() for name in FIELDS[1:]))
    for part in small:
        total.add_(part)
    assert total.peak.dtype == torch.float64
    assert total.mass.dtype == total.moment.dtype == torch.float32
    for name in FIELDS:
        torch.testing.assert_close(getattr(total, name).double(), getattr(merged, name), rtol=1e-5, atol=1e-5)


def test_raw_gradients_pull_everything_back_to_the_raw_sums():
    """Against autograd of the definitions; gradients of empty rows are 0 whatever comes from above."""
    new = torch.Generator().manual_seed(0)
    mass = 1 + torch.rand(6, generator=new, dtype=torch.float64)
    first = -torch.rand(6, generator=new, dtype=torch.float64)
    second, moment = (torch.rand(*s, generator=new, dtype=torch.float64) for s in ((6,), (6, 3)))
    raw = [x.requires_grad_() for x in (mass, first, second, moment)]

    def read(mass, first, second, moment):
        spread, mean = second - first**2 / mass, moment / mass[:, None]
        statistics = torch.stack([mass.log(), mass.log() - first / mass, first / mass, spread / mass, mass * 0])
        return mass, first, spread, mean, statistics

    def pull(*given):
        sums, above = read(*given[:4]), given[4:]
        names = ("mass", "first", "spread", "mean", "stats")
        return raw_gradients(*sums[:4], **{f"g_{n}": g for n, g in zip(names, above, strict=True)})[:4]

    out = read(*raw)
    above = [torch.rand(x.shape, generator=new, dtype=torch.float64, requires_grad=True) for x in out]
    expected = torch.autograd.grad(out, raw, above)
    for found, truth in zip(pull(*raw, *above), expected, strict=True):
        assert_exact(found, truth)
    assert gradcheck(pull, (*raw, *above))
    zero = torch.zeros(6, dtype=torch.float64)
    blank = (zero, zero, zero, zero[:, None].expand(6, 3))
    for found in pull(*blank, *above):
        assert (found == 0).all()
    only = raw_gradients(mass)
    assert (only.mass == 0).all()
    assert only[1:] == (None,) * 4
