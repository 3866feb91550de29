"""Entropy of a row: M-ENT-*, M-DER-2..5, M-TMP-2, M-RMK-4."""

from __future__ import annotations

from math import log

import pytest
import torch
from draws import F64, close, randn, vector
from torch.autograd.functional import hessian, jacobian

from partita import Gibbs
from partita.errors import ShapeError, ValueRangeError
from partita.support import causal
from partita_theory import information as info


def test_entropy_is_log_z_minus_mean_logit():
    """M-ENT-1: the definition, torch's own, and the ends of the range."""
    z = 3 * randn(20, 11)
    p = torch.softmax(z, -1)
    direct = -(p * p.log()).sum(-1)
    close(info.entropy(z), direct)
    close(info.entropy(z), torch.logsumexp(z, -1) - (p * z).sum(-1))
    close(info.entropy_of(p), direct)
    keep = torch.rand(20, 11, generator=torch.Generator().manual_seed(1)) < 0.5
    h = info.entropy(z, keep)
    n = keep.sum(-1).clamp(min=1)
    assert (h >= 0).all()
    assert (h <= n.log() + 1e-12).all()
    assert info.entropy(torch.full((6,), 9.0, dtype=F64)) == pytest.approx(log(6))
    assert info.entropy(vector(800.0, 0.0)) == 0


def test_distance_to_uniform():
    """M-ENT-2 (P31): log n - H is the divergence from uniform on the visible keys; H itself falls as p moves away."""
    z = 2 * randn(9)
    p = torch.softmax(z, -1)
    kl = (p * (p * 9).log()).sum()
    assert info.kl_to_uniform(z) == pytest.approx(float(kl), abs=1e-13)
    keep = torch.tensor([True] * 4 + [False] * 5)
    q = torch.softmax(z[:4], -1)
    assert info.kl_to_uniform(z, keep) == pytest.approx(float((q * (4 * q).log()).sum()), abs=1e-13)
    assert info.entropy(2 * z) < info.entropy(z)
    fraction = info.normalized_entropy(torch.stack([z, torch.zeros(9, dtype=F64)]))
    assert 0 < fraction[0] < 1
    assert fraction[1] == pytest.approx(1)
    assert info.normalized_entropy(torch.zeros(1)).isnan()


def test_streaming_keeps_its_digits():
    """M-ENT-3: in float32 with offset 1e6 both of ours keep their digits; log Z - E[z] can have none after 1/16."""
    z = (randn(4096) + 1e6).to(torch.float32)
    truth = info.entropy(z.double())
    # float32 numbers near 1e6 are multiples of 1/16, and so is a difference of two of them, whatever was summed
    uncentred = torch.logsumexp(z, -1) - (torch.softmax(z, -1) * z).sum(-1)
    assert (16 * uncentred) % 1 == 0
    # Centred scores are exact here. H = log l - t / l has |log l| + 2 |t / l| < 20, each with a relative error of at
    # most 4096 roundings that do not all go one way: 20 * sqrt(4096) * 2^-24 = 8e-5.
    for ours in (info.entropy(z), info.streaming_entropy(z.split([1000, 1, 3095]))):
        assert (ours - truth).abs() < 8e-5


@pytest.mark.parametrize("order", [0, 1, 2])
def test_streaming_in_any_order_of_pieces(order):
    """M-ENT-3: rising, falling and masked pieces; -inf everywhere gives 0."""
    z = 5 * randn(3, 60)
    z = z.sort(-1, descending=order == 1).values if order else z
    z[0, 10:30] = -torch.inf
    close(info.streaming_entropy(z.split(7, -1)), info.entropy(z))
    assert info.streaming_entropy([torch.full((4,), -torch.inf)]) == 0
    with pytest.raises(ShapeError, match="at least one chunk"):
        info.streaming_entropy([])


