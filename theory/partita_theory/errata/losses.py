"""Errata of the document on squared error and cross entropy, equations (4.3.x)."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss, one_hot

from partita_theory import contrast, geometry, information
from partita_theory.errata._samples import F64, gradient, randn, softmax, vector
from partita_theory.errata.row import Book, Numbers

book = Book("losses")


def _data() -> tuple[Tensor, Tensor, Tensor]:
    x, w = randn(9, 4), randn(4, seed=1)
    return x, w, (randn(9, seed=2) > 0).to(F64)


def _sigmoid_slope(at: Tensor) -> Tensor:
    return torch.sigmoid(at) * torch.sigmoid(-at)


@book.add("(4.3.1)", "C", "M-LOSS-4")
def _half() -> Numbers:
    """printed: d MSE / d w = -(1/N) sum (y - yhat) x
    right: twice that for the mean square; printed holds with a half
    quantity: first entry of the gradient of mean (yhat - y)^2
    """
    x, w, y = _data()
    g = gradient(lambda v: mse_loss(x @ v, y), w)
    return -((y - x @ w)[:, None] * x).mean(0)[0], geometry.squared_error_gradients(x, y, x @ w).weight[0], g[0]


@book.add("(4.3.2)", "W", "M-LOSS-5")
def _sigmoid_mse() -> Numbers:
    """printed: d MSE / d w = -(1/N) sum 2 (yhat - y) s'(yhat) x
    right: +(1/N) sum 2 (s(z) - y) s'(z) x
    quantity: slope of the loss along the weight vector
    """
    x, w, y = _data()
    p = torch.sigmoid(x @ w)
    printed = -(2 * (p - y) * _sigmoid_slope(p)) @ x / 9
    right = geometry.sigmoid_squared_error_gradient(x @ w, y) @ x / 9
    return printed @ w, right @ w, gradient(lambda v: mse_loss(torch.sigmoid(x @ v), y), w) @ w


@book.add("(4.3.3)", "W", "M-LOSS-2")
def _sign() -> Numbers:
    """printed: d CE / d w = -(1/N) sum (p - y) x
    right: the sign is plus
    quantity: slope of the loss along the weight vector
    """
    x, w, y = _data()
    right = (torch.sigmoid(x @ w) - y) @ x / 9 @ w
    return -right, right, gradient(lambda v: binary_cross_entropy_with_logits(x @ v, y), w) @ w


@book.add("(4.3.4)", "C", "M-LOSS-4")
def _constant_hessian() -> Numbers:
    """printed: Hessian X^T X / N
    right: with the half and a linear model; twice that otherwise
    quantity: first entry of the Hessian of mean (yhat - y)^2
    """
    x, w, y = _data()
    h = torch.autograd.functional.hessian(lambda v: mse_loss(x @ v, y), w)
    return (x.T @ x / 9)[0, 0], geometry.squared_error_hessian(x)[0, 0], h[0, 0]


def _curvature(samples: int) -> Numbers:
    """Curvature of cross entropy along a direction of weight space: printed with a minus, right, autograd."""
    x, w, u = randn(samples, 4), randn(3, 4, seed=1), randn(12, seed=2)
    y = one_hot(torch.arange(samples) % 3, 3).to(F64)
    right = u @ geometry.cross_entropy_hessian_weights(x, softmax(x @ w.T)) @ u

    def loss(flat: Tensor) -> Tensor:
        return geometry.soft_cross_entropy(x @ flat.reshape(3, 4).T, y).mean()

    return -right, right, u @ torch.autograd.functional.hessian(loss, w.flatten()) @ u


@book.add("(4.3.5)", "W", "M-LOSS-3")
def _one_sample() -> Numbers:
    """printed: (diag p - p p^T) x x^T, negative semidefinite
    right: J(p) kron x x^T, positive semidefinite
    quantity: curvature of one sample's loss along a direction of the weights
    """
    return _curvature(1)


@book.add("(4.3.6)", "W", "M-LOSS-3")
def _many_samples() -> Numbers:
    """printed: the same, averaged
    right: the same correction
    quantity: curvature of the mean loss along a direction of the weights
    """
    return _curvature(7)


@book.add("(4.3.12)", "C", "M-INC-2")
def _negatives() -> Numbers:
    """printed: I >= log N - loss with N negatives
    right: N counts candidates, the positive included; expectation; cap log N
    quantity: largest estimate with 15 negatives
    """
    loss = contrast.info_nce(vector(99), torch.eye(16, 1, dtype=F64))
    return log(15), information.mutual_information_bound(loss, 16).cap, log(16) - loss


@book.add("P15", "P", "M-LOSS-2")
def _right_side() -> Numbers:
    """printed: cross entropy has no vanishing gradient
    right: none on wrong samples; it vanishes on right ones
    quantity: size of d CE / d z at z = 8, y = 1 (printed: as at z = -8)
    """
    z = vector(-8, 8)
    g = gradient(lambda t: binary_cross_entropy_with_logits(t, vector(1, 1), reduction="sum"), z)
    return 1 - torch.sigmoid(z[0]), 1 - torch.sigmoid(z[1]), g[1].abs()


@book.add("P16", "P", "M-LOSS-5")
def _at_z() -> Numbers:
    """printed: the derivative of the sigmoid is small when the output is far from 0
    right: when the pre-activation is
    quantity: derivative of the sigmoid at z = 8
    """
    z = vector(8)
    return _sigmoid_slope(torch.sigmoid(z)), _sigmoid_slope(z), gradient(lambda t: torch.sigmoid(t).sum(), z)


@book.add("P17", "P", "M-DER-1")
def _row_wise() -> Numbers:
    """printed: d A / d Q contains diag(A) - A A^T
    right: row by row: diag(a_i) - a_i a_i^T
    quantity: d A_00 / d s_01
    """
    s = randn(4, 4)
    a, g = softmax(s), gradient(lambda t: softmax(t)[0, 0], s)
    return -(a @ a.T)[0, 1], geometry.softmax_jacobian(a[0])[0, 1], g[0, 1]


@book.add("P18", "P", "M-LOSS-6")
def _symmetric() -> Numbers:
    """printed: squared error changes symmetrically in p
    right: 2 (1 - p)^2: convex, not symmetric
    quantity: loss at p = 1/4 (printed: as at 3/4)
    """
    quarter, three = geometry.squared_error_profile(vector(0.25, 0.75))[0]
    return three, quarter, 0.75**2 + 0.75**2


@book.add("P19", "P", "M-LOSS-5")
def _not_convex() -> Numbers:
    """printed: squared error is simple to optimise, its Hessian is constant
    right: for linear models only
    quantity: second derivative of (sigmoid(z) - 1)^2 at z = -3 (printed: as at z = 0)
    """
    z, y = vector(0, -3), vector(1, 1)
    values = geometry.sigmoid_squared_error_curvature(z, y)
    return values[0], values[1], gradient(lambda t: geometry.sigmoid_squared_error_gradient(t, y)[1], z)[1]
