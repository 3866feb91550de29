"""Policies: each is its equation, counts visible keys, and orders the growth of entropy as M-SCL-17 measured."""

from __future__ import annotations

import math

import pytest
import torch

import partita
from partita import scale, support
from partita.errors import ShapeError, ValueRangeError
from tests import reference
from tests.strategies import catalogue, problem
from tests.tolerances import assert_exact

N = torch.tensor([1, 2, 3, 5, 17, 123, 512, 4096], dtype=torch.float64)

EQUATIONS = {
    "InverseSqrt": (scale.InverseSqrt(), reference.inverse_sqrt, {}),
    "Constant": (scale.Constant(0.37), reference.constant, {"x": 0.37}),
    "KappaLog": (scale.KappaLog(), reference.kappa_log, {}),
    "KappaLog(2.5)": (scale.KappaLog(kappa=2.5), reference.kappa_log, {"kappa": 2.5}),
    "LogLength": (scale.LogLength(), reference.log_length, {}),
    "LogLength(123)": (scale.LogLength(reference=123, floor=2), reference.log_length, {"reference": 123, "floor": 2}),
    "SqrtLogLength": (scale.SqrtLogLength(), reference.sqrt_log_length, {}),
    "SqrtLogLength(123)": (scale.SqrtLogLength(reference=123), reference.sqrt_log_length, {"reference": 123}),
    "Mixed": (scale.Mixed(), reference.mixed, {}),
    "Mixed(0.9, 0.3)": (scale.Mixed(alpha=0.9, beta=0.3), reference.mixed, {"alpha": 0.9, "beta": 0.3}),
    "MaxLength": (scale.MaxLength(65536), reference.max_length, {"n_max": 65536}),
    "MaxLength(99, 2)": (scale.MaxLength(99, kappa=2.0), reference.max_length, {"n_max": 99, "kappa": 2.0}),
    "CalibratedLog": (scale.CalibratedLog(4096, 8.0), reference.calibrated_log, {"reference": 4096, "sigma": 8.0}),
    "GaussianEntropy": (scale.GaussianEntropy(4.0, 8.0), reference.gaussian_entropy, {"entropy": 4.0, "sigma": 8.0}),
}


@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize("name", EQUATIONS)
def test_a_policy_is_its_equation(name, dim):
    """M-SCL-1, M-SCL-2, M-SCL-3, M-SCL-4, M-SCL-7, M-SCL-14, M-SCL-16."""
    policy, equation, options = EQUATIONS[name]
    assert_exact(policy(N, dim), equation(N, dim, **options))


def test_scalable_softmax_is_its_equation():
    policy = scale.ScalableSoftmax(3).double()
    (parameter,) = policy.parameters()
    with torch.no_grad():
        parameter.copy_(torch.tensor([0.5, 1.0, 2.0]))
    n = N.expand(2, 3, 8)
    assert_exact(policy(n, 16).detach(), reference.scalable_softmax(n, 16, parameter.detach()))


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_row_without_keys_has_a_finite_scale(name):
    policy, _, _ = EQUATIONS[name]
    assert policy(torch.zeros(3, dtype=torch.float64), 7).isfinite().all()


@pytest.mark.parametrize("name", [*EQUATIONS, "ScalableSoftmax"])
def test_fold_multiplies_the_query(name):
    """M-SCL-20: a folded query at scale 1 is the query at the policy's scale."""
    policy = scale.ScalableSoftmax(3).double() if name == "ScalableSoftmax" else EQUATIONS[name][0]
    p = problem(7, 7, batch=(2, 3), support=catalogue(7, 7)["causal"])
    visible = p.support.visible(7, 7, (2, 3)).double()
    folded = policy.fold(p.query, visible)
    assert folded.shape == p.query.shape
    assert_exact(p.gibbs(query=folded).entropy().detach(), p.gibbs(scale=policy).entropy().detach())


class _Shrinks(scale.LogLength):
    """A user's policy that reads the query."""

    def __call__(self, visible, dim, query=None):
        return super().__call__(visible, dim, query) / (1 + query.square().mean(-1))


@pytest.mark.parametrize("n_key", [1, 17, 300])
@pytest.mark.parametrize("name", EQUATIONS)
def test_where_every_row_sees_every_key_a_policy_is_one_number(name, n_key):
    policy, equation, options = EQUATIONS[name]
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, n_key, n_key))
    scores = equation(torch.tensor(n_key, dtype=torch.float64), 8, **options) * q @ k.mT
    out, stats = partita.attention(q, k, v, scale=policy, return_stats=True)
    assert_exact(out, scores.softmax(-1) @ v)
    assert_exact(stats.log_partition, scores.logsumexp(-1))
    number = policy.number(n_key, 8)
    assert number is not None
    n = torch.tensor(n_key, dtype=torch.float64)
    assert_exact(torch.tensor(number, dtype=torch.float64), equation(n, 8, **options))


