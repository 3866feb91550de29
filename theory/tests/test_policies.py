"""Scale against length, policies and control: M-SCL-0..10, M-SCL-16..20, M-TMP-1, M-TMP-3."""

from __future__ import annotations

import functools
import math
from math import e, log, sqrt

import pytest
import torch
from draws import F64, close, gen, randn, rows, vector

from partita import Gibbs, scale
from partita.errors import ValueRangeError
from partita.scale import InverseSqrt, KappaLog, measure_sigma
from partita.support import causal, mask, window
from partita_theory import sharpness as sh
from partita_theory.information import entropy

# ---- policies --------------------------------------------------------------------------------------------------------


def test_score_variance():
    """M-SCL-1 (C (u7), P22, P52): enumeration of +-1 vectors, means, one row, and the division by d."""
    signs = torch.cartesian_prod(*[vector(-1.0, 1.0)] * 4)
    s = (signs[:, None] * signs[None]).sum(-1)
    assert s.var(unbiased=False) == pytest.approx(float(sh.score_variance(4)))
    a, b = 0.5 + randn(200_000), 0.5 + randn(200_000, seed=1)
    assert (a * b).var() == pytest.approx(float(sh.score_variance(1, 1, 1, 0.5, 0.5)), rel=0.03)
    for d, printed in ((16, 0.0625), (64, 0.0156), (256, 0.0039)):
        assert sh.score_variance(d) / d**2 == pytest.approx(printed, abs=1e-4)


def log_odds(query, key, **options):
    """log p_0 / p_1 of every row: the row's scale times the difference of two scores, whatever else it sees."""
    p = Gibbs(query, key, **options).probs()
    return (p[..., 0] / p[..., 1]).log()


@pytest.mark.parametrize(("n", "dim", "kappa"), [(7, 5, 1.0), (512, 64, 2.5), (3000, 16, 0.3)])
def test_the_logarithmic_scale_multiplies_scores(n, dim, kappa):
    """M-SCL-2: under KappaLog log-odds are kappa log(n) / dim times differences of scores."""
    q, k = randn(4, dim), randn(n, dim, seed=1)
    scores = q @ k[:2].T
    expected = kappa * log(n) / dim * (scores[:, 0] - scores[:, 1])
    close(log_odds(q, k, scale=KappaLog(kappa)), expected)


def test_the_logarithmic_scale_is_no_invariance_of_unit_vectors():
    """M-SCL-2 (W (23)): the entropy rises by the law's own amount; log n / sqrt(d) would leave a few keys."""
    h = {n: float(entropy(float(KappaLog()(n, 64)) * rows(n, 300, seed=n)).mean()) for n in (2**8, 2**12)}
    predicted = {n: float(sh.kappa_entropy(n, 1.0, 64)) for n in h}
    # |q|^2 / 64 scatters by sqrt(2 / 64) = 0.18 and moves the gap (at most 0.54) by that share; 300 rows, 5 sigma
    for n, value in h.items():
        assert value == pytest.approx(predicted[n], abs=5 * 0.18 * 0.54 / 300**0.5 + 0.02)
    assert h[2**12] - h[2**8] > 0.8 * log(16)


