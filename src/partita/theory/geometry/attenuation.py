"""Why squared error after a sigmoid or softmax stops learning where cross entropy does not; curvature at a glance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory.geometry.squared_error import sigmoid_squared_error_gradient, softmax_squared_error_gradient

__all__ = ["Curvature", "curvature_summary", "gradient_attenuation", "sigmoid_gradients"]


class Curvature(NamedTuple):
    """What the eigenvalues of a Hessian say."""

    smallest: Tensor
    largest: Tensor
    trace: Tensor
    null: Tensor
    convex: Tensor


def sigmoid_gradients(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by the logit of squared error and of cross entropy of one sigmoid unit.

        2 (s - y) s (1 - s)    and    s - y

    Confidently wrong, the first vanishes and the second is near 1; confidently right, both vanish.
    Spec: M-LOSS-2, M-LOSS-5.

    >>> sigmoid_gradients(torch.tensor(0.0), torch.tensor(1.0))
    (tensor(-0.2500), tensor(-0.5000))
    """
    return sigmoid_squared_error_gradient(logits, target), torch.sigmoid(logits) - target


def gradient_attenuation(logits: Tensor, target: Tensor) -> Tensor:  # (..., n), (..., n) -> (...)
    """Length of the squared-error gradient by logits over that of cross entropy: the Jacobian's toll.

        |2 J(p) (p - y)| / |p - y|   <=  2 |J|_2  <=  1

    0/0 at p = y gives 0. Spec: M-LOSS-5, M-DER-7.

    >>> gradient_attenuation(torch.zeros(2), torch.tensor([1.0, 0.0]))  # at a tie nothing is lost
    tensor(1.)
    """
    length = (torch.softmax(logits, -1) - target).norm(dim=-1)
    mse = softmax_squared_error_gradient(logits, target).norm(dim=-1)
    return torch.where(length > 0, mse / length.clamp(min=torch.finfo(length.dtype).tiny), 0.0)


def curvature_summary(hessian: Tensor, tolerance: float = 1e-9) -> Curvature:  # (..., n, n)
    """Extreme eigenvalues, trace, size of the null space, and whether a Hessian is that of a convex function.

        convex  iff  smallest eigenvalue >= -tolerance * largest

    Spec: M-LOSS-3, M-LOSS-5, M-INC-5.

    >>> s = curvature_summary(torch.diag(torch.tensor([2.0, 0.0])))
    >>> s.largest.item(), s.null.item(), s.convex.item()
    (2.0, 1, True)
    """
    values = torch.linalg.eigvalsh(hessian)
    size = values.abs().amax(-1, keepdim=True)
    null = (values.abs() <= tolerance * size).sum(-1)
    convex = (values >= -tolerance * size).all(-1)
    return Curvature(values[..., 0], values[..., -1], values.sum(-1), null, convex)