@pytest.mark.parametrize(
    "policy",
    [_Shrinks(64), scale.ScalableSoftmax(3), scale.CriticalScale(64, (0.5, 1.0, 2.0)), scale.TargetEntropy(width=4.0)],
    ids=lambda policy: type(policy).__name__,
)
def test_a_policy_of_more_than_length_is_no_number(policy):
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 17, 17))
    assert policy.number(17, 8) is None
    with torch.no_grad():
        short = partita.attention(q, k, v, scale=policy)
        assert_exact(short, partita.attention(q, k, v, scale=policy, attn_mask=torch.ones(5, 17, dtype=torch.bool)))


def test_logarithmic_policies_equal_the_standard_one_at_their_reference():
    """M-SCL-7."""
    for policy in (scale.LogLength(reference=512), scale.SqrtLogLength(reference=512)):
        assert float(policy(512, 64)) == pytest.approx(1 / 8, abs=1e-15)


def test_the_floor_keeps_short_rows_from_being_flattened():
    for kind in (scale.LogLength, scale.SqrtLogLength):
        assert float(kind()(1, 64)) == float(kind()(4, 64)) > 0
        assert float(kind(floor=7)(5, 64)) == float(kind(floor=7)(7, 64))
    assert float(scale.KappaLog()(1, 64)) == 0  # the notes' own formula has no floor: one key needs no sharpness


def test_policies_see_visible_keys_never_the_padded_length():
    """M-SCL-5: what is appended and hidden by lengths changes nothing."""
    p = problem(7, 9)
    longer = torch.cat([p.key, torch.randn(20, 5).double()])
    for name, (policy, _, _) in EQUATIONS.items():
        short = partita.Gibbs(p.query, p.key, scale=policy).entropy()
        padded = partita.Gibbs(p.query, longer, scale=policy, support=support.lengths(9)).entropy()
        assert_exact(padded, short), name


def test_a_bias_of_minus_infinity_counts_as_hidden_for_policies():
    p = problem(7, 9)
    bias = torch.zeros(7, 9, dtype=torch.float64).masked_fill(torch.rand(7, 9) < 0.3, -torch.inf)
    a = p.gibbs(bias=bias, scale=scale.KappaLog(kappa=3.0)).entropy()
    b = p.gibbs(support=support.mask(bias == 0), scale=scale.KappaLog(kappa=3.0)).entropy()
    assert_exact(a, b)


def test_temperature_is_the_inverse_of_scale():
    """M-TMP-1: scores times from_temperature(t) are scores divided by t, for a number and for one per row."""
    p = problem(7, 9)
    s = reference.score(p.query, p.key)
    each = torch.linspace(0.2, 3.0, 7, dtype=torch.float64)
    for t in (0.25, 3.0, each):
        divided = s / (t[:, None] if isinstance(t, torch.Tensor) else t)
        law = partita.Gibbs(p.query, p.key, scale=scale.from_temperature(t))
        assert_exact(law.probs().detach(), divided.detach().softmax(-1))


# The table of M-SCL-17 ------------------------------------------------------------


def test_slopes_of_entropy_are_ordered_as_measured():
    """M-SCL-17: dH / dlog n between 2^9 and 2^13, the same draws for every policy."""
    policies = [
        scale.InverseSqrt(),  # 0.994
        scale.MaxLength(65536),  # 0.985
        scale.Mixed(),  # 0.978
        scale.SqrtLogLength(512),  # 0.910
        scale.KappaLog(),  # 0.855
        scale.LogLength(512),  # 0.762
        scale.CalibratedLog(4096, 8.0),  # 0.166
        scale.GaussianEntropy(4.0, 8.0),  # 0.183
    ]
    short, long, dim = 512, 8192, 64
    g = torch.Generator().manual_seed(17)
    totals = torch.zeros(len(policies), 2)
    for _ in range(3):
        query, key = torch.randn(32, dim, generator=g), torch.randn(long, dim, generator=g)
        for row, policy in enumerate(policies):
            for column, n in enumerate((short, long)):
                totals[row, column] += partita.Gibbs(query, key[:n], scale=policy).entropy().mean() / 3
    slopes = (totals[:, 1] - totals[:, 0]) / math.log(long / short)
    assert (slopes[:5].diff() < 0).all(), slopes
    assert slopes[5] < slopes[4] - 0.03, slopes
    assert slopes[6:].abs().max() < 0.35, slopes  # both calibrated policies are nearly flat
    assert slopes[:3].min() > 0.95, slopes  # and the usual ones are not invariant at all
    assert totals[0, 0] == pytest.approx(5.74, abs=0.05)  # 1/sqrt(d) at 2^9, as in the table
    assert totals[6, 0] == pytest.approx(4.18, abs=0.15)


