"""Cross entropy, squared error and their relatives: M-LOSS-1..10, M-RMK-6, M-TMP-4."""

from __future__ import annotations

from math import log

import pytest
import torch
from draws import F64, autograd, close, randn, vector
from torch.autograd.functional import hessian
from torch.nn import functional as F

from partita.errors import ValueRangeError
from partita_theory import geometry as geo
from partita_theory import sharpness
from partita_theory.information import entropy_of


def test_cross_entropy_and_its_floor():
    """M-LOSS-1 (C u1, P13): torch's, H + KL, and -log p_c only for one-hot targets."""
    z, y = randn(6, 5), torch.softmax(randn(6, 5, seed=1), -1)
    close(geo.soft_cross_entropy(z, y), F.cross_entropy(z, y, reduction="none"))
    floor, fault = geo.cross_entropy_decomposition(z, y)
    close(floor + fault, geo.soft_cross_entropy(z, y))
    assert (fault > 0).all()
    one_hot = F.one_hot(torch.tensor([2]), 5).to(F64)
    assert geo.soft_cross_entropy(z[:1], one_hot) == pytest.approx(float(-torch.log_softmax(z[0], -1)[2]))
    soft = vector(0.9, 0.05, 0.05)
    assert geo.soft_cross_entropy(z[0, :3], soft) != pytest.approx(float(-torch.log_softmax(z[0, :3], -1)[0]), rel=0.01)
    twice = geo.soft_cross_entropy(z, 2 * y)
    close(twice, 2 * geo.soft_cross_entropy(z, y))


def test_cross_entropy_gradients_by_every_argument():
    """M-LOSS-2 (W (4.3.3)): logits, probabilities, target, weight, bias, input, against autograd; the sign is plus."""
    x, w, b, y = randn(7, 4), randn(3, 4, seed=1), randn(3, seed=2), torch.softmax(randn(7, 3, seed=3), -1)
    g = geo.cross_entropy_gradients(x, w, y, b)
    z = x @ w.T + b
    p = torch.softmax(z, -1)

    def loss(z, y=y):
        return geo.soft_cross_entropy(z, y).mean()

    close(g.logits, autograd(loss, z))
    close(g.weight, autograd(lambda w: loss(x @ w.T + b), w))
    close(g.bias, autograd(lambda b: loss(x @ w.T + b), b))
    close(g.inputs, autograd(lambda x: loss(x @ w.T + b), x))
    close(g.probs, autograd(lambda p: -(y * p.log()).sum(-1).mean(), p))
    close(g.target, autograd(lambda y: -(y * p.log()).sum(-1).mean(), y))
    double = geo.cross_entropy_gradients(x, w, 2 * y, b)
    close(double.logits, autograd(lambda z: loss(z, 2 * y), z))


def test_where_gradients_vanish():
    """M-LOSS-2, M-LOSS-5 (P15, P16): cross entropy on the right side only, squared error on both."""
    z = vector(-8.0, -4.0, 0.0, 4.0, 8.0)
    mse, ce = geo.sigmoid_gradients(z, torch.ones(5, dtype=F64))
    close(ce.abs(), vector(0.9997, 0.982, 0.5, 0.018, 0.0003), atol=5e-5, rtol=2e-2)
    assert mse.abs()[0] < 1e-3
    assert mse.abs()[-1] < 1e-3


def test_cross_entropy_hessians():
    """M-LOSS-3 (W (4.3.5), (4.3.6)): Kronecker order, PSD, null space, product, against autograd."""
    x, w, y = randn(5, 4), randn(3, 4, seed=1), F.one_hot(torch.tensor([0, 1, 2, 0, 1]), 3).to(F64)
    p = torch.softmax(x @ w.T, -1)
    h = geo.cross_entropy_hessian_weights(x, p)
    auto = hessian(lambda v: geo.soft_cross_entropy(x @ v.reshape(3, 4).T, y).mean(), w.flatten())
    close(h, auto)
    kron = sum(torch.kron(geo.softmax_jacobian(p[i]), torch.outer(x[i], x[i])) for i in range(5)) / 5
    swapped = sum(torch.kron(torch.outer(x[i], x[i]), geo.softmax_jacobian(p[i])) for i in range(5)) / 5
    close(h, kron)
    assert (h - swapped).norm() / h.norm() > 0.3
    summary = geo.curvature_summary(h)
    assert summary.convex
    assert summary.null == 4
    values = torch.linalg.eigvalsh(auto)
    assert summary.largest == pytest.approx(values.max().item())
    assert summary.smallest == pytest.approx(0, abs=1e-12)
    assert summary.trace == pytest.approx(auto.trace().item())
    u = randn(3, 4, seed=2)
    close(geo.cross_entropy_hvp(x, p, u).flatten(), h @ u.flatten())
    z = randn(3, seed=5)
    auto = hessian(lambda z: geo.soft_cross_entropy(z, y[0]), z)
    close(geo.cross_entropy_hessian_logits(torch.softmax(z, -1)), auto)
    # binary: (1/N) sum p (1 - p) x x^T
    q = torch.sigmoid(x @ w[0])
    binary = hessian(lambda v: F.binary_cross_entropy_with_logits(x @ v, y[:, 0]), w[0])
    close(torch.einsum("n,ni,nj->ij", q * (1 - q), x, x) / 5, binary)


