"""Jacobian, simplex, Fisher metric, smooth maxima: M-DER-1, M-GIB-5, M-GEO-1..5, M-LOSS-6."""

from __future__ import annotations

from math import log, pi

import pytest
import torch
from draws import F64, close, randn, vector
from torch.autograd.functional import jacobian

from partita.errors import ShapeError, ValueRangeError
from partita_theory import geometry as geo
from partita_theory.information import entropy, entropy_of, score_cumulants


def law(*shape, seed=0, scale=1.5):
    return torch.softmax(scale * randn(*shape, seed=seed), -1)


def test_jacobian_and_its_product():
    """M-DER-1 ((5.1.8), P17): against autograd per row; symmetric, PSD, rows summing to 0."""
    z, g = randn(3, 5), randn(3, 5, seed=1)
    for i in range(3):
        p = torch.softmax(z[i], -1)
        close(geo.softmax_jacobian(p), jacobian(lambda t: torch.softmax(t, -1), z[i]))
    p = torch.softmax(z, -1)
    j = geo.softmax_jacobian(p)
    close(geo.softmax_vjp(p, g), (j @ g[..., None]).squeeze(-1))
    assert j.sum(-1).abs().max() < 1e-15
    assert torch.linalg.eigvalsh(j).min() > -1e-15
    close(geo.jacobian_trace(p), torch.einsum("nii->n", j))


def test_jacobian_norms_and_their_suprema():
    """M-DER-1 (P21), M-ROB-11: each norm against random search; 1/2, 1/2, 1/4, 1 at a tie and never above."""
    tie = vector(0.5, 0.5, 0.0)
    close(torch.stack(geo.jacobian_norms(tie)), vector(0.5, 0.5, 0.25, 1.0))
    p = law(2000, 5, scale=3.0)
    norms = geo.jacobian_norms(p)
    for value, top in zip(norms, (0.5, 0.5, 0.25, 1.0), strict=False):
        assert (value <= top + 1e-12).all()
    j = geo.softmax_jacobian(p[:200])
    signs = torch.cartesian_prod(*[vector(-1.0, 1.0)] * 5)
    images = torch.einsum("nab,sb->nsa", j, signs)
    close(images.abs().sum(-1).amax(-1), norms.inf_one[:200])
    close(images.abs().amax((-1, -2)), norms.inf_inf[:200])
    close(j.abs().amax((-1, -2)), norms.one_inf[:200])
    close(torch.linalg.matrix_norm(j, 2), norms.two_two[:200])
    uniform = torch.full((64,), 1 / 64, dtype=F64)  # as bad as a tie under l_inf, the safest under l2 (P32)
    assert geo.subset_norm(uniform) == pytest.approx(1) and geo.jacobian_norms(uniform).two_two == pytest.approx(1 / 64)
    for n in (3, 5, 15):  # an odd number of keys cannot be halved
        assert geo.subset_norm(torch.full((n,), 1 / n, dtype=F64)) == pytest.approx(1 - 1 / n**2)
    long = law(30, scale=0.1)
    assert 0.99 < geo.subset_norm(long) <= 1
    assert geo.subset_norm(torch.ones(2, 1, dtype=F64)).tolist() == [0.0, 0.0]  # one key cannot be split


def test_smooth_maximum_and_its_bounds():
    """M-GIB-5 (C (53)): max <= smooth max <= max + log n / scale; far from max when the lead is below log n."""
    s = 3 * randn(500, 8)
    for scale in (0.1, 1.0, 20.0):
        low, high = geo.smooth_max_bounds(s, scale)
        value = geo.smooth_max(s, scale)
        assert (value >= low - 1e-12).all()
        assert (value <= high + 1e-12).all()
        mean = geo.smooth_mean_max(s, scale)
        assert (mean >= s.mean(-1) - 1e-12).all()
        assert (mean <= s.amax(-1) + 1e-12).all()
    assert (geo.smooth_max(s, 1.0) > s.amax(-1)).all()
    equal = torch.full((8,), 2.0, dtype=F64)
    assert geo.smooth_max(equal, 4.0) == pytest.approx(float(geo.smooth_max_bounds(equal, 4.0).upper))
    assert geo.smooth_mean_max(randn(9), 1e-9) == pytest.approx(float(randn(9).mean()), abs=1e-6)
    with pytest.raises(ValueRangeError, match="scale > 0"):
        geo.smooth_max(s, 0.0)


