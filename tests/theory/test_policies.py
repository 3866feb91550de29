"""Scale against length, policies and control: M-SCL-0..10, M-SCL-16..20, M-TMP-1, M-TMP-3."""

from __future__ import annotations

from math import e, log, sqrt

import pytest
import torch

from partita import Gibbs
from partita.errors import ValueRangeError
from partita.support import causal
from partita.theory import sharpness as sh
from partita.theory.information import entropy

F64 = torch.float64


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=gen(seed), dtype=dtype)


def rows(n, count, seed=0):
    """Scores of random unit-variance queries and keys in 64 dimensions, one query for each draw of keys."""
    g = gen(seed)
    q = torch.randn(count, 64, generator=g)
    # Given q, the scores of Gaussian keys are Gaussian of variance |q|^2: no keys need to be drawn.
    return q.norm(dim=-1, keepdim=True) * torch.randn(count, n, generator=g)


# ---- policies --------------------------------------------------------------------------------------------------------


def test_score_variance():
    """M-SCL-1 (C (u7), P22, P52): enumeration of +-1 vectors, means, one row, and the division by d."""
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * 4)
    s = (signs[:, None] * signs[None]).sum(-1)
    assert s.var(unbiased=False) == pytest.approx(float(sh.score_variance(4)))
    a, b = 0.5 + randn(200_000), 0.5 + randn(200_000, seed=1)
    assert (a * b).var() == pytest.approx(float(sh.score_variance(1, 1, 1, 0.5, 0.5)), rel=0.03)
    q, k = randn(64), randn(50_000, 64, seed=1)
    assert (k @ q).var() == pytest.approx(float(sh.row_score_variance(q)), rel=0.03)
    assert (k @ q).std() == pytest.approx(8, rel=0.15)  # sqrt(d), not d
    for d, printed in ((16, 0.0625), (64, 0.0156), (256, 0.0039)):
        assert sh.score_variance(d) / d**2 == pytest.approx(printed, abs=1e-4)


def test_equivalents_and_heads():
    """M-SCL-2, M-SCL-7, M-SCL-8, M-SCL-9 (W (23), (59), N (56))."""
    for n, d in ((512, 64), (4096, 128)):
        assert sh.equivalent_kappa(n, d) * log(n) / d == pytest.approx(1 / sqrt(d))
    for d, printed in ((64, 2981), (128, 8.2e4), (512, 6.7e9)):
        n = sh.crossover_length(d)
        assert n == pytest.approx(printed, rel=0.01)
        assert sh.equivalent_kappa(n, d) == pytest.approx(1)
    got = sh.head_sharpness(torch.tensor([1, 4, 8, 16]), 512, 1024)
    torch.testing.assert_close(got, torch.tensor([0.306, 0.613, 0.866, 1.225], dtype=F64), atol=6e-4, rtol=0)
    q, k = randn(400, 64), randn(400, 64, seed=1)
    measured = (log(1024) / 64 * (q * k).sum(-1)).std()
    assert measured == pytest.approx(0.866, rel=0.1)  # log n / d; log n / sqrt(d) would be 6.931
    assert log(1024) / 8 * 8 == pytest.approx(6.931, abs=1e-3)


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
    assert sh.stationary_length(1.0, d) == 64
    c = 0.125
    for n, printed in ((2**13, 8.38), (2**16, 10.13)):
        h = entropy(c * log(n) * randn(30, n, dtype=torch.float32)).mean()
        assert h == pytest.approx(printed, abs=0.02)
        assert h == pytest.approx(float(sh.kappa_entropy(n, 1.0, 64)), abs=0.05)
    with pytest.raises(ValueRangeError, match="n0 must exceed 1"):
        sh.calibrate_kappa(1, 64)