def test_squared_error_of_a_linear_model():
    """M-LOSS-4 (C (4.3.1), (4.3.4)): both conventions; the ratio is exactly 2; torch's MSELoss has no half."""
    x, w, b, y = randn(9, 3), randn(3, seed=1), randn(1, seed=2), randn(9, seed=3)
    g, h = geo.squared_error_gradients(x, y, x @ w + b), geo.squared_error_gradients(x, y, x @ w + b, half=True)
    close(g.weight, autograd(lambda w: F.mse_loss(x @ w + b, y), w))
    close(g.bias, autograd(lambda b: F.mse_loss(x @ w + b, y), b).squeeze())
    close(g.prediction, autograd(lambda o: F.mse_loss(o, y), x @ w + b))
    close(g.weight, 2 * h.weight)
    close(geo.squared_error_hessian(x), hessian(lambda w: F.mse_loss(x @ w + b, y), w))
    many, target = randn(2, 3, seed=4), randn(9, 2, seed=5)
    auto = hessian(lambda v: 0.5 * (x @ v.reshape(2, 3).T - target).square().sum(-1).mean(), many.flatten())
    close(geo.squared_error_hessian(x, 2, half=True), auto)


def test_squared_error_through_sigmoid_and_softmax():
    """M-LOSS-5 (W (4.3.2), P19): gradients, curvature, non-convexity; the literal formula points the other way."""
    z, y = 2 * randn(20), torch.randint(0, 2, (20,), generator=torch.Generator().manual_seed(1)).to(F64)
    grad = autograd(lambda z: (torch.sigmoid(z) - y).square().sum(), z)
    close(geo.sigmoid_squared_error_gradient(z, y), grad)
    curvature = hessian(lambda z: (torch.sigmoid(z) - y).square().sum(), z).diagonal()
    close(geo.sigmoid_squared_error_curvature(z, y), curvature)
    at = geo.sigmoid_squared_error_curvature(torch.tensor(-3.0, dtype=F64), torch.tensor(1.0, dtype=F64))
    assert at == pytest.approx(-0.0738, abs=5e-5)
    logits, target = randn(6, 4), F.one_hot(torch.arange(6) % 4, 4).to(F64)
    full = autograd(lambda z: (torch.softmax(z, -1) - target).square().sum(), logits)
    close(geo.softmax_squared_error_gradient(logits, target), full)
    p = torch.softmax(logits, -1)
    diagonal_only = 2 * p * (1 - p) * (p - target)
    assert (diagonal_only - full).norm() / full.norm() > 0.2
    for i in range(6):
        auto = hessian(lambda z, i=i: (torch.softmax(z, -1) - target[i]).square().sum(), logits[i])
        close(geo.softmax_squared_error_hessian(logits[i], target[i]), auto)
    wrong = vector(5.0, 0.0, 0.0)
    bent = geo.curvature_summary(geo.softmax_squared_error_hessian(wrong, vector(0.0, 1.0, 0.0)))
    assert not bent.convex


def test_attenuation_of_squared_error():
    """M-LOSS-5, M-DER-7: never above 1, tiny where the model is confidently wrong."""
    z, y = 4 * randn(500, 5), F.one_hot(torch.arange(500) % 5, 5).to(F64)
    a = geo.gradient_attenuation(z, y)
    assert (a <= 1 + 1e-12).all()
    wrong = vector(12.0, 0.0, 0.0)
    assert geo.gradient_attenuation(wrong, vector(0.0, 1.0, 0.0)) < 1e-4
    p = torch.softmax(z, -1)
    close(a, geo.softmax_squared_error_gradient(z, y).norm(dim=-1) / (p - y).norm(dim=-1))


