"""Scale against length, the laws: M-SCL-11..15."""

from __future__ import annotations

import math
from math import e, log, sqrt

import pytest
import torch
from draws import F64, close, gen, randn, vector

import partita
from partita.errors import PartitaError, ValueRangeError
from partita_theory import sharpness as sh
from partita_theory.information import entropy, score_cumulants
from partita_theory.sharpness import (
    critical_mass_bound,
    critical_scale,
    critical_scale_from_gaps,
    gaussian_critical_scale,
)

# ---- Gaussian scores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "count", "printed"),
    [
        (256, 2000, [0.125, 0.493, 1.070, 1.762, 2.425, 2.993, 3.755, 4.201]),
        (4096, 300, [0.125, 0.499, 1.120, 1.969, 2.933, 3.863, 5.318, 6.226]),
        (65536, 40, [0.125, 0.500, 1.126, 1.993, 3.055, 4.343, 6.494, 8.015]),
    ],
)
def test_gap_to_log_n_of_gaussian_scores(n, count, printed):
    """M-SCL-12 (W (35), (41)): the printed table by sampling; x^2 / 2 below the transition, not above."""
    g = randn(count, n, dtype=torch.float32)
    for x, value in zip((0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0), printed, strict=False):
        gap = log(n) - entropy(x * g)
        error = float(gap.std() / count**0.5)
        assert gap.mean() == pytest.approx(value, abs=5 * error + 2e-3)
        if x < 0.45 * sqrt(2 * log(n)):
            assert gap.mean() == pytest.approx(log(n) - float(sh.gaussian_entropy(n, x)), rel=0.05)


def test_gaussian_entropy_limits():
    """M-SCL-12: the mean of finite rows at n = 256, the warning, the transition."""
    assert log(256) - sh.gaussian_entropy(256, 1.0, finite=True) == pytest.approx(0.4930, abs=1e-4)
    assert log(256) - entropy(randn(20000, 256)).mean() == pytest.approx(0.4931, abs=0.003)
    with pytest.warns(UserWarning, match="overstates"):
        sh.gaussian_entropy(256, 2.1)
    for n, top in ((2**8, 3.33), (2**12, 4.08), (2**16, 4.71), (2**20, 5.27)):
        assert sh.condensation_sharpness(n) == pytest.approx(top, abs=5e-3)