def test_widths_are_ordered():
    """M-ENT-4: 1 <= n_eff <= exp H <= n, with equality for uniform rows; streaming agrees."""
    z = 3 * randn(50, 8)
    width, size = info.effective_width(z), info.effective_sample_size(z)
    p = torch.softmax(z, -1)
    close(size, 1 / p.square().sum(-1))
    close(width, torch.exp(-(p * p.log()).sum(-1)))
    assert (size >= 1 - 1e-12).all()
    assert (size <= width + 1e-12).all()
    assert (width <= 8 + 1e-12).all()
    assert info.effective_sample_size(torch.zeros(8)) == pytest.approx(8)
    assert info.effective_sample_size(torch.full((3,), -torch.inf)) == 0
    q, k = randn(6, 4), randn(6, 4, seed=1)
    h2 = info.renyi_entropy(q, k, scale=0.7, support=causal())
    w = Gibbs(q, k, scale=0.7, support=causal()).probs()
    close(h2, -w.square().sum(-1).log())
    log_mass = info.collision_log_mass(q, k, scale=0.7, support=causal())
    close(log_mass, w.square().sum(-1).log())
    h3 = info.renyi_entropy(q, k, order=3.0)
    close(h3, -torch.softmax(q @ k.T, -1).pow(3).sum(-1).log() / 2)
    with pytest.raises(ValueRangeError, match=r"Gibbs\.entropy"):
        info.renyi_entropy(q, k, order=1.0)


def test_bits():
    """M-ENT-5, M-RMK-4 (P45): bits are nats / ln 2, and a Huffman code lies between H and H + 1."""
    assert info.entropy(torch.zeros(1024, dtype=F64)) == pytest.approx(6.931, abs=1e-3)
    assert info.entropy(torch.zeros(1024, dtype=F64), base=2) == pytest.approx(10)
    p = torch.softmax(2 * randn(7), -1)
    heap = sorted(p.tolist())
    length = 0.0
    while len(heap) > 1:  # Huffman's mean length is the sum of all merged masses
        a = heap.pop(0) + heap.pop(0)
        length += a
        heap = sorted([*heap, a])
    low, high = info.code_length(info.entropy_of(p))
    assert low <= length < high
    assert low == pytest.approx(float(-(p * p.log2()).sum()))
    assert high - low == pytest.approx(1)
    with pytest.raises(ValueRangeError, match="exceed 1"):
        info.entropy(torch.zeros(2), base=1.0)


def test_elementary_bound_never_fails_and_never_estimates():
    """M-ENT-6 (C (10), (11), (13), (14), (16)): H >= log n - scale (max - mean), far below H for Gaussian scores."""
    s = 2 * randn(20000, 12)
    assert (info.entropy(s) >= info.entropy_lower_bound(s) - 1e-12).all()
    keep = torch.rand(20000, 12, generator=torch.Generator().manual_seed(2)) < 0.5
    assert (info.entropy(s, keep) >= info.entropy_lower_bound(s, 1.0, keep) - 1e-12).all()
    with pytest.raises(ValueRangeError, match="scale >= 0"):
        info.entropy_lower_bound(s, -1.0)


def test_bounds_from_the_largest_weight_hold_while_streaming():
    """M-ENT-1, M-SPA-2: -log p_max <= H <= Fano's bound, in every row of a causal law, its first row included."""
    p = Gibbs(2 * randn(40, 5), randn(40, 5, seed=1), support=causal())
    low, high = info.entropy_bounds(p)
    assert (low <= p.entropy() + 1e-12).all()
    assert (p.entropy() <= high + 1e-12).all()
    assert high[0] == 0
    dense = -p.probs().amax(-1).log()
    close(low, dense)


def test_log_partition_cumulants():
    """M-DER-2: three derivatives of log Z by the scale, and two by the logits, against autograd."""
    s, b = randn(9), randn(9, seed=1)
    x = torch.tensor(0.8, dtype=F64, requires_grad=True)
    log_z = torch.logsumexp(x * s + b, -1)
    (d1,) = torch.autograd.grad(log_z, x, create_graph=True)
    (d2,) = torch.autograd.grad(d1, x, create_graph=True)
    (d3,) = torch.autograd.grad(d2, x)
    got = info.score_cumulants(s, 0.8, b)
    close(torch.stack(list(got)), torch.stack([d1, d2, d3]).detach())
    z = 0.8 * s + b
    p = torch.softmax(z, -1)
    close(jacobian(lambda t: torch.logsumexp(t, -1), z), p)
    close(hessian(lambda t: torch.logsumexp(t, -1), z), torch.diag(p) - torch.outer(p, p))
    keep = s > -0.5
    c = info.score_cumulants(torch.where(keep, s, torch.nan), 1.0, None, keep)
    assert c.variance == pytest.approx(float(info.score_cumulants(s[keep]).variance))