def test_weighted_cross_entropy():
    """M-LOSS-7: gradient under both normalisations, against torch; weight 0 throughout is refused."""
    z, t, w = randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 0]), vector(1.0, 3.0, 0.5)
    auto = autograd(lambda z: F.cross_entropy(z, t, weight=w), z)
    close(geo.weighted_cross_entropy_gradient(z, t, w), auto)
    auto = autograd(lambda z: F.cross_entropy(z, t, weight=w, reduction="sum") / 6, z)
    close(geo.weighted_cross_entropy_gradient(z, t, w, by_weight=False), auto)
    with pytest.raises(ValueRangeError, match="weight 0"):
        geo.weighted_cross_entropy_gradient(z, t, torch.zeros(3, dtype=F64))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_focal_gradient(gamma):
    """M-LOSS-8: against autograd for every gamma, gamma 0 is cross entropy; finite at p_t = 1."""
    z, t = randn(8, 4), torch.arange(8) % 4

    def focal(z):
        log_t = torch.log_softmax(z, -1).gather(-1, t[:, None])[:, 0]
        return -(0.7 * (1 - log_t.exp()) ** gamma * log_t).sum()

    close(geo.focal_gradient(z, t, gamma, 0.7), autograd(focal, z))
    sure = vector(60.0, 0.0)
    assert geo.focal_gradient(sure, torch.tensor(0), gamma).isfinite().all()


def test_label_smoothing():
    """M-LOSS-9 (P39): torch's value, its parts, its floor; it is KL(u||p), an entropy bonus is KL(p||u)."""
    z, t = randn(6, 5), torch.arange(6) % 5
    parts = geo.label_smoothing_parts(z, t, 0.1)
    close(parts.loss, F.cross_entropy(z, t, label_smoothing=0.1, reduction="none"))
    close(parts.loss, 0.9 * parts.hard + 0.1 * (parts.to_uniform + log(5)))
    u = torch.full((5,), 0.2, dtype=F64)
    close(parts.to_uniform, geo.kl(u.expand(6, 5), torch.softmax(z, -1)))
    smooth = 0.9 * F.one_hot(t, 5).to(F64) + 0.02
    auto = autograd(lambda z: geo.label_smoothing_parts(z, t, 0.1).loss.sum(), z)
    close(auto, torch.softmax(z, -1) - smooth)
    assert geo.smoothing_floor(5, 0.1) == pytest.approx(0.3897, abs=5e-5)
    assert geo.label_smoothing_parts(smooth.log(), t, 0.1).loss[0] == pytest.approx(0.3897, abs=5e-5)
    assert entropy_of(smooth[0]) == pytest.approx(0.3897, abs=5e-5)


def test_noise_models_are_normalised():
    """M-LOSS-10, M-RMK-6 (P14): exp(-nll) integrates to 1; MSE and MAE are their minimisers; hinge is no likelihood."""
    r = torch.linspace(-60, 60, 400_001, dtype=F64)
    assert torch.trapezoid(torch.exp(-geo.gaussian_nll(r, 1.7)), r) == pytest.approx(1, abs=1e-8)
    assert torch.trapezoid(torch.exp(-geo.laplace_nll(r, 0.6)), r) == pytest.approx(1, abs=1e-6)
    x = randn(101)
    centres = torch.linspace(-1, 1, 4001, dtype=F64)
    by_square = centres[geo.gaussian_nll(x[:, None] - centres, 1.0).sum(0).argmin()]
    by_abs = centres[geo.laplace_nll(x[:, None] - centres, 1.0).sum(0).argmin()]
    assert by_square == pytest.approx(float(x.mean()), abs=1e-3)
    assert by_abs == pytest.approx(float(x.median()), abs=1e-3)
    z, t = randn(4, 3), torch.arange(4) % 3
    p = torch.softmax(z, -1)
    one_hot = F.one_hot(t, 3).to(F64)
    close(geo.absolute_error(p, t), (p - one_hot).abs().sum(-1))
    auto = autograd(lambda z: geo.absolute_error(torch.softmax(z, -1), t).sum(), z)
    close(auto, -2 * p.gather(-1, t[:, None]) * (one_hot - p))


def test_distillation():
    """M-TMP-4: value against torch's KL, gradient T (p_s - p_t), comparable across temperatures."""
    teacher, student = randn(6, 5), randn(6, 5, seed=1)
    for t in (1.0, 3.0):
        value = sharpness.distillation_loss(teacher, student, t)
        kl = F.kl_div(torch.log_softmax(student / t, -1), torch.softmax(teacher / t, -1), reduction="none").sum(-1)
        close(value, t**2 * kl)
        auto = autograd(lambda s, t=t: sharpness.distillation_loss(teacher, s, t).sum(), student)
        close(sharpness.distillation_gradient(teacher, student, t), auto)
    sizes = [float(sharpness.distillation_gradient(teacher, student, t).norm()) for t in (10.0, 100.0)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