def test_calibrated_log_makes_the_entropy_stationary_at_its_reference():
    """M-SCL-16: for Gaussian scores of deviation sigma H is about log(n0) / 2 at n0, and grows slowly around it."""
    n0, sigma, rows, g = 4096, 3.0, 256, torch.Generator().manual_seed(3)
    policy = scale.CalibratedLog(n0, sigma)
    found = []
    for n in (n0 // 4, n0, n0 * 4):
        key = sigma * torch.randn(rows, n, 1, generator=g)
        found.append(partita.Gibbs(torch.ones(rows, 1, 1), key, scale=policy).entropy())
    means = [float(h.mean()) for h in found]
    error = max(float(h.std()) for h in found) / rows**0.5
    # The law is leading order: at this n0 the table of M-SCL-17 (unit-variance vectors, which scatter more) has 4.67
    # for 4.16, and 0.58 between 2^10 and 2^14 where the law has 0. Without control it would be log 16 = 2.77.
    assert means[1] == pytest.approx(math.log(n0) / 2, abs=0.6 + 5 * error)
    assert max(means) - min(means) < 0.7 + 5 * error


def test_gaussian_entropy_hits_its_target_on_gaussian_scores():
    """M-SCL-12, M-SCL-14: H = log n - (scale sigma)^2 / 2 while that is small."""
    sigma, target, g = 2.0, 6.0, torch.Generator().manual_seed(4)
    for n in (1024, 4096):
        key = sigma * torch.randn(64, n, 1, generator=g)
        gibbs = partita.Gibbs(torch.ones(64, 1, 1), key, scale=scale.GaussianEntropy(target, sigma))
        assert float(gibbs.entropy().mean()) == pytest.approx(target, abs=0.25)


# sigma ------------------------------------------------------------


def test_measured_sigma_is_the_deviation_of_a_rows_scores():
    """M-SCL-1: over the keys of one row, pooled over rows with two keys or more."""
    p = problem(7, 13, support=catalogue(7, 13)["causal"])
    s = reference.score(p.query, p.key, visible=p.visible)
    variances = [row[row.isfinite()].var(correction=0) for row in s if row.isfinite().sum() >= 2]
    assert float(scale.measure_sigma(p.query, p.key, p.support)) == pytest.approx(
        float(torch.stack(variances).mean().sqrt()), rel=1e-12
    )


def test_measured_sigma_is_root_dim_for_unit_variance():
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(n, 64, generator=g) for n in (200, 2000))
    assert float(scale.measure_sigma(query, key)) == pytest.approx(8.0, rel=0.03)


def test_the_critical_scale_is_its_definition():
    """M-COL-6: the largest log(j) / gap_j over the ordered gaps; hidden keys are not counted."""
    scores = torch.randn(5, 40, dtype=torch.float64).masked_fill(torch.rand(5, 40) < 0.2, -math.inf)
    for row, found in zip(scores.tolist(), scale.critical_scale(scores).tolist(), strict=True):
        gaps = sorted(max(row) - s for s in row if s > -math.inf)
        assert found == pytest.approx(max(math.log(j) / gap for j, gap in enumerate(gaps[1:], 2)))


def test_edge_cases_of_the_critical_scale():
    inf = math.inf
    assert scale.critical_scale(torch.tensor([1.0, 1.0, 0.0])).item() == inf  # a tie never parts
    assert scale.critical_scale(torch.tensor([1.0, 1.0, 0.0]), least=3).item() == pytest.approx(math.log(3))
    assert scale.critical_scale(torch.tensor([[1.0], [2.0]])).tolist() == [0.0, 0.0]
    assert scale.critical_scale(torch.tensor([3.0, -inf, -inf])).item() == 0.0
    assert scale.critical_scale(torch.tensor([-inf, -inf])).item() == 0.0
    with pytest.raises(ValueRangeError, match="least"):
        scale.critical_scale(torch.zeros(3), least=1)


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
