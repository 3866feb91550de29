"""Errata of the document on squared error and cross entropy, equations (4.3.x)."""

from __future__ import annotations

from math import log

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss, one_hot

from partita.theory.contrast import info_nce
from partita.theory.geometry import (
    cross_entropy_hessian_weights,
    sigmoid_squared_error_curvature,
    sigmoid_squared_error_gradient,
    soft_cross_entropy,
    softmax_jacobian,
    squared_error_gradients,
    squared_error_hessian,
    squared_error_profile,
)
from partita.theory.information import mutual_information_bound
from partita_studies.errata._samples import F64, gradient, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("losses")


def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w = randn(9, 4), randn(4, seed=1)
    return x, w, (randn(9, seed=2) > 0).to(F64)


@book.add(
    "(4.3.1)",
    "C",
    printed="d MSE / d w = -(1/N) sum (y - yhat) x",
    right="twice that for the mean square; printed holds with a half",
    spec="M-LOSS-4",
    quantity="first entry of the gradient of mean (yhat - y)^2",
)
def _half() -> Reading:
    x, w, y = _data()
    g = gradient(lambda v: mse_loss(x @ v, y), w)
    return Reading(
        float(-((y - x @ w)[:, None] * x).mean(0)[0]),
        float(squared_error_gradients(x, y, x @ w).weight[0]),
        float(g[0]),
    )


@book.add(
    "(4.3.2)",
    "W",
    printed="d MSE / d w = -(1/N) sum 2 (yhat - y) s'(yhat) x",
    right="+(1/N) sum 2 (s(z) - y) s'(z) x",
    spec="M-LOSS-5",
    quantity="slope of the loss along the weight vector",
)
def _sigmoid_mse() -> Reading:
    x, w, y = _data()
    p = torch.sigmoid(x @ w)
    at_output = torch.sigmoid(p) * (1 - torch.sigmoid(p))
    printed = -(2 * (p - y) * at_output) @ x / 9
    right = sigmoid_squared_error_gradient(x @ w, y) @ x / 9
    g = gradient(lambda v: mse_loss(torch.sigmoid(x @ v), y), w)
    return Reading(float(printed @ w), float(right @ w), float(g @ w))


@book.add(
    "(4.3.3)",
    "W",
    printed="d CE / d w = -(1/N) sum (p - y) x",
    right="the sign is plus",
    spec="M-LOSS-2",
    quantity="slope of the loss along the weight vector",
)
def _sign() -> Reading:
    x, w, y = _data()
    right = (torch.sigmoid(x @ w) - y) @ x / 9
    g = gradient(lambda v: binary_cross_entropy_with_logits(x @ v, y), w)
    return Reading(float(-right @ w), float(right @ w), float(g @ w))


@book.add(
    "(4.3.4)",
    "C",
    printed="Hessian X^T X / N",
    right="with the half and a linear model; twice that otherwise",
    spec="M-LOSS-4",
    quantity="first entry of the Hessian of mean (yhat - y)^2",
)
def _constant_hessian() -> Reading:
    x, w, y = _data()
    h = torch.autograd.functional.hessian(lambda v: mse_loss(x @ v, y), w)
    return Reading(float((x.T @ x / 9)[0, 0]), float(squared_error_hessian(x)[0, 0]), float(h[0, 0]))


def _curvature(samples: int) -> Reading:
    """Curvature of cross entropy along a direction of weight space: printed with a minus, right, autograd."""
    x, w, u = randn(samples, 4), randn(3, 4, seed=1), randn(12, seed=2)
    y = one_hot(torch.arange(samples) % 3, 3).to(F64)
    h = cross_entropy_hessian_weights(x, torch.softmax(x @ w.T, -1))
    auto = torch.autograd.functional.hessian(lambda v: soft_cross_entropy(x @ v.reshape(3, 4).T, y).mean(), w.flatten())
    return Reading(float(-u @ h @ u), float(u @ h @ u), float(u @ auto @ u))


