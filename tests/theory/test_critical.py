"""The critical scale of a row: its bounds for any scores, and the laws of Gaussian, exponential and bounded ones."""

from __future__ import annotations

import math

import pytest
import torch

import partita
from partita import scale
from partita.errors import PartitaError, ShapeError, ValueRangeError
from partita.theory.sharpness import (
    critical_mass_bound,
    critical_scale,
    critical_scale_from_gaps,
    gaussian_critical_scale,
)


def rows(kind: str, count: int, n: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(count, n, generator=source, dtype=torch.float64)
    if kind == "exponential":
        return torch.empty(count, n, dtype=torch.float64).exponential_(generator=source)
    return torch.rand(count, n, generator=source, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["gaussian", "exponential", "bounded"])
def test_any_row_obeys_the_bounds_on_both_sides(kind):
    """M-COL-6: mass <= zeta(ratio) above the critical scale, mass >= N^(1 - ratio) below it."""
    scores = rows(kind, 50, 300)
    critical = critical_scale(scores)
    gaps = scores.amax(-1, keepdim=True) - scores
    for ratio in (1.05, 1.5, 3.0):
        mass = torch.exp(-ratio * critical[:, None] * gaps).sum(-1)
        assert (mass <= critical_mass_bound(ratio) * (1 + 1e-12)).all()
    ordered = gaps.sort(-1).values[:, 1:]
    count = torch.arange(2, 301, dtype=torch.float64)
    at = (count.log() / ordered).argmax(-1)
    for ratio in (0.3, 0.7, 0.99):
        mass = torch.exp(-ratio * critical[:, None] * gaps).sum(-1)
        assert (mass >= count[at] ** (1 - ratio) * (1 - 1e-12)).all()
    assert critical_mass_bound(1.0).item() == critical_mass_bound(0.5).item() == math.inf


def medians(kind: str, n: int, count: int = 2000) -> float:
    return critical_scale(rows(kind, count, n, n)).median().item()


def test_the_laws_of_growth():
    """M-COL-6: exponential tails do not grow, Gaussian scores as their rate, bounded ones as n; a margin as log n.

    A median of 2,000 rows is known to about 4 % (its distribution has a density near 0.5 per unit of its median).
    """
    flat = medians("exponential", 256)
    assert medians("exponential", 4096) == pytest.approx(flat, rel=0.15)
    for n in (256, 4096):
        assert medians("gaussian", n) / gaussian_critical_scale(n).item() == pytest.approx(flat, rel=0.2)
    assert medians("bounded", 4096) / medians("bounded", 256) == pytest.approx(16.0, rel=0.2)
    for n in (10, 1000):
        margin = torch.zeros(n, dtype=torch.float64)
        margin[3] = 0.5
        assert critical_scale(margin).item() == pytest.approx(math.log(n) / 0.5)
    assert gaussian_critical_scale(1e12, 2.0).item() == pytest.approx(math.sqrt(2 * math.log(1e12)) / 2, rel=0.05)


def test_edges_tell_it_from_below_as_gibbs_streams_them():
    """M-COL-5, M-COL-6: fine edges give it almost, any edges never more."""
    query, key = rows("gaussian", 7, 4), rows("gaussian", 90, 4, 1)
    gibbs = partita.Gibbs(query, key, support=partita.support.causal("bottom-right"))
    scores = torch.where(partita.support.causal("bottom-right").dense(7, 90), query @ key.mT, -math.inf)
    whole = critical_scale(scores)
    edges = torch.arange(1, 4000, dtype=torch.float64) / 200
    found = critical_scale_from_gaps(edges, gibbs.gaps(edges))
    assert (found <= whole * (1 + 1e-9)).all()
    gap = math.log(2) / whole  # a gap is at least this; rounding up to the next edge costs 1/200 of it
    assert (found >= whole * gap / (gap + 1 / 200) * (1 - 1e-9)).all()


def test_edge_cases():
    inf = math.inf
    assert critical_scale(torch.tensor([1.0, 1.0, 0.0])).item() == inf  # a tie never parts
    assert critical_scale(torch.tensor([1.0, 1.0, 0.0]), least=3).item() == pytest.approx(math.log(3))
    assert critical_scale(torch.tensor([[1.0], [2.0]])).tolist() == [0.0, 0.0]
    assert critical_scale(torch.tensor([3.0, -inf, -inf])).item() == 0.0
    assert critical_scale(torch.tensor([-inf, -inf])).item() == 0.0
    with pytest.raises(PartitaError, match="least"):
        critical_scale(torch.zeros(3), least=1)
    with pytest.raises(PartitaError, match="edges"):
        critical_scale_from_gaps(torch.tensor([0.0]), torch.tensor([1]))


def test_the_policy_grows_as_it_was_fitted():
    lengths = [64, 256, 1024, 4096]
    critical = [[3 * math.log(n) ** 0.5, 0.1 * math.log(n), 7.0] for n in lengths]
    policy = scale.CriticalScale.fit(64, lengths, critical)
    assert policy.exponent == pytest.approx((0.5, 1.0, 0.0), abs=1e-9)
    n = torch.tensor([64.0, 4096.0], dtype=torch.float64)
    found = policy(n, 16)  # (heads, n_query)
    torch.testing.assert_close(found[0], scale.SqrtLogLength(64)(n, 16))
    torch.testing.assert_close(found[1], scale.LogLength(64)(n, 16))
    torch.testing.assert_close(found[2], scale.InverseSqrt()(n, 16))
    q, k, v = (torch.randn(2, 3, 5, 16) for _ in range(3))
    assert partita.attention(q, k, v, is_causal=True, scale=policy).shape == v.shape
    with pytest.raises(ShapeError, match="3 heads"):
        policy(torch.ones(2, 5), 16)
    with pytest.raises(ShapeError, match="two lengths"):
        scale.CriticalScale.fit(64, [64], [[1.0]])
    with pytest.raises(ValueRangeError, match="positive and finite"):
        scale.CriticalScale.fit(64, [64, 128], [[1.0], [math.inf]])
    with pytest.raises(ValueRangeError, match="exponent"):
        scale.CriticalScale(64, math.nan)
