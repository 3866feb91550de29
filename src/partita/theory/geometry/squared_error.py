"""Squared error of a linear model, through a sigmoid and through a softmax: gradients and curvature.

Two habits are in use, half the mean square and the mean square; `half` names the one meant; torch's MSELoss has
half=False.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory.geometry.jacobian import softmax_jacobian, softmax_vjp

__all__ = [
    "RegressionGradients",
    "sigmoid_squared_error_curvature",
    "sigmoid_squared_error_gradient",
    "softmax_squared_error_gradient",
    "softmax_squared_error_hessian",
    "squared_error_gradients",
    "squared_error_hessian",
]


class RegressionGradients(NamedTuple):
    """Gradients of the squared error of prediction = inputs @ weight + bias."""

    prediction: Tensor
    weight: Tensor
    bias: Tensor


def squared_error_gradients(
    inputs: Tensor,  # (n_sample, dim)
    target: Tensor,  # (n_sample,) or (n_sample, n_out)
    prediction: Tensor,
    *,
    half: bool = False,
) -> RegressionGradients:
    """Gradients of the squared error of a linear model; twice as large without the half.

        half:  d/dyhat = (yhat - y) / N,    d/dw = X^T (yhat - y) / N,    d/db = mean(yhat - y)

    Spec: M-LOSS-4.

    >>> squared_error_gradients(torch.ones(1, 1), torch.tensor([1.0]), torch.tensor([3.0]), half=True).weight
    tensor([2.])
    """
    factor = 1.0 if half else 2.0
    residual = factor * (prediction - target) / inputs.shape[0]
    return RegressionGradients(residual, inputs.T @ residual, residual.sum(0))


def squared_error_hessian(inputs: Tensor, n_out: int = 1, *, half: bool = False) -> Tensor:
    """Second derivative by the weights of a *linear* model: constant; unique minimum iff X^T X is invertible.

        half:  I_out kron X^T X / N

    for weights flattened output by output. Spec: M-LOSS-4.

    >>> squared_error_hessian(torch.tensor([[1.0], [3.0]]), half=True)  # (1 + 9) / 2
    tensor([[5.]])
    """
    gram = inputs.T @ inputs / inputs.shape[0]
    return (1.0 if half else 2.0) * torch.kron(torch.eye(n_out, dtype=inputs.dtype, device=inputs.device), gram)


def sigmoid_squared_error_gradient(logits: Tensor, target: Tensor) -> Tensor:
    """Derivative of (sigmoid(z) - y)^2 by z; its last factor is taken at the pre-activation z, and it kills both ends.

        2 (sigmoid(z) - y) sigmoid(z) (1 - sigmoid(z))

    Spec: M-LOSS-5.

    >>> sigmoid_squared_error_gradient(torch.tensor(0.0), torch.tensor(1.0))  # 2 * -1/2 * 1/4
    tensor(-0.2500)
    """
    p = torch.sigmoid(logits)
    return 2 * (p - target) * p * (1 - p)


def sigmoid_squared_error_curvature(logits: Tensor, target: Tensor) -> Tensor:
    """Second derivative of (sigmoid(z) - y)^2 by z: negative where the model is confidently wrong, so not convex.

        2 [ s'^2 + (s - y) s'' ],     s' = s (1 - s),   s'' = s' (1 - 2 s)

    Spec: M-LOSS-5.

    >>> sigmoid_squared_error_curvature(torch.tensor(0.0), torch.tensor(1.0))  # 2 / 16
    tensor(0.1250)
    """
    s = torch.sigmoid(logits)
    first = s * (1 - s)
    return 2 * (first**2 + (s - target) * first * (1 - 2 * s))


def softmax_squared_error_gradient(logits: Tensor, target: Tensor) -> Tensor:  # (..., n)
    """Derivative of |softmax(z) - y|^2 by z: the whole Jacobian takes part, not its diagonal alone.

        2 J(p) (p - y)

    Spec: M-LOSS-5.

    >>> softmax_squared_error_gradient(torch.zeros(2), torch.tensor([1.0, 0.0]))
    tensor([-0.5000,  0.5000])
    """
    p = torch.softmax(logits, -1)
    return 2 * softmax_vjp(p, p - target)


def softmax_squared_error_hessian(logits: Tensor, target: Tensor) -> Tensor:  # (..., n, n)
    """Second derivative of |softmax(z) - y|^2 by z: the first part is never negative, the others can be.

        2 [ J J + sum_i u_i d2p_i/dz2 ],     u = p - y

    where d2p_i/dz_a dz_b = p_i ([i=a] - p_a)([i=b] - p_b) - p_i J_ab. Spec: M-LOSS-5.

    >>> softmax_squared_error_hessian(torch.zeros(2), torch.tensor([1.0, 0.0]))[0]  # 2 J J: J J = J / 2
    tensor([ 0.2500, -0.2500])
    """
    p = torch.softmax(logits, -1)
    jac = softmax_jacobian(p)
    u = p - target
    pu = p * u
    mean = pu.sum(-1)[..., None, None]
    outer = pu[..., :, None] * p[..., None, :]
    second = (
        torch.diag_embed(pu) - outer - outer.transpose(-1, -2) + mean * p[..., :, None] * p[..., None, :] - mean * jac
    )
    return 2 * (jac @ jac + second)