def test_simplex_membership_and_pictures():
    """M-GEO-1: softmax lies inside, tangents sum to 0, the triangle is an isometry up to a factor."""
    p = law(50, 4)
    assert geo.is_distribution(p).all()
    assert not geo.is_distribution(p + 1e-3).any()
    assert not geo.is_distribution(torch.tensor([torch.nan, 1.0]))
    assert geo.tangent_projection(randn(7, 4)).sum(-1).abs().max() < 1e-14
    points = geo.simplex_grid(6)
    assert len(points) == 28
    assert geo.is_distribution(points).all()
    flat = torch.pdist(geo.triangle_coordinates(points)) / torch.pdist(points)
    close(flat, torch.full_like(flat, 0.5**0.5))
    with pytest.raises(ShapeError, match="three weights"):
        geo.triangle_coordinates(p)


def test_loss_profiles_on_the_simplex():
    """M-LOSS-6 (P18): squared error in [0, 2] with slope at most 4; cross entropy unbounded; symmetric or not."""
    p = torch.linspace(0.01, 0.99, 50, dtype=F64, requires_grad=True)
    for profile in (geo.squared_error_profile, geo.cross_entropy_profile):
        value, slope = profile(p)
        (auto,) = torch.autograd.grad(value.sum(), p)
        close(slope, auto)
    q = vector(0.0, 0.25, 0.5, 0.75, 1.0)
    assert geo.squared_error_profile(q)[0].flip(0).tolist() == [0.0, 0.125, 0.5, 1.125, 2.0]
    assert geo.squared_error_profile(q)[1].abs().max() == 4
    assert geo.cross_entropy_profile(torch.tensor(1e-9))[1] < -1e8
    a, b = law(2, 3)
    assert geo.kl(a, b) != pytest.approx(float(geo.kl(b, a)), rel=1e-3)
    target = torch.tensor([1.0, 0.0, 0.0])
    xy, height = geo.loss_surface(lambda p, y: geo.kl(y.expand_as(p), p), target, steps=12)
    assert len(xy) == len(height) == 55
    assert xy[height.argmin()][0] < 0.15  # lowest near the corner of the target


def test_divergences():
    """M-GEO-2: KL against torch, the Bregman form, the local form, infinity, Jensen-Shannon."""
    z, w = randn(5), randn(5, seed=1)
    p, q = torch.softmax(z, -1), torch.softmax(w, -1)
    assert geo.kl(p, q) == pytest.approx(float(torch.nn.functional.kl_div(q.log(), p, reduction="sum")))
    bregman = torch.logsumexp(w, -1) - torch.logsumexp(z, -1) - p @ (w - z)
    assert geo.gibbs_kl(z, w) == pytest.approx(float(bregman), abs=1e-14)
    assert geo.gibbs_kl(z, w) == pytest.approx(float(geo.kl(p, q)), abs=1e-14)
    d = 1e-4 * randn(5, seed=2)
    assert geo.gibbs_kl(z, z + d) == pytest.approx(float(d @ geo.softmax_jacobian(p) @ d / 2), rel=1e-3)
    step = 1e-3
    assert geo.gibbs_kl(z, (1 + step) * z) == pytest.approx(float(geo.kl_scale_expansion(z, 1.0, step)), rel=5e-3)
    assert geo.kl_scale_expansion(z, 1.0, step) == pytest.approx(float(score_cumulants(z).variance) * step**2 / 2)
    assert geo.kl(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])).isinf()
    assert geo.kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])).isfinite()
    laws = torch.stack([p, q, p])
    mean = laws.mean(0)
    assert geo.jensen_shannon(laws) == pytest.approx(float(torch.stack([geo.kl(x, mean) for x in laws]).mean()))
    assert geo.jensen_shannon(torch.eye(4)) == pytest.approx(log(4))
    with pytest.raises(ValueRangeError, match="axis of the laws"):
        geo.jensen_shannon(laws, dim=-1)


