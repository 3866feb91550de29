"""Losses of explicit logits: values by hand, gradients in closed form, and what the printed formulas got wrong."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import partita
from partita.losses import (
    brier_loss,
    cross_entropy,
    distillation_loss,
    focal_loss,
    linear_distillation_loss,
    mae_loss,
    mse_loss,
    nce_loss,
)
from tests.losses.checks import assert_equal_with_gradients, leaf


def jacobian(p):
    return torch.diag(p) - torch.outer(p, p)


def test_the_gradient_of_cross_entropy_is_p_minus_y_with_a_plus():
    """M-LOSS-2; the minus sign of the printed formula points uphill."""
    x, w, target = torch.randn(9, 4).double(), leaf(3, 4), torch.randint(3, (9,))
    (grad,) = torch.autograd.grad(cross_entropy(x @ w.mT, target), w)
    residual = (x @ w.mT).softmax(-1) - F.one_hot(target, 3)
    torch.testing.assert_close(grad, residual.mT @ x / 9)
    down, up = (cross_entropy(x @ (w - step * grad).mT, target) for step in (0.01, -0.01))
    assert down < cross_entropy(x @ w.mT, target) < up


def test_soft_targets_are_not_the_surprise_of_the_likeliest_class():
    """M-LOSS-1: cross entropy is H(y) + KL(y || p)."""
    z, y = leaf(1, 3), torch.tensor([[0.9, 0.05, 0.05]]).double()
    p = z.softmax(-1)
    entropy, divergence = -(y * y.log()).sum(), (y * (y / p).log()).sum()
    torch.testing.assert_close(cross_entropy(z, y), entropy + divergence)


def test_the_hessian_is_a_kronecker_product_and_positive_semidefinite():
    """M-LOSS-3: (1/N) sum J(p) kron x x^T; the other order is another matrix."""
    x, w, target = torch.randn(5, 4).double(), torch.randn(3, 4).double(), torch.randint(3, (5,))
    full = torch.autograd.functional.hessian(lambda v: cross_entropy(x @ v.mT, target), w).reshape(12, 12)
    p = (x @ w.mT).softmax(-1)
    right = sum(torch.kron(jacobian(p[i]), torch.outer(x[i], x[i])) for i in range(5)) / 5
    swapped = sum(torch.kron(torch.outer(x[i], x[i]), jacobian(p[i])) for i in range(5)) / 5
    torch.testing.assert_close(full, right)
    assert (full - swapped).norm() / full.norm() > 0.1
    eigenvalues = torch.linalg.eigvalsh(full)
    assert eigenvalues.min() > -1e-12
    assert int((eigenvalues < 1e-10).sum()) >= 4  # adding one vector to all classes changes nothing


def test_weighted_means_divide_by_weights_or_by_rows():
    """M-LOSS-7."""
    z, target, weight = leaf(9, 3), torch.randint(3, (9,)), torch.tensor([0.2, 1.0, 5.0]).double()
    rows = weight[target] * F.cross_entropy(z, target, reduction="none")
    torch.testing.assert_close(cross_entropy(z, target, weight=weight), rows.sum() / weight[target].sum())
    by_rows = cross_entropy(z, target, weight=weight, reduction="sum") / 9
    torch.testing.assert_close(by_rows, rows.mean())
    (grad,) = torch.autograd.grad(by_rows, z)
    torch.testing.assert_close(grad, weight[target][:, None] * (z.softmax(-1) - F.one_hot(target, 3)) / 9)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("alpha", [None, 0.25, "classes"])
def test_focal_loss_and_its_gradient(gamma, alpha):
    """M-LOSS-8: dL/dz = a [ g (1-p)^(g-1) p log p - (1-p)^g ] (e_t - p)."""
    z, target = leaf(9, 4), torch.randint(4, (9,))
    a = torch.tensor([0.1, 0.5, 1.0, 2.0]).double() if alpha == "classes" else alpha
    factor = a[target] if alpha == "classes" else torch.full((9,), 1.0 if alpha is None else alpha).double()
    p = z.detach().softmax(-1)
    own = p.gather(1, target[:, None])[:, 0]
    loss = focal_loss(z, target, gamma=gamma, alpha=a, reduction="none")
    torch.testing.assert_close(loss, -factor * (1 - own) ** gamma * own.log())
    slope = gamma * (1 - own) ** (gamma - 1) * own * own.log() - (1 - own) ** gamma
    (grad,) = torch.autograd.grad(loss.sum(), z)
    torch.testing.assert_close(grad, (factor * slope)[:, None] * (F.one_hot(target, 4) - p))


def test_focal_loss_is_finite_where_the_row_is_surely_right():
    """M-LOSS-8: for gamma < 1 the factor (1-p)^(gamma-1) is infinite at p = 1, the gradient is not."""
    z = torch.tensor([[1e4, 0.0], [0.0, 0.0]], requires_grad=True)
    focal_loss(z, torch.tensor([0, 0]), gamma=0.5).backward()
    assert z.grad.isfinite().all()
    assert (z.grad[0] == 0).all()


def test_squared_error_through_the_softmax_has_the_whole_jacobian():
    """M-LOSS-5: 2 J(p) (p - y); dropping the off-diagonal part is another vector."""
    z, target = leaf(5), torch.tensor(2)
    y, p = F.one_hot(target, 5).double(), z.detach().softmax(-1)
    (grad,) = torch.autograd.grad(mse_loss(z, target), z)
    torch.testing.assert_close(grad, 2 * jacobian(p) @ (p - y))
    elementwise = 2 * p * (1 - p) * (p - y)
    assert (grad - elementwise).norm() / grad.norm() > 0.05


def test_squared_error_vanishes_where_it_is_surely_wrong_and_cross_entropy_does_not():
    """M-LOSS-2, M-LOSS-5, M-LOSS-10: y = 1 at z = -8, in two classes."""
    z, target = torch.tensor([[-8.0, 0.0]]).double().requires_grad_(), torch.tensor([0])
    pull = {f: torch.autograd.grad(f(z, target), z)[0].abs().max() for f in (cross_entropy, mse_loss, mae_loss)}
    assert pull[cross_entropy] > 0.999
    assert pull[mse_loss] < 2e-3 and pull[mae_loss] < 2e-3
    torch.testing.assert_close(mse_loss(z, target, on="logits"), ((z - torch.tensor([1.0, 0.0])) ** 2).sum())
    assert torch.autograd.grad(mse_loss(z, target, on="logits"), z)[0].abs().max() == 18.0  # regression never vanishes


def test_squared_error_on_the_simplex_lies_between_0_and_2():
    """M-LOSS-6: 2 (1 - p)^2 for two classes, no factor 1/2 (M-LOSS-4)."""
    for p in (0.0, 0.25, 0.5, 0.75, 1.0):
        z = torch.tensor([[p, 1 - p]]).double().log()
        torch.testing.assert_close(mse_loss(z, torch.tensor([0])).item(), 2 * (1 - p) ** 2)


def test_absolute_error_is_twice_the_missing_probability():
    """M-LOSS-10: gradient -2 p_t (e_t - p)."""
    z, target = leaf(9, 4), torch.randint(4, (9,))
    p = z.detach().softmax(-1)
    own = p.gather(1, target[:, None])
    loss = mae_loss(z, target, reduction="none")
    torch.testing.assert_close(loss, 2 * (1 - own[:, 0]))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), z)[0], -2 * own * (F.one_hot(target, 4) - p))


def test_errors_take_probabilities_as_targets():
    z, y = leaf(9, 4), torch.rand(9, 4).double().softmax(-1)
    assert_equal_with_gradients(mse_loss(z, y), (z.softmax(-1) - y).square().sum(-1).mean(), (z,))
    assert_equal_with_gradients(mae_loss(z, y), (z.softmax(-1) - y).abs().sum(-1).mean(), (z,))


def test_smoothing_has_a_floor():
    """M-LOSS-9: the minimum is H(y'), 0.3897 + ... for e = 0.1, C = 5; it penalises KL(u || p), not KL(p || u)."""
    y = torch.full((5,), 0.1 / 5).double()
    y[0] += 0.9
    floor = -(y * y.log()).sum()
    assert math.isclose(floor.item(), 0.3897, abs_tol=1e-4)
    torch.testing.assert_close(cross_entropy(y.log()[None], torch.tensor([0]), label_smoothing=0.1), floor)


@pytest.mark.parametrize("loss", [focal_loss, mse_loss, mae_loss, cross_entropy])
def test_ignored_rows_count_nowhere(loss):
    z, target = leaf(9, 4), torch.randint(4, (9,))
    target[[1, 4]] = -100
    kept = target != -100
    torch.testing.assert_close(loss(z, target), loss(z[kept], target[kept]))
    (grad,) = torch.autograd.grad(loss(z, target), z)
    assert (grad[~kept] == 0).all()
    assert loss(z, torch.full((9,), -100)).item() == 0.0


# ---- noise-contrastive estimation ----


def test_nce_is_one_plus_k_binary_cross_entropies():
    """M-NCE-1, M-NCE-2."""
    data, noise = leaf(9), leaf(9, 5)
    log_noise, its = torch.randn(9).double(), torch.randn(9, 5).double()
    h, g = data - math.log(5) - log_noise, noise - math.log(5) - its
    each = torch.cat([h[:, None], g], 1)
    truth = torch.cat([torch.ones(9, 1), torch.zeros(9, 5)], 1).double()
    binary = F.binary_cross_entropy_with_logits(each, truth, reduction="none")
    assert_equal_with_gradients(nce_loss(data, noise, log_noise, its), 6 * binary.mean(), (data, noise))
    rows = nce_loss(data, noise, log_noise, its, reduction="none")
    assert_equal_with_gradients(rows, binary.sum(-1), (data, noise))


def test_nce_gradients_are_the_posteriors():
    """M-NCE-3: data -(1 - sigmoid(h)), noise sigmoid(h)."""
    data, noise = leaf(9), leaf(9, 5)
    log_noise, its = torch.randn(9).double(), torch.randn(9, 5).double()
    grads = torch.autograd.grad(nce_loss(data, noise, log_noise, its, reduction="sum"), (data, noise))
    torch.testing.assert_close(grads[0], -torch.sigmoid(-(data - math.log(5) - log_noise)))
    torch.testing.assert_close(grads[1], torch.sigmoid(noise - math.log(5) - its))


@pytest.mark.parametrize("k", [1, 5, 50])
def test_nce_is_minimal_at_the_data_for_every_k(k):
    """M-NCE-4, by exact expectation over 6 outcomes: an unnormalised model finds P, its normalisation included."""
    torch.manual_seed(1)
    data, noise = torch.randn(6).double().softmax(-1), torch.rand(6).double().softmax(-1)
    f = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    step = torch.optim.LBFGS([f], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe")

    def expected():
        """Each outcome as datum with weight P; the noise term weighted by p_noise, k samples of it."""
        step.zero_grad()
        zero = torch.zeros(6, dtype=torch.float64)
        everything = f[:, None].expand(6, k)
        rows = nce_loss(f, everything, noise.log(), noise.log()[:, None].expand(6, k), reduction="none")
        impossible = nce_loss(f, zero[:, None].expand(6, k) - 1e4, noise.log(), everything * 0, reduction="none")
        only_noise = rows - impossible  # the k noise terms of outcome x alone
        loss = (data * impossible).sum() + (noise * only_noise).sum()
        loss.backward()
        return loss

    step.step(expected)
    torch.testing.assert_close(f.detach().exp(), data, rtol=1e-4, atol=1e-5)


# ---- distillation ----


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_distillation_keeps_its_gradient_size(temperature):
    """M-TMP-4: d/dz = T (p_s - p_t), both at temperature T."""
    student, teacher = leaf(9, 5), torch.randn(9, 5).double()
    loss = distillation_loss(student, teacher, temperature=temperature, reduction="sum")
    log_p, log_t = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    torch.testing.assert_close(loss, temperature**2 * F.kl_div(log_p, log_t, log_target=True, reduction="sum"))
    (grad,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(grad, temperature * (log_p.exp() - log_t.exp()))


def test_a_head_is_distilled_without_logits():
    """KL = log Z_student - <x, E_teacher[w]> - H_teacher; equal to the dense loss in value and gradient."""
    x, w = leaf(9, 5), leaf(11, 5)
    tx, tw = torch.randn(9, 3).double(), torch.randn(11, 3).double()
    dense = distillation_loss(x @ w.mT, tx @ tw.mT, temperature=2.0)
    assert_equal_with_gradients(linear_distillation_loss(x, w, tx, tw, temperature=2.0), dense, (x, w))


def test_mse_loss_is_the_old_name_of_brier_loss():
    z, y = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    want = (z.softmax(-1) - torch.eye(3)[y]).square().sum(-1).mean()
    torch.testing.assert_close(brier_loss(z, y), want)
    torch.testing.assert_close(partita.nn.BrierLoss()(z, y), want)
    assert mse_loss is brier_loss
    assert issubclass(partita.nn.MSELoss, partita.nn.BrierLoss)