POLICIES = {
    "inverse sqrt": (lambda n: 1 / 8, 0.994),
    "kappa 1": (lambda n: log(n) / 64, 0.855),
    "mixed": (lambda n: 1 / 8 + 0.1 * log(n) / 64, 0.978),
    "frozen length": (lambda n: log(65536) / 64, 0.985),
    "log 512": (lambda n: log(n) / log(512) / 8, 0.762),
    "sqrt log 512": (lambda n: sqrt(log(n) / log(512)) / 8, 0.910),
    "calibrated": (lambda n: 8 / sqrt(log(4096)) * log(n) / 64, 0.166),
    "gaussian 4": (lambda n: sqrt(2 * max(0.0, log(n) - 4)) / 8, 0.183),
    "log n / sqrt d": (lambda n: log(n) / 8, -0.008),
}


def test_slopes_of_the_policies():
    """M-SCL-0, M-SCL-17, M-SCL-3, M-SCL-4 (W (42), (59), P46..P48): dH/dlog n from 2^9 to 2^16 as printed."""
    cache = {n: rows(n, 60 if n > 10_000 else 400, seed=n) for n in (2**9, 2**16)}
    slopes = {}
    for name, (policy, printed) in POLICIES.items():
        slope, _ = sh.length_slope(policy, cache.__getitem__, [2**9, 2**16])
        assert slope == pytest.approx(printed, abs=0.06), name
        slopes[name] = float(slope)
    assert slopes["inverse sqrt"] > slopes["kappa 1"] > slopes["log 512"] > slopes["calibrated"]
    assert slopes["frozen length"] > 0.95  # a constant scale: no invariance
    assert POLICIES["mixed"][0](1024) == pytest.approx(0.1358, abs=1e-4)
    h = {n: float(entropy(log(n) / 64 * rows(n, 400, seed=n)).mean()) for n in (2**4, 2**8)}
    assert h[2**4] == pytest.approx(2.72, abs=0.02)  # H grows with log n: the opposite of invariance
    assert h[2**8] == pytest.approx(5.31, abs=0.03)


def test_rows_count_what_they_see():
    """M-SCL-5, M-SCL-6, M-SCL-20 (K2, K3, P50): causal rows have their own scale, folded into the query."""
    n, d = 40, 8
    q, k = randn(n, d), randn(n, d, seed=1)
    visible = torch.arange(1, n + 1, dtype=F64)
    scale = visible.log() / d
    folded = Gibbs(q * scale[:, None], k, support=causal())
    direct = Gibbs(q, k, scale=scale, support=causal())
    torch.testing.assert_close(folded.entropy(), direct.entropy())
    assert direct.visible().tolist() == visible.tolist()
    assert scale[0] == 0
    assert direct.entropy()[0] == 0
    assert log(1024) / log(2) == pytest.approx(10)  # one global n over-scales row 2 tenfold
    assert log(8 * 1024) / log(1024) == pytest.approx(1.30, abs=5e-3)  # n_q for n_k = 8 n_q: 30 %


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
    torch.testing.assert_close(
        sh.entropy_scale(3 * s, 2.0).scale * 3, sh.entropy_scale(s, 2.0).scale, rtol=1e-6, atol=0
    )


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
    low, high = root * 0.8, root * 1.1
    for _ in range(60):
        low, high = (
            sh.controller_step(s, low, target, "printed"),
            sh.controller_step(s, high, target, "printed").clamp(max=1e9),
        )
    assert low < 1e-6
    assert high > 1e6
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
    """M-SCL-19: below the typical maximum no scale helps; above it some scale does; printed weights at n = 4096."""
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


# ---- temperature -----------------------------------------------------------------------------------------------------


def test_temperature_is_inverse_scale():
    """M-TMP-1, M-TMP-3 (C (63), P51): the same law either way; infinite temperature for a single key."""
    s = randn(9)
    torch.testing.assert_close(torch.softmax(s / 0.3, -1), torch.softmax(s * float(sh.scale_of_temperature(0.3)), -1))
    assert sh.effective_temperature(1024, 64, 2.0) == pytest.approx(64 / (2 * log(1024)))
    assert sh.effective_temperature(1, 64).isinf()
    assert sh.scale_of_temperature(sqrt(64)) == 0.125
    with pytest.raises(ValueRangeError, match="without keys"):
        sh.effective_temperature(0, 64)
    with pytest.raises(ValueRangeError, match="positive"):
        sh.scale_of_temperature(0.0)