def test_entropy_gradient_by_logits():
    """M-DER-3: autograd, the sum rule, and the sign: raising a score above the mean lowers H."""
    z = randn(4, 7).requires_grad_()
    info.entropy(z).sum().backward()
    got = info.entropy_gradient(z.detach())
    close(got, z.grad)
    assert got.sum(-1).abs().max() < 1e-14
    p = torch.softmax(z.detach(), -1)
    above = z.detach() > (p * z.detach()).sum(-1, keepdim=True)
    assert (got[above] < 0).all()
    close(got, -p * (p.log() + info.entropy(z.detach())[:, None]))


def test_entropy_derivatives_by_scale():
    """M-DER-4: first and second derivative by scale, by temperature, with bias; streaming slope."""
    s, b = randn(9), randn(9, seed=1)
    x = torch.tensor(1.3, dtype=F64, requires_grad=True)
    (d1,) = torch.autograd.grad(info.entropy(x * s), x, create_graph=True)
    (d2,) = torch.autograd.grad(d1, x)
    assert info.entropy_scale_derivative(s, 1.3) == pytest.approx(d1.item())
    assert info.entropy_scale_curvature(s, 1.3) == pytest.approx(d2.item())
    (d,) = torch.autograd.grad(info.entropy(x * s + b), x)
    assert info.entropy_scale_derivative(s, 1.3, b) == pytest.approx(d.item())
    t = torch.tensor(0.6, dtype=F64, requires_grad=True)
    (d,) = torch.autograd.grad(info.entropy(s / t), t)
    assert info.entropy_temperature_derivative(s, 0.6) == pytest.approx(d.item())
    q, k = randn(5, 3), randn(8, 3, seed=1)
    got = info.entropy_scale_slope(Gibbs(q, k, scale=1.3))
    close(got, info.entropy_scale_derivative(q @ k.T, 1.3))
    rows = vector(0.5, 1.0, 2.0, 0.1, 3.0)
    got = info.entropy_scale_slope(Gibbs(q, k, scale=rows))
    close(got, info.entropy_scale_derivative(q @ k.T, rows))
    with pytest.raises(ValueRangeError, match="no bias"):
        info.entropy_scale_slope(Gibbs(q, k, bias=randn(5, 8)))


def test_entropy_is_monotone_without_bias_only():
    """M-DER-4, M-TMP-2, M-GIB-3: falls from log n to log(maximisers); with bias -2s it rises first."""
    s = randn(200)
    s[:2] = s.max() + 0.1
    from partita_theory.sharpness import entropy_sweep

    h = entropy_sweep(s, torch.logspace(-3, 4, 60, dtype=F64))
    assert (h.diff() >= -1e-12).all()
    assert h[0] == pytest.approx(log(2), abs=1e-6)
    assert h[-1] == pytest.approx(log(200), abs=1e-6)
    assert info.entropy(-1.0 * s) < log(200)  # scale 0 is the maximum, on both sides
    g = randn(200, seed=3)
    curve = [float(info.entropy(x * g - 2 * g)) for x in range(5)]
    assert curve[2] == pytest.approx(log(200))
    assert curve[0] < curve[1] < curve[2] > curve[3] > curve[4]
    slopes = [float(info.entropy_scale_derivative(g, x, -2 * g)) for x in (0.0, 1.0, 3.0, 4.0)]
    assert [v > 0 for v in slopes] == [True, True, False, False]


def test_weight_derivative_by_scale():
    """M-DER-5: against autograd, by scale and by temperature."""
    s, b = randn(6), randn(6, seed=1)
    jac = jacobian(lambda x: torch.softmax(x * s + b, -1), torch.tensor(0.9, dtype=F64))
    close(info.weight_scale_derivative(s, 0.9, b), jac)
    jac = jacobian(lambda t: torch.softmax(s / t, -1), torch.tensor(0.5, dtype=F64))
    close(-(2.0**2) * info.weight_scale_derivative(s, 2.0), jac)