def test_fisher_metric_in_its_coordinates():
    """M-GEO-3 (C (49), N (48)): one quadratic form in four coordinate systems; which matrices are singular."""
    p = vector(0.5, 0.3, 0.2)
    d = vector(0.1, -0.05, -0.05)
    form = geo.fisher_quadratic_form(p, d)
    free, homogeneous = geo.fisher_free(p), geo.fisher_homogeneous(p)
    assert d[:2] @ free @ d[:2] == pytest.approx(float(form))
    assert d @ homogeneous @ d == pytest.approx(float(form))
    close(free, torch.tensor([[7.0, 5.0], [5.0, 25 / 3]], dtype=F64))
    assert (homogeneous @ p).abs().max() < 1e-15
    assert torch.linalg.eigvalsh(free).min() > 1
    # logits: dz with J dz = d has the same length
    dz = torch.linalg.pinv(geo.fisher_logits(p)) @ d
    close(geo.softmax_jacobian(p) @ dz, d)
    assert dz @ geo.fisher_logits(p) @ dz == pytest.approx(float(form))
    # definition: expected outer product of the gradient of log p
    score = torch.diag(1 / p)[:, :2] - vector(0.0, 0.0, 1.0)[:, None] / p[2]
    close((p[:, None, None] * score[:, :, None] * score[:, None, :]).sum(0), free)


def test_entropy_gradients_and_the_tempering_flow():
    """M-GEO-4 (N (50)): none of the gradients points at uniform; the Fisher flow is tempering exactly."""
    p = vector(0.9, 0.09, 0.01)
    fisher = geo.entropy_fisher_gradient(p)
    d = geo.tangent_projection(randn(3))
    euclid = geo.entropy_differential(p) @ d
    assert geo.entropy_tangent_gradient(p) @ d == pytest.approx(float(euclid))
    assert (fisher * d / p).sum() == pytest.approx(float(euclid))  # metric gradient: g(grad, d) = dH(d)
    away = 1 / 3 - p
    for gradient in (geo.entropy_tangent_gradient(p), fisher):
        cosine = torch.nn.functional.cosine_similarity(gradient, away, dim=0)
        assert cosine == pytest.approx(0.9097, abs=5e-4)
    q = p.clone()
    steps, time = 4000, 0.7
    for _ in range(steps):  # midpoint rule
        half = q + 0.5 * time / steps * geo.entropy_fisher_gradient(q)
        q = q + time / steps * geo.entropy_fisher_gradient(half)
    close(q, geo.temper(p, time), atol=1e-7, rtol=0)
    assert entropy_of(geo.temper(p, time)) > entropy_of(p)


def test_fisher_rao_distance():
    """M-GEO-5: a metric, pi at most, local length, and the length of the path it is the shortest of."""
    p, q, r = law(3, 6)
    d = geo.fisher_rao_distance
    assert d(p, q) == pytest.approx(2 * float(torch.arccos((p * q).sqrt().sum())), abs=1e-9)
    assert d(p, q) == pytest.approx(float(d(q, p)))
    assert d(p, r) <= d(p, q) + d(q, r) + 1e-12
    assert d(p, p) == 0
    assert d(torch.eye(3)[0], torch.eye(3)[1]) == pytest.approx(pi)
    step = 1e-5 * geo.tangent_projection(randn(6, seed=4)) * p.min()
    assert d(p, p + step) ** 2 == pytest.approx(float(geo.fisher_quadratic_form(p, step)), rel=1e-3)
    t = torch.linspace(0, 1, 2001, dtype=F64)[:, None]
    straight = p + t * (q - p)
    assert d(straight[1:], straight[:-1]).sum() > d(p, q)
    assert entropy(p.log()) == pytest.approx(float(entropy_of(p)))