@book.add(
    "(4.3.5)",
    "W",
    printed="(diag p - p p^T) x x^T, negative semidefinite",
    right="J(p) kron x x^T, positive semidefinite",
    spec="M-LOSS-3",
    quantity="curvature of one sample's loss along a direction of the weights",
)
def _one_sample() -> Reading:
    return _curvature(1)


@book.add(
    "(4.3.6)",
    "W",
    printed="the same, averaged",
    right="the same correction",
    spec="M-LOSS-3",
    quantity="curvature of the mean loss along a direction of the weights",
)
def _many_samples() -> Reading:
    return _curvature(7)


@book.add(
    "(4.3.12)",
    "C",
    printed="I >= log N - loss with N negatives",
    right="N counts candidates, the positive included; expectation; cap log N",
    spec="M-INC-2",
    quantity="largest estimate with 15 negatives",
)
def _negatives() -> Reading:
    loss = info_nce(torch.tensor([99.0], dtype=F64), torch.eye(16, 1, dtype=F64))
    return Reading(log(15), float(mutual_information_bound(loss, 16).cap), float(log(16) - loss))


@book.add(
    "P15",
    "P",
    printed="cross entropy has no vanishing gradient",
    right="none on wrong samples; it vanishes on right ones",
    spec="M-LOSS-2",
    quantity="size of d CE / d z at z = 8, y = 1 (printed: as at z = -8)",
)
def _right_side() -> Reading:
    z = torch.tensor([-8.0, 8.0], dtype=F64)
    g = gradient(lambda t: binary_cross_entropy_with_logits(t, torch.ones(2, dtype=F64), reduction="sum"), z)
    return Reading(float(1 - torch.sigmoid(z[0])), float(1 - torch.sigmoid(z[1])), float(g[1].abs()))


@book.add(
    "P16",
    "P",
    printed="the derivative of the sigmoid is small when the output is far from 0",
    right="when the pre-activation is",
    spec="M-LOSS-5",
    quantity="derivative of the sigmoid at z = 8",
)
def _at_z() -> Reading:
    z = torch.tensor(8.0, dtype=F64)
    s = torch.sigmoid(z)
    at_output = torch.sigmoid(s) * (1 - torch.sigmoid(s))
    return Reading(float(at_output), float(s * (1 - s)), float(gradient(torch.sigmoid, z)))


@book.add(
    "P17",
    "P",
    printed="d A / d Q contains diag(A) - A A^T",
    right="row by row: diag(a_i) - a_i a_i^T",
    spec="M-DER-1",
    quantity="d A_00 / d s_01",
)
def _row_wise() -> Reading:
    s = randn(4, 4)
    a = torch.softmax(s, -1)
    g = gradient(lambda t: torch.softmax(t, -1)[0, 0], s)
    return Reading(float(-(a @ a.T)[0, 1]), float(softmax_jacobian(a[0])[0, 1]), float(g[0, 1]))


@book.add(
    "P18",
    "P",
    printed="squared error changes symmetrically in p",
    right="2 (1 - p)^2: convex, not symmetric",
    spec="M-LOSS-6",
    quantity="loss at p = 1/4 (printed: as at 3/4)",
)
def _symmetric() -> Reading:
    quarter, three = squared_error_profile(torch.tensor([0.25, 0.75], dtype=F64))[0]
    return Reading(float(three), float(quarter), 0.75**2 + 0.75**2)


@book.add(
    "P19",
    "P",
    printed="squared error is simple to optimise, its Hessian is constant",
    right="for linear models only",
    spec="M-LOSS-5",
    quantity="second derivative of (sigmoid(z) - 1)^2 at z = -3 (printed: as at z = 0)",
)
def _not_convex() -> Reading:
    z, y = torch.tensor([0.0, -3.0], dtype=F64), torch.ones(2, dtype=F64)
    values = sigmoid_squared_error_curvature(z, y)
    slope = gradient(lambda t: sigmoid_squared_error_gradient(t, y)[1], z)
    return Reading(float(values[0]), float(values[1]), float(slope[1]))