def test_where_both_scales_meet():
    """M-SCL-9, M-SCL-7 (W (59)): KappaLog passes 1/sqrt(d) between the integers around e^sqrt(d), and at no other."""
    for dim in (4, 9, 16, 36, 64, 100):
        n = int(sh.crossover_length(dim))
        assert KappaLog()(n, dim) < InverseSqrt()(n, dim) < KappaLog()(n + 1, dim), dim
        assert KappaLog()(n // 2, dim) < InverseSqrt()(n, dim) < KappaLog()(2 * n, dim)
    for dim, printed in ((64, 2981), (128, 8.2e4), (512, 6.7e9)):
        assert sh.crossover_length(dim) == pytest.approx(printed, rel=0.01)
    for n, dim in ((512, 64), (4096, 128)):
        kappa = float(sh.equivalent_kappa(n, dim))
        q, k = randn(3, dim), randn(n, dim, seed=1)
        close(log_odds(q, k, scale=KappaLog(kappa)), log_odds(q, k, scale=InverseSqrt()))


def test_heads_sharpen_by_the_root_of_their_number():
    """M-SCL-8 (N (56)): the policy's scale times the measured deviation of the scores of each head."""
    rows_, n = 256, 1024
    sharp = {}
    for heads in (1, 4, 16):
        dim = 512 // heads
        q, k = randn(heads, rows_, dim, seed=heads), randn(heads, n, dim, seed=heads + 1)
        sharp[heads] = float(KappaLog()(n, dim)) * measure_sigma(q, k)
        # sigma^2 is a mean of |q|^2 over heads * rows rows: relative scatter sqrt(2 / (512 rows)), halved by the root;
        # each row's variance over n keys has sqrt(2 / n) more, nearly common to the rows of one head
        scatter = (0.5 / (512 * rows_)) ** 0.5 + (0.5 / n) ** 0.5
        assert sharp[heads] == pytest.approx(float(sh.head_sharpness(heads, 512, n)), rel=5 * scatter)
    assert sharp[16] / sharp[1] == pytest.approx(4, rel=0.2)  # the scale itself grows by 16
    got = sh.head_sharpness(torch.tensor([1, 4, 8, 16]), 512, 1024)
    close(got, vector(0.306, 0.613, 0.866, 1.225), atol=6e-4, rtol=0)


def test_reference_length_slope():
    """M-SCL-7: theory 0.840 at n_train = 512 by a finite difference of the Gaussian law."""

    def h(log_n):
        return log_n - (log_n / log(512)) ** 2 / 2

    x, d = log(512), 1e-5
    assert sh.reference_length_slope(512, 512) == pytest.approx((h(x + d) - h(x - d)) / (2 * d), abs=1e-8)
    assert sh.reference_length_slope(512, 512) == pytest.approx(0.840, abs=1e-3)


def test_calibrated_kappa_is_stationary():
    """M-SCL-16 (C (24), (u8), K9): dH/dlog n = 0 at n0, H = log(n0)/2; kappa = 1 acts at e^d only."""
    n0, d = 4096, 64
    kappa = sh.calibrate_kappa(n0, d)
    assert kappa == pytest.approx(2.77, abs=5e-3)
    step = 1e-4
    low, mid, high = (sh.kappa_entropy(n0 * e**x, kappa, d) for x in (-step, 0.0, step))
    assert abs(high - low) / (2 * step) < 1e-6
    assert mid == pytest.approx(log(n0) / 2)
    assert sh.stationary_length(kappa, d) == pytest.approx(log(n0))
    # rows of that many keys: 4.63 nats and a slope of 0.15, not the 4.16 and 0 of the leading order
    lengths = (n0 // 2, n0, 2 * n0)
    exact = [float(sh.gaussian_entropy(n, float(kappa) * log(n) / 8, finite=True)) for n in lengths]
    assert exact[1] == pytest.approx(4.632, abs=5e-4)
    assert (exact[2] - exact[0]) / log(4) == pytest.approx(0.154, abs=5e-4)
    h = entropy(float(kappa) * log(n0) / 8 * randn(1000, n0, dtype=torch.float32))
    assert h.mean() == pytest.approx(exact[1], abs=5 * float(h.std()) / 1000**0.5)
    assert sh.stationary_length(1.0, d) == 64
    c = 0.125
    for n, printed in ((2**13, 8.38), (2**16, 10.13)):
        h = entropy(c * log(n) * randn(30, n, dtype=torch.float32)).mean()
        assert h == pytest.approx(printed, abs=0.02)
        assert h == pytest.approx(float(sh.kappa_entropy(n, 1.0, 64)), abs=0.05)
    with pytest.raises(ValueRangeError, match="n0 must exceed 1"):
        sh.calibrate_kappa(1, 64)


POLICIES = {  # the slope in print, in 64 dimensions, where raw scores have the deviation 8
    "inverse sqrt": (scale.InverseSqrt(), 0.994),
    "kappa 1": (scale.KappaLog(), 0.855),
    "mixed": (scale.Mixed(alpha=1.0, beta=0.1), 0.978),
    "frozen length": (scale.MaxLength(65536), 0.985),
    "log 512": (scale.LogLength(512), 0.762),
    "sqrt log 512": (scale.SqrtLogLength(512), 0.910),
    "calibrated": (scale.CalibratedLog(4096, 8.0), 0.166),
    "gaussian 4": (scale.GaussianEntropy(4.0, 8.0), 0.183),
    "log n / sqrt d": (scale.KappaLog(8.0), -0.008),
}


def multiplier(policy, n):
    return float(policy(n, 64))


def test_slopes_of_the_policies():
    """M-SCL-0, M-SCL-17, M-SCL-3, M-SCL-4 (W (42), (59), P46..P48): dH/dlog n from 2^9 to 2^16 as printed."""
    cache = {n: rows(n, 60 if n > 10_000 else 400, seed=n) for n in (2**9, 2**16)}
    slopes = {}
    for name, (made, printed) in POLICIES.items():
        policy = functools.partial(multiplier, made)
        slope, _ = sh.length_slope(policy, cache.__getitem__, [2**9, 2**16])
        # five standard errors of these rows, and of those that were printed (at most 0.17 nats at 2^16)
        error = sum(float(entropy(policy(n) * s).var()) / len(s) for n, s in cache.items())
        assert slope == pytest.approx(printed, abs=5 * (error + 0.17**2 / 25) ** 0.5 / log(2**7)), name
        slopes[name] = float(slope)
    assert slopes["inverse sqrt"] > slopes["kappa 1"] > slopes["log 512"] > slopes["calibrated"]
    assert slopes["frozen length"] > 0.95  # a constant scale: no invariance
    assert multiplier(POLICIES["mixed"][0], 1024) == pytest.approx(0.1358, abs=1e-4)


def dense(query, key, keep, bias=0.0):
    """Entropies with each row's own log n_i / dim, one row at a time, from softmax alone."""
    out = []
    for i, seen in enumerate(keep):
        n = int(seen.sum())
        z = (log(n) / key.shape[-1] * (key @ query[i]) + (bias[i] if torch.is_tensor(bias) else bias))[seen]
        out.append(torch.special.entr(torch.softmax(z, -1)).sum())
    return torch.stack(out)


def test_rows_count_what_they_see():
    """M-SCL-5 (K3): causal, windowed and random supports against rows made one at a time."""
    n, d = 40, 8
    q, k = 3 * randn(n, d), 3 * randn(n, d, seed=1)
    lag = torch.arange(n)[:, None] - torch.arange(n)
    random = (torch.rand(n, n, generator=gen(2)) < 0.3) | (lag == 0)
    for keep, support in ((lag >= 0, causal()), ((lag >= 0) & (lag <= 5), window(5, 0)), (random, mask(random))):
        gibbs = Gibbs(q, k, scale=KappaLog(), support=support)
        close(gibbs.entropy(), dense(q, k, keep))
        assert gibbs.visible().tolist() == keep.sum(-1).tolist()


def test_one_length_for_all_rows_sharpens_the_early_ones():
    """M-SCL-5 (K3): with log 1024 for every row, row 2 has tenfold log-odds and row 32 twofold ones."""
    n, d = 1024, 8
    q, k = 0.1 * randn(n, d), randn(n, d, seed=1)
    own, one = (log_odds(q, k, scale=s, support=causal()) for s in (KappaLog(), log(n) / d))
    ratio = one / own
    assert ratio[1].item() == pytest.approx(10) and ratio[31].item() == pytest.approx(2)
    assert ratio[n - 1].item() == pytest.approx(1)


def test_a_scale_per_row_folds_into_the_query():
    """M-SCL-20 (P50): torch's kernel, which knows one scale, gives ours on folded queries; a bias is left alone."""
    n, d = 40, 8
    q, k, v, bias = randn(n, d), randn(n, d, seed=1), randn(n, 3, seed=2), randn(n, n, seed=3)
    policy = KappaLog(2.0)
    folded = policy.fold(q, torch.arange(1, n + 1))
    ours = Gibbs(q, k, scale=policy, support=causal()).expectation(v)
    kernel = torch.nn.functional.scaled_dot_product_attention
    close(kernel(folded[None], k[None], v[None], is_causal=True, scale=1.0)[0], ours)
    compensated = kernel(folded[None] * d**0.5, k[None], v[None], is_causal=True)[0]
    close(compensated, ours)
    biased = (Gibbs(x, k, scale=s, bias=bias, support=causal()).entropy() for x, s in ((q, policy), (folded, 1.0)))
    close(*biased)
    # no single scale does it: the one that is right for the last row is wrong for the others
    single = Gibbs(q, k, scale=float(policy(n, d)), support=causal()).expectation(v)
    close(single[-1], ours[-1])
    assert (single[1:-1] - ours[1:-1]).abs().amax(-1).min() > 0


# ---- control ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "uniform", "heavy", "tied", "needle"])
def test_scale_for_a_target_entropy(kind):
    """M-SCL-10: converges on five score laws and targets from 0.02 to 0.98 log n, whatever the offset."""
    n = 500
    s = {
        "gaussian": randn(n),
        "uniform": torch.rand(n, generator=gen(), dtype=F64),
        "heavy": randn(n) / randn(n, seed=1).abs(),
        "tied": (randn(n) > 1).to(F64) + 1e-3 * randn(n),
        "needle": torch.cat([torch.ones(1, dtype=F64), torch.zeros(n - 1, dtype=F64)]),
    }[kind]
    for share in (0.02, 0.1, 0.5, 0.9, 0.98):
        target = share * log(n)
        for offset in (0.0, 1000.0):
            root = sh.entropy_scale(s + offset, target)
            assert root.converged, (share, offset)
            assert entropy(root.scale * s) == pytest.approx(target, abs=1e-8)
            assert root.steps <= 40
    close(sh.entropy_scale(3 * s, 2.0).scale * 3, sh.entropy_scale(s, 2.0).scale, rtol=1e-6, atol=0)


def test_targets_out_of_reach():
    """M-SCL-10: log n and above give 0; log of the number of maximisers and below give the cap, flagged."""
    s = torch.tensor([[1.0, 1.0, 0.0, -1.0]], dtype=F64)
    assert sh.entropy_scale(s, log(4)).scale == 0
    low = sh.entropy_scale(s, 0.5)  # two maximisers: H cannot fall below log 2
    assert low.scale == 1e12
    assert not low.converged
    assert not sh.entropy_scale(torch.zeros(5, dtype=F64), 1.0).converged


def test_implicit_gradient_of_the_scale():
    """M-SCL-10: against differences of the solver; scaling the scores leaves the logits alone."""
    s, target = randn(12), 1.5
    scale = sh.entropy_scale(s, target).scale
    got = sh.entropy_scale_gradient(s, scale)
    for j in (0, 5, 11):
        d = torch.zeros(12, dtype=F64)
        d[j] = 1e-5
        slope = (sh.entropy_scale(s + d, target).scale - sh.entropy_scale(s - d, target).scale) / 2e-5
        assert got[j] == pytest.approx(slope.item(), abs=1e-4)
    assert s @ got == pytest.approx(-scale.item())
    assert got.sum().abs() < 1e-12


def test_feedback_rules():
    """M-SCL-10 (W (61)): multipliers at the root; the printed rule runs away from it on both sides."""
    s, target = randn(300), 3.0
    root = sh.entropy_scale(s, target).scale
    for kind in ("newton", "reciprocal", "printed"):
        d = 1e-5
        up, down = (sh.controller_step(s, root + x, target, kind) for x in (d, -d))
        assert sh.controller_multiplier(s, root, kind) == pytest.approx(float(up - down) / (2 * d), abs=1e-4)
    assert sh.controller_multiplier(s, root, "printed") > 1
    x = root * 0.8
    for _ in range(8):
        x = sh.controller_step(s, x, target, "newton")
    assert x == pytest.approx(root.item(), rel=1e-9)
    needle = torch.zeros(100_000, dtype=F64)
    needle[0] = 1
    at = sh.entropy_scale(needle, 1.0).scale
    assert sh.controller_multiplier(needle, at, "reciprocal") == pytest.approx(-11.3, abs=0.2)
    with pytest.raises(ValueRangeError, match="newton, reciprocal, printed"):
        sh.controller_step(s, root, target, "other")


# ---- needle ----------------------------------------------------------------------------------------------------------


def test_needle_must_stand_above_the_background():
    """M-SCL-19: well below the typical maximum no scale helps; above it some does; printed weights at n = 4096."""
    scales = torch.tensor([1.0, 2.0, 3.0, 5.0, 8.0, 20.0])
    low, mid, high = (
        sh.needle_weight_samples(4096, h, scales, draws=300, generator=gen()).mean(0) for h in (3.0, 4.0, 5.0)
    )
    assert low.max() < 0.06
    assert mid[4] == pytest.approx(0.794, abs=0.08)
    assert high[2] == pytest.approx(0.901, abs=0.03)
    assert sh.needle_threshold(4096) == pytest.approx(3.51, abs=5e-3)
    assert sh.needle_threshold(4096, 2.0, finite=False) == pytest.approx(2 * 4.08, abs=0.01)
    assert 3.0 < sh.needle_threshold(4096) < 4.0
    typical = sh.needle_weight_typical(4096, 3.0, torch.linspace(0.1, 6, 60, dtype=F64))
    assert torch.linspace(0.1, 6, 60)[typical.argmax()] == pytest.approx(
        3.0, abs=0.11
    )  # flat optimum at height / sigma^2
    assert sh.needle_weight(4.0, 2.0, torch.logsumexp(torch.zeros(100, dtype=F64), 0)) == pytest.approx(
        e**8 / (e**8 + 100)
    )


@pytest.mark.parametrize("share", [0.7, 0.85, 0.95, 1.0])
def test_a_needle_crosses_over_where_its_chance_to_be_best_does(share):
    """M-SCL-19: the best mean weight over scales is Phi(h)^(n - 1), 0.77 at 0.95 of sqrt(2 log n), not nothing."""
    n, draws = 100_000, 60
    height = share * float(sh.needle_threshold(n, finite=False))
    scales = torch.tensor([3.0, 10.0, 40.0, 400.0])
    weights = sh.needle_weight_samples(n, height, scales, draws=draws, generator=gen())
    chance = float(sh.needle_chance(n, height))
    assert weights[:, -1].mean() == pytest.approx(chance, abs=4 * (chance * (1 - chance) / draws) ** 0.5 + 0.01)
    assert chance == pytest.approx({0.7: 0.0, 0.85: 0.10, 0.95: 0.77, 1.0: 0.92}[share], abs=0.05)


# ---- temperature -----------------------------------------------------------------------------------------------------


def test_temperature_is_inverse_scale():
    """M-TMP-1, M-TMP-3 (C (63), P51): the same law either way; infinite temperature for a single key."""
    q, k = randn(3, 9), randn(50, 9, seed=1)
    for t in (0.3, 2.0, sqrt(9)):
        law = Gibbs(q, k, scale=float(sh.scale_of_temperature(t))).probs()
        close(law, torch.softmax(q @ k.T / t, -1))
    close(law, Gibbs(q, k, scale=InverseSqrt()).probs())  # 1/sqrt(d) is the temperature sqrt(d)
    t = float(sh.effective_temperature(50, 9, 2.0))
    close(Gibbs(q, k, scale=KappaLog(2.0)).probs(), torch.softmax(q @ k.T / t, -1))
    assert sh.effective_temperature(1, 64).isinf()
    assert sh.scale_of_temperature(sqrt(64)) == 0.125
    with pytest.raises(ValueRangeError, match="without keys"):
        sh.effective_temperature(0, 64)
    with pytest.raises(ValueRangeError, match="positive"):
        sh.scale_of_temperature(0.0)


def test_kappa_under_a_position_bias_holds_the_entropy():
    """M-SCL-16 with H = H_bias - sharpness^2 / 2: stationary at n0 with the growth of the bias, not without it."""
    n0, dim, sigma = 1024, 64, 8.0
    bias = -1.2 * torch.arange(4096).double().add(1).log()  # a power law: it widens for ever, but slower than log n
    growth = sh.bias_growth(bias, n0)
    assert 0.1 < growth < 0.9

    def slope(kappa):
        ends = [entropy(bias[:n]) - (kappa * math.log(n) / dim * sigma) ** 2 / 2 for n in (n0 - 32, n0 + 32)]
        return (ends[1] - ends[0]) / math.log((n0 + 32) / (n0 - 32))

    right, plain = sh.calibrate_kappa(n0, dim, sigma, growth), sh.calibrate_kappa(n0, dim, sigma)
    assert abs(slope(right)) < 1e-3
    assert slope(plain) < -0.1  # over-sharpened
    assert math.isclose(scale.CalibratedLog(n0, sigma, float(growth)).kappa(dim), float(right), rel_tol=1e-12)
    assert sh.bias_growth(torch.zeros(2 * n0), n0) == pytest.approx(1.0, abs=1e-5)  # over two keys