@pytest.mark.parametrize(
    ("n", "x"), [(2, 3.0), (10, 0.5), (128, 2.2), (4096, 2.88), (4096, 6.0), (300, 50.0), (65536, 3.33)]
)
def test_the_mean_entropy_of_finite_gaussian_rows(n, x):
    """M-SCL-12, M-SCL-16: exact below, at and beyond the transition, where the law and its first correction fail."""
    exact = sh.gaussian_entropy(n, x, finite=True)
    h = entropy(x * randn(max(100, 2_000_000 // n), n, dtype=torch.float32))
    assert h.mean() == pytest.approx(float(exact), abs=4 * float(h.std()) / len(h) ** 0.5 + 1e-4)
    assert 0 < exact < log(n)


def test_the_mean_entropy_takes_tensors_and_flat_rows():
    """M-SCL-12: lengths and sharpness broadcast; equal scores, one key; below log 128 where the expansion gave 6.72."""
    n, x = vector(64.0, 128.0), vector(0.0, 1.0, 2.2)[:, None]
    found = sh.gaussian_entropy(n, x, finite=True)
    assert found.shape == (3, 2) and found[2, 1] < log(128)
    close(found[0], n.log())
    assert (found[1:].diff(dim=0) < 0).all() and sh.gaussian_entropy(1, 5.0, finite=True) == 0
    with pytest.raises(ValueRangeError, match="not negative"):
        sh.gaussian_entropy(8, -1.0, finite=True)


def test_gaussian_mean_and_log_partition():
    """M-SCL-12 (W (37), N (39)): E_p[s] = mu + scale sigma^2, neither the mean nor the maximum; log Z likewise."""
    s = 0.3 + 1.2 * randn(200, 10000)
    scale = 0.8
    mean = score_cumulants(s, scale).mean.mean()
    assert mean == pytest.approx(float(sh.gaussian_mean_score(scale, 0.3, 1.2)), abs=0.02)
    assert s.mean() + 0.5 < mean < s.amax(-1).mean() - 1
    log_z = torch.logsumexp(scale * s, -1).mean()
    assert log_z == pytest.approx(float(sh.gaussian_log_partition(10000, scale * 1.2, scale * 0.3)), abs=0.02)


# ---- any score law ---------------------------------------------------------------------------------------------------


def test_cumulant_functions_are_log_moments():
    """M-SCL-11: each K against quadrature or the definition, and its slope."""
    t = torch.tensor(0.7, dtype=F64)
    x = torch.linspace(0, 1, 400_001, dtype=F64)
    assert sh.uniform_cumulant(0, 1)(t) == pytest.approx(torch.trapezoid(torch.exp(t * x), x).log().item(), abs=1e-9)
    y = torch.linspace(-80, 80, 800_001, dtype=F64)
    density = torch.exp(-y.abs()) / 2
    assert sh.laplace_cumulant(1.0)(t) == pytest.approx(
        torch.trapezoid(density * torch.exp(t * y), y).log().item(), abs=1e-6
    )
    assert sh.bernoulli_cumulant(0.3, 2.0)(t) == pytest.approx(log(0.7 + 0.3 * e**1.4))
    assert sh.uniform_cumulant(-1, 3)(torch.tensor(900.0, dtype=F64)).isfinite()
    with pytest.raises(ValueRangeError, match="infinite for Laplace"):
        sh.laplace_cumulant(1.0)(torch.tensor(1.0))


def test_general_entropy_law():
    """M-SCL-11: printed values by sampling n = 2e5 scores of three laws."""
    n = 200_000
    u = 2 * torch.rand(n, generator=gen(), dtype=F64) - 1
    for scale, printed in ((5.0, 10.903), (50.0, 8.601), (500.0, 6.298)):
        p = sh.predicted_entropy(n, scale, sh.uniform_cumulant(-1, 1))
        assert p.entropy == pytest.approx(printed, abs=2e-3)
        # about 2 n / (2 scale) keys carry the row; the entropy of m of them scatters by about 1 / sqrt(m), 5 of these
        assert entropy(scale * u) == pytest.approx(printed, abs=5 * (scale / n) ** 0.5 + 2e-3)
        assert not p.condensed
    lap = sh.predicted_entropy(n, 0.5, sh.laplace_cumulant(1.0)).entropy
    assert lap == pytest.approx(11.827, abs=2e-3)
    v = torch.rand(n, generator=gen(1), dtype=F64) - 0.5
    # at scale 0.4, where e^{2 scale s} still has a mean: at 1/2 it has none, and no error could be given
    milder = sh.predicted_entropy(n, 0.4, sh.laplace_cumulant(1.0)).entropy
    assert entropy(0.4 * -v.sign() * torch.log1p(-2 * v.abs())) == pytest.approx(milder.item(), abs=0.03)
    ber = sh.predicted_entropy(n, 8.0, sh.bernoulli_cumulant(0.01)).entropy
    assert ber == pytest.approx(7.891, abs=2e-3)
    # 2000 keys on top, give or take 45: 0.022 in the entropy, 5 of these
    assert entropy(8.0 * (u < -0.98)) == pytest.approx(ber.item(), abs=0.11)


def test_prediction_knows_where_it_ends():
    """M-SCL-11 (C (28), (29)): past condensation log Z is not log n + K; Gaussian scores, n = 1e5, scale 6."""
    p = sh.predicted_entropy(1e5, 6.0, sh.gaussian_cumulant())
    assert p.condensed
    assert p.log_partition == pytest.approx(29.51, abs=0.01)
    log_z = torch.logsumexp(6 * randn(20, 100_000), -1).mean()
    assert log_z < p.log_partition - 1
    assert not sh.predicted_entropy(1e5, 4.0, sh.gaussian_cumulant()).condensed
    at = sh.condensation_sharpness(1e5)
    assert sh.predicted_entropy(1e5, at, sh.gaussian_cumulant()).entropy.abs() < 1e-9


def test_laplace_method():
    """M-SCL-11 (W (30), (31), P53): exact for a normal density, edge formula for a uniform one."""
    right = sh.laplace_method_interior(2.0, 2.0, -2.0 - 0.5 * log(2 * torch.pi), -1.0)
    assert right == pytest.approx(2.0)
    exact = sh.uniform_cumulant(-1, 1)(torch.tensor(8.0, dtype=F64))
    assert sh.laplace_method_edge(8.0, 1.0, 2.0) == pytest.approx(exact.item(), abs=1e-5)
    with pytest.raises(ValueRangeError, match="curvature is negative"):
        sh.laplace_method_interior(1.0, 0.0, 0.0, 1.0)


# ---- condensed -------------------------------------------------------------------------------------------------------


def test_poisson_dirichlet_entropy():
    """M-SCL-13 (C (32), (33), (67)): the mean entropy of sampled Poisson-Dirichlet weights, and its inverse."""
    for m in (0.3, 0.6):
        # Points of a Poisson process of intensity x^{-m-1}: x_i = (E_1 + .. + E_i)^{-1/m}, normalised.
        arrival = torch.empty(2000, 2000, dtype=F64).exponential_(generator=gen(int(10 * m))).cumsum(-1)
        z = -arrival.log() / m
        h = entropy(z)
        tail = 0.02 if m < 0.5 else 0.05  # cut off at 2000 points
        assert h.mean() == pytest.approx(float(sh.condensed_entropy(m)), abs=5 * float(h.std()) / 2000**0.5 + tail)
    c = vector(0.1, 1.0, 4.0, 8.0)
    close(sh.condensed_entropy(sh.condensed_index(c)), c)
    for target, printed in ((1, 2.439), (2, 1.661), (4, 1.301), (6, 1.191), (8, 1.139)):
        assert 1 / sh.condensed_index(target) == pytest.approx(printed, abs=6e-4)
    with pytest.raises(ValueRangeError, match=r"\[0, 1\)"):
        sh.condensed_entropy(1.0)


def test_frozen_rows():
    """M-SCL-13: n = 2^14 at three times the transition: 0.636 measured, 0.620 with b_n; b_n solves its equation."""
    n = 2**14
    x = 3 * sh.condensation_sharpness(n)
    h = entropy(float(x) * randn(600, n, dtype=torch.float32))
    assert h.mean() == pytest.approx(0.636, abs=5 * float(h.std()) / 600**0.5)
    assert sh.condensed_entropy(sh.frozen_index(n, x)) == pytest.approx(0.620, abs=2e-3)
    b = sh.extreme_location(4096)
    assert 4096 * torch.exp(-(b**2) / 2) / sqrt(2 * torch.pi) / b == pytest.approx(1)
    assert sh.frozen_index(n, x, finite=False) == pytest.approx(1 / 3)
    with pytest.raises(ValueRangeError, match="below the transition"):
        sh.frozen_index(n, 1.0)
    at = entropy(float(sh.condensation_sharpness(4096)) * randn(400, 4096, seed=3)).mean()
    assert at / sh.condensation_sharpness(4096) == pytest.approx(0.71, abs=0.06)  # not 0 at the transition


# ---- what keeps entropy constant -------------------------------------------------------------------------------------


def test_gaussian_sharpness_for_a_target():
    """M-SCL-14 (W (42), C (19)): sqrt(2 (log n - C)) undershoots the exact sharpness as printed; root grows slower."""
    for c, printed, excess in ((4.0, 3.54, 0.17), (6.0, 2.50, 0.06), (8.0, 1.42, 0.012)):
        h = entropy(printed * randn(300, 2**13, dtype=torch.float32))
        assert h.mean() == pytest.approx(c, abs=5 * float(h.std()) / 300**0.5 + 0.01)  # mean entropy is the target
        assert -0.003 < printed / sh.gaussian_sharpness(2**13, c) - 1 < excess
    for c, given in ((4.0, 4.53), (2.0, 3.53)):  # at 4096 keys, where log(n) / 2 is 4.16
        sharp = float(sh.gaussian_sharpness(4096, c))
        h = entropy(sharp * randn(1000, 4096, dtype=torch.float32))
        assert h.mean() == pytest.approx(given, abs=5 * float(h.std()) / 1000**0.5)
        assert sh.gaussian_entropy(4096, sharp, finite=True) == pytest.approx(given, abs=5e-3)
    assert sh.gaussian_sharpness(100, 9.0) == 0
    n = vector(1e30, 1e80)
    assert sh.growth_exponent(n, sh.gaussian_sharpness(n, 2.0)) == pytest.approx(0.5, abs=0.02)
    ratio = sh.frozen_sharpness(n, 2.0) / (2 * n.log()).sqrt()
    close(ratio, torch.full((2,), 1.661, dtype=F64), atol=1e-3, rtol=0)


def test_growth_depends_on_the_tail():
    """M-SCL-15 (C (18), (19), W (32)): margin, uniform, exponential, spherical, tied; printed scales for H = 2."""
    for n, printed in ((2**8, 6.60), (2**16, 12.88)):
        assert sh.margin_scale(n, 2.0) == pytest.approx(printed, abs=5e-3)
        z = torch.zeros(n, dtype=F64)
        z[0] = float(sh.margin_scale(n, 2.0))
        assert entropy(z) == pytest.approx(2.0)
    for n, rest in ((1e2, 0.34), (1e4, 0.24), (1e12, 0.12)):
        exact, simple = sh.margin_scale(n, 1.0), sh.margin_scale(n, 1.0, exact=False)
        assert exact - simple == pytest.approx(rest, abs=0.011)
    half = torch.zeros(50, dtype=F64)
    half[0] = float(sh.margin_half_scale(50))
    assert torch.softmax(half, -1)[0] == pytest.approx(0.5)
    u = torch.rand(20, 4096, generator=gen(), dtype=F64)
    scale = sh.uniform_scale(4096, 4.0)
    assert entropy(float(scale) * u).mean() == pytest.approx(4.0, abs=0.1)
    assert sh.uniform_entropy(4096, scale) == pytest.approx(4.0)
    assert sh.growth_exponent(
        torch.tensor([2.0**8, 2.0**16]), sh.uniform_scale(torch.tensor([2.0**8, 2.0**16]), 2.0), of_log=False
    ) == pytest.approx(1)
    solved = []
    for n in (2**8, 2**14):
        v = torch.empty(40, n, dtype=F64).exponential_(generator=gen(n))
        solved.append(float(sh.entropy_scale(v, 2.0).scale.mean()))
    assert solved[1] / solved[0] == pytest.approx(1, abs=0.25)  # no growth
    assert solved[1] == pytest.approx(float(sh.exponential_scale(2.0)), rel=0.15)
    tied = torch.zeros(1000, dtype=F64)
    tied[:20] = 1
    assert entropy(1e6 * tied) == pytest.approx(float(sh.tied_entropy_floor(1000, 0.02)))
    assert not sh.entropy_scale(tied, 2.0).converged


def test_spherical_scores():
    """M-SCL-15: s = d cos(angle), d = 16, n = 2^17: the solved scale gives an entropy near the target 9.427."""
    d, n = 16, 2**17
    keys = torch.nn.functional.normalize(torch.randn(n, d, generator=gen()), dim=-1)
    s = d * keys[:, 0]
    scale = float(sh.spherical_scale(n, 9.427, d))
    # the law is 0.05 too high at this length, and one row scatters by 0.03: 5 of these
    assert entropy(scale * s) == pytest.approx(9.427, abs=0.2)
    small = sh.spherical_scale(1e4, 9.0, 1e6)
    assert small == pytest.approx(sqrt(2 * (log(1e4) - 9.0) / 1e6), rel=1e-4)


def rows(kind: str, count: int, n: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(count, n, generator=source, dtype=F64)
    if kind == "exponential":
        return torch.empty(count, n, dtype=F64).exponential_(generator=source)
    return torch.rand(count, n, generator=source, dtype=F64)


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
    count = torch.arange(2, 301, dtype=F64)
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
        margin = torch.zeros(n, dtype=F64)
        margin[3] = 0.5
        assert critical_scale(margin).item() == pytest.approx(math.log(n) / 0.5)
    assert gaussian_critical_scale(1e12, 2.0).item() == pytest.approx(math.sqrt(2 * math.log(1e12)) / 2, rel=0.05)


def test_edges_tell_it_from_below_as_gibbs_streams_them():
    """M-COL-5, M-COL-6: fine edges give it almost, any edges never more."""
    query, key = rows("gaussian", 7, 4), rows("gaussian", 90, 4, 1)
    gibbs = partita.Gibbs(query, key, support=partita.support.causal("bottom-right"))
    scores = torch.where(partita.support.causal("bottom-right").dense(7, 90), query @ key.mT, -math.inf)
    whole = critical_scale(scores)
    edges = torch.arange(1, 4000, dtype=F64) / 200
    found = critical_scale_from_gaps(edges, gibbs.gaps(edges))
    assert (found <= whole * (1 + 1e-9)).all()
    gap = math.log(2) / whole  # a gap is at least this; rounding up to the next edge costs 1/200 of it
    assert (found >= whole * gap / (gap + 1 / 200) * (1 - 1e-9)).all()


def test_edges_must_be_positive():
    with pytest.raises(PartitaError, match="edges"):
        critical_scale_from_gaps(torch.tensor([0.0]), torch.tensor([1]))
