"""Noise and adversaries: M-ROB-*, M-DER-7."""

from __future__ import annotations

from itertools import product
from math import tanh

import pytest
import torch
from draws import F64, close, gen, randn, vector
from torch.autograd.functional import jacobian

from partita import Gibbs
from partita.errors import ValueRangeError
from partita.support import causal
from partita_theory import geometry
from partita_theory import robustness as rob


def grid(n):
    """Scores and values on a grid: spread-out attention with a bias that does not vanish."""
    x = torch.linspace(-1, 1, n, dtype=F64)
    return x, x[:, None]


def test_noise_identity_is_algebra():
    """M-ROB-1 (W (2)): the change of the output exactly, for any moment; no factor n."""
    s, v, e = randn(3, 8), randn(3, 8, 2, seed=1), randn(3, 8, seed=2)
    p = torch.softmax(s, -1)
    out = (p[..., None] * v).sum(-2)
    moved = (torch.softmax(s + e, -1)[..., None] * v).sum(-2)
    for moment in (1.0, 1.7):
        close(rob.noise_identity(p, v, e, moment), moved - out)


@pytest.mark.parametrize("n", [16, 64, 256])
def test_bias_and_spread_of_noisy_attention(n):
    """M-ROB-2 (C (6), (7), (9), (10), (25)): first-order bias and sd against Monte Carlo within its error."""
    s, v = grid(n)
    noise = rob.GaussianNoise(0.5)
    p = torch.softmax(s, -1)
    effect, error = rob.monte_carlo_noise(s, v, noise, draws=400_000 * 16 // n, generator=gen())
    bias, sd = rob.noise_bias(p, v, noise.cv2()), rob.noise_covariance(p, v, noise.cv2()).diagonal().sqrt()
    second_order = 8 / n  # relative
    assert abs(effect.bias - bias) <= 4 * error.bias + second_order * bias.abs()
    assert abs(effect.sd - sd) <= 5 * error.sd + second_order * sd
    bound = rob.noise_sd_bound(p, v, noise.cv2())
    assert (sd <= bound).all()
    variance = p @ v[:, 0] ** 2 - (p @ v[:, 0]) ** 2
    assert bound.item() ** 2 == pytest.approx(float(noise.cv2() * p.max() * variance))


def test_orders_in_n():
    """M-ROB-2 (C (10)): bias falls like 1/n, sd like 1/sqrt(n); printed numbers of the grid example."""
    lengths = torch.tensor([16, 64, 256, 1024, 4096])
    bias, sd = [], []
    for n in lengths.tolist():
        s, v = grid(n)
        p = torch.softmax(s, -1)
        cv2 = rob.GaussianNoise(0.5).cv2()
        bias.append(rob.noise_bias(p, v, cv2).item())
        sd.append(rob.noise_covariance(p, v, cv2).sqrt().item())
    printed = vector(-5.81e-3, -1.34e-3, -3.29e-4, -8.18e-5, -2.04e-5)
    close(torch.tensor(bias, dtype=F64), printed, rtol=0.003, atol=0)
    x = lengths.double().log()
    for values, power in ((bias, -1.0), (sd, -0.5)):
        y = torch.tensor(values, dtype=F64).abs().log()
        slope = ((x - x.mean()) * y).sum() / (x - x.mean()).square().sum()
        assert slope == pytest.approx(power, abs=0.03)
    uniform = torch.full((9,), 1 / 9, dtype=F64)
    assert rob.noise_bias(uniform, randn(9, 2), 1.0).abs().max() < 1e-15


def test_streaming_prediction_equals_the_dense_one():
    """M-ROB-2: squared weights are a Gibbs law at twice the scale, with support and bias."""
    q, k, v, b = randn(6, 4), randn(6, 4, seed=1), randn(6, 3, seed=2), randn(6, 6, seed=3)
    cv2 = rob.GaussianNoise(0.5).cv2()
    got = rob.noise_effect(q, k, v, cv2, scale=0.6, bias=b, support=causal())
    p = Gibbs(q, k, scale=0.6, bias=b, support=causal()).probs()
    close(got.bias, rob.noise_bias(p, v.expand(6, 6, 3), cv2))
    cov = rob.noise_covariance(p, v.expand(6, 6, 3), cv2)
    close(got.sd, cov.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt(), atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize(
    ("noise", "moment", "cv2"),
    [
        (rob.GaussianNoise(0.8), 1.3771, 0.8965),
        (rob.UniformNoise(1.5), 1.4195, 0.6572),
        (rob.LaplaceNoise(0.3), 1.0989, 0.2939),
    ],
)
def test_noise_families_against_quadrature_and_samples(noise, moment, cv2):
    """M-ROB-3 (C (27)): exponential moments by quadrature over the density, the printed values, and samples."""
    x = torch.linspace(-60, 60, 1_200_001, dtype=F64)
    if isinstance(noise, rob.GaussianNoise):
        density = torch.exp(-(x**2) / (2 * noise.sigma**2)) / (noise.sigma * (2 * torch.pi) ** 0.5)
    elif isinstance(noise, rob.UniformNoise):
        x = torch.linspace(-noise.radius, noise.radius, 400_001, dtype=F64)
        density = torch.full_like(x, 1 / (2 * noise.radius))
    else:
        density = torch.exp(-x.abs() / noise.b) / (2 * noise.b)
    first, second = (torch.trapezoid(density * torch.exp(t * x), x) for t in (1.0, 2.0))
    assert noise.exponential_moment() == pytest.approx(first.item(), rel=1e-6)
    assert noise.cv2() == pytest.approx((second / first**2 - 1).item(), rel=1e-5)
    assert noise.exponential_moment() == pytest.approx(moment, abs=6e-5)
    if not isinstance(noise, rob.UniformNoise):
        assert noise.cv2() == pytest.approx(cv2, abs=6e-5)
    draws = noise.sample(400_000, generator=gen()).exp()
    assert draws.mean() == pytest.approx(moment, abs=5 * float(draws.std()) / 400_000**0.5)


def test_uniform_cv2_is_printed_value_and_small_radius():
    """M-ROB-3: a coth a - 1 = 0.6572 at a = 1.5, and a^2 / 3 for small a."""
    assert rob.UniformNoise(1.5).cv2() == pytest.approx(0.6572, abs=1e-4)
    assert rob.UniformNoise(1e-3).cv2() == pytest.approx(1e-6 / 3, rel=1e-5)
    assert rob.UniformNoise(0.0).exponential_moment() == 1


def test_laplace_refuses_what_does_not_exist():
    """M-ROB-3, M-ROB-4: no mean for b >= 1, no variance for b >= 1/2; samples still come."""
    with pytest.raises(ValueRangeError, match=r"b >= 1; got b = 1\.0"):
        rob.LaplaceNoise(1.0).exponential_moment()
    with pytest.raises(ValueRangeError, match="b >= 1/2"):
        rob.LaplaceNoise(0.5).cv2()
    assert rob.LaplaceNoise(0.7).exponential_moment() == pytest.approx(1 / 0.51)
    assert rob.LaplaceNoise(3.0).sample(1000, generator=gen()).isfinite().all()
    with pytest.raises(ValueRangeError, match="b >= 0"):
        rob.LaplaceNoise(-1.0)


def test_heavy_tails_cancel_slowly_or_not_at_all():
    """M-ROB-4 (C (8), (27), P30): interquartile exponents near -1/2, -(1 - b) and 0."""
    for b, low, high in ((0.3, -0.58, -0.42), (0.7, -0.42, -0.2), (1.2, -0.15, 0.05), (2.0, -0.1, 0.08)):
        spread = []
        for n in (256, 8192):
            v = torch.linspace(-1, 1, n, dtype=F64)
            e = rob.LaplaceNoise(b).sample(1500, n, generator=gen(int(10 * b)))
            out = torch.softmax(e, -1) @ v
            spread.append(out.quantile(0.75) - out.quantile(0.25))
        slope = float((spread[1] / spread[0]).log() / torch.tensor(32.0).log())
        assert low < slope < high, (b, slope)
    assert [rob.laplace_error_exponent(b) for b in (0.3, 1.2)] == [-0.5, 0.0]


def test_common_noise_cancels():
    """M-ROB-5: rho = 1 does nothing; between, sigma^2 (1 - rho) predicts the spread."""
    s, v = grid(64)
    p = torch.softmax(s, -1)
    g = gen()
    for rho in (0.0, 0.5, 0.9, 1.0):
        own = torch.randn(20000, 64, generator=g, dtype=F64)
        shared = torch.randn(20000, 1, generator=g, dtype=F64)
        e = 0.5 * ((1 - rho) ** 0.5 * own + rho**0.5 * shared)
        sd = (torch.softmax(s + e, -1) @ v).std()
        cv2 = rob.GaussianNoise(float(rob.correlated_sigma(0.5, rho))).cv2()
        assert sd == pytest.approx(rob.noise_covariance(p, v, cv2).sqrt().item(), rel=0.05, abs=1e-12)
    with pytest.raises(ValueRangeError, match="rho"):
        rob.correlated_sigma(1.0, 1.5)


def test_softmax_bound_holds_and_is_attained():
    """M-ROB-6 ((22)): the chain of bounds in 100 000 trials, of all sizes of perturbation; equality for two points."""
    s = 3 * randn(100_000, 5)
    e = randn(100_000, 5, seed=1) * torch.logspace(-3, 1, 100_000, dtype=F64)[:, None]
    change = (torch.softmax(s + e, -1) - torch.softmax(s, -1)).abs().sum(-1)
    osc, radius = rob.softmax_change_bound(e), rob.softmax_change_bound(radius=e.abs().amax(-1))
    assert (change <= osc + 1e-12).all()
    assert (osc <= radius + 1e-12).all()
    assert (radius <= e.abs().amax(-1) + 1e-12).all()
    for r in (0.1, 2.0, 5.0):
        s2, e2 = rob.worst_two_point_law(r)
        moved = (torch.softmax(s2 + e2, -1) - torch.softmax(s2, -1)).abs().sum()
        assert moved == pytest.approx(2 * tanh(r / 2))
    with pytest.raises(ValueRangeError, match="exactly one"):
        rob.softmax_change_bound()


def test_attention_bound_holds_and_beats_the_naive_one():
    """M-ROB-7 ((21), (23)): certified in 20 000 trials, shift-invariant, never above max|v| |e|."""
    s, v, e = 2 * randn(20_000, 6), 5 + randn(20_000, 6, 3, seed=1), randn(20_000, 6, seed=2)
    moved = ((torch.softmax(s + e, -1) - torch.softmax(s, -1))[:, None] @ v).squeeze(1).norm(dim=-1)
    bound = rob.attention_change_bound(v, e)
    assert (moved <= bound + 1e-12).all()
    naive = v.norm(dim=-1).amax(-1) * e.abs().amax(-1)
    assert (bound <= naive).all()
    assert (naive / rob.attention_change_bound(v, radius=e.abs().amax(-1))).median() > 3
    close(rob.attention_change_bound(v + 100, e), bound)
    assert (rob.value_diameter(v, exact=False) >= rob.value_diameter(v) - 1e-12).all()
    one = v[0]
    close(rob.value_diameter(one), (one[:, None] - one).norm(dim=-1).max())
    r = rob.certified_radius(one, 0.5)
    assert rob.attention_change_bound(one, radius=r) == pytest.approx(0.5)


def test_sensitivity_of_the_output():
    """M-ROB-8: both closed forms against autograd."""
    s, v = randn(6), randn(6, 3, seed=1)
    jac = jacobian(lambda x: torch.softmax(x, -1) @ v, s).T
    got = rob.output_sensitivity(s, v)
    close(got, jac)
    p = torch.softmax(s, -1)
    for i in range(6):
        rest = torch.softmax(s.masked_fill(torch.arange(6) == i, -torch.inf), -1) @ v
        close(got[i], p[i] * (1 - p[i]) * (v[i] - rest))


def test_first_order_attacks_are_the_best_of_their_ball():
    """M-ROB-9 (N (57), W (62)): predictions are met for small budgets, no other perturbation does better."""
    s, v, u = randn(9), randn(9, 4, seed=1), randn(4, seed=2)
    eps = 1e-4
    flat = rob.attack_linf(s, v, u, eps)
    assert flat.achieved == pytest.approx(flat.predicted.item(), rel=1e-3)
    ball = rob.attack_l2(s, v, eps, u)
    assert ball.achieved == pytest.approx(ball.predicted.item(), rel=1e-3)
    unit = u / u.norm()
    slope = rob.output_sensitivity(s, v) @ unit
    others = randn(5000, 9, seed=3)
    assert ((others / others.abs().amax(-1, keepdim=True)) @ slope * eps <= flat.predicted + 1e-15).all()
    assert ((others / others.norm(dim=-1, keepdim=True)) @ slope * eps <= ball.predicted + 1e-15).all()
    free = rob.attack_l2(s, v, eps)
    assert free.predicted == pytest.approx(float(rob.output_sensitivity_norm(s, v)) * eps)
    moved = (torch.softmax(s + free.perturbation, -1) - torch.softmax(s, -1)) @ v
    assert moved.norm() == pytest.approx(free.predicted.item(), rel=1e-3)
    sign = flat.perturbation / flat.perturbation.norm() * eps  # the sign vector of equal l2 length does worse
    assert ((torch.softmax(s + sign, -1) - torch.softmax(s, -1)) @ v).norm() < moved.norm()


def test_exact_attack_equals_brute_force():
    """M-ROB-10 (W (62)): the threshold iteration finds the best of 2^8 sign patterns; the sign rule does not."""
    patterns = torch.tensor(list(product((-1.0, 1.0), repeat=8)), dtype=F64)
    ratios = []
    for seed in range(60):
        s, v, u = 2 * randn(8, seed=seed), randn(8, 2, seed=seed + 500), randn(2, seed=seed + 900)
        c = v @ (u / u.norm())
        brute = (torch.softmax(s + 1.5 * patterns, -1) @ c).max() - torch.softmax(s, -1) @ c
        exact = rob.attack_linf_exact(s, v, u, 1.5, steps=6)
        assert exact.achieved == pytest.approx(brute.item(), rel=1e-9)
        ratios.append(float(rob.attack_linf(s, v, u, 1.5).achieved / brute))
    assert max(ratios) <= 1 + 1e-9
    assert 0.6 < sum(ratios) / len(ratios) < 0.95


def test_gradients_die_when_rows_saturate_or_spread():
    """M-DER-7 (P26): trace J goes to 0 at one-hot; with unit-variance scores |d out / d s| falls like n^-1/2."""
    s = randn(32)
    traces = [float(geometry.jacobian_trace(torch.softmax(x * s, -1))) for x in (1.0, 5.0, 50.0, 500.0)]
    assert traces == sorted(traces, reverse=True)
    spaced = torch.softmax(500 * torch.linspace(-2, 2, 32, dtype=s.dtype), -1)  # the gap of random scores is anything
    assert geometry.jacobian_trace(spaced) < 1e-3
    sizes, errors = [], []
    for n in (16, 256, 4096):
        norms = [rob.output_sensitivity_norm(randn(n, seed=t), randn(n, 1, seed=t + 50)) for t in range(20)]
        sizes.append(float(torch.stack(norms).mean()))
        errors.append(float(torch.stack(norms).std()) / 20**0.5)
    # five standard errors of what was drawn, and of what is printed: as many rows, and a rounding of 2 % at 0.026
    for size, error, printed in zip(sizes, errors, (0.296, 0.097, 0.026), strict=True):
        assert size == pytest.approx(printed, abs=5 * 2**0.5 * error + 0.02 * printed)
    power = torch.tensor(sizes[2] / sizes[1]).log() / torch.tensor(16.0).log()
    scatter = ((errors[1] / sizes[1]) ** 2 + (errors[2] / sizes[2]) ** 2) ** 0.5 / torch.tensor(16.0).log()
    assert power == pytest.approx(-0.5, abs=5 * float(scatter) + 0.02)
