"""The Fisher metric of the categorical family in its coordinate systems, and the gradient of entropy in it."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require_shape
from partita.theory.geometry.jacobian import softmax_jacobian
from partita.theory.information.entropy import entropy_of

__all__ = [
    "entropy_differential",
    "entropy_fisher_gradient",
    "entropy_tangent_gradient",
    "fisher_free",
    "fisher_homogeneous",
    "fisher_logits",
    "fisher_quadratic_form",
    "temper",
]


def fisher_logits(probs: Tensor) -> Tensor:  # (..., n, n)
    """Fisher information in logits: the Jacobian of softmax; degenerate along a common shift.

        g = diag(p) - p p^T

    Spec: M-GEO-3.

    >>> fisher_logits(torch.tensor([0.5, 0.5]))[0]
    tensor([ 0.2500, -0.2500])
    """
    return softmax_jacobian(probs)


def fisher_free(probs: Tensor) -> Tensor:  # (..., n - 1, n - 1)
    """Fisher information in the free coordinates p_1 .. p_{n-1}: the only invertible one.

        g_ij = [i = j] / p_i + 1 / p_n

    Spec: M-GEO-3.

    >>> fisher_free(torch.tensor([0.5, 0.25, 0.25]))
    tensor([[6., 4.],
            [4., 8.]])
    """
    require_shape(probs.shape[-1] >= 2, "free coordinates need at least two weights.")
    return torch.diag_embed(1 / probs[..., :-1]) + (1 / probs[..., -1])[..., None, None]


def fisher_homogeneous(probs: Tensor) -> Tensor:  # (..., n, n)
    """Fisher information in homogeneous coordinates p = a / sum(a), at sum(a) = 1; singular along p.

        g_ij = [i = j] / p_i - 1

    Spec: M-GEO-3.

    >>> fisher_homogeneous(torch.tensor([0.5, 0.5])) @ torch.tensor([0.5, 0.5])
    tensor([0., 0.])
    """
    return torch.diag_embed(1 / probs) - 1


def fisher_quadratic_form(probs: Tensor, tangent: Tensor) -> Tensor:  # (...)
    """Squared length of a tangent vector (entries summing to 0) in the Fisher metric, in any coordinates.

        g(d, d) = sum_j d_j^2 / p_j

    Spec: M-GEO-3.

    >>> fisher_quadratic_form(torch.tensor([0.5, 0.5]), torch.tensor([0.1, -0.1]))
    tensor(0.0400)
    """
    return (tangent.square() / probs).sum(-1)


def entropy_differential(probs: Tensor) -> Tensor:
    """The plain derivative of the entropy by the weights, as if they were free.

        -log p - 1

    Spec: M-GEO-4.

    >>> entropy_differential(torch.tensor([1.0]))
    tensor([-1.])
    """
    return -probs.log() - 1


def entropy_tangent_gradient(probs: Tensor) -> Tensor:
    """The Euclidean gradient of the entropy along the simplex.

        -log p + mean(log p)

    Spec: M-GEO-4.

    >>> entropy_tangent_gradient(torch.full((3,), 1 / 3)).abs().max().item()
    0.0
    """
    log_p = probs.log()
    return log_p.mean(-1, keepdim=True) - log_p


def entropy_fisher_gradient(probs: Tensor) -> Tensor:
    """The gradient of the entropy in the Fisher metric; in general not parallel to uniform - p.

        -p * (log p + H)

    Spec: M-GEO-4.
    From Amari (1998), Natural gradient works efficiently in learning.

    >>> entropy_fisher_gradient(torch.full((2,), 0.5)).abs().max().item()
    0.0
    """
    return -torch.xlogy(probs, probs) - probs * entropy_of(probs)[..., None]


def temper(probs: Tensor, time: Number) -> Tensor:
    """Where Fisher-gradient ascent of the entropy has carried a law after some time: temperature exp(time), exactly.

        p(t) ~ p(0)^exp(-t)

    Spec: M-GEO-4.

    >>> temper(torch.tensor([0.2, 0.8]), torch.tensor(2.0).log())  # square roots: odds 4 become 2
    tensor([0.3333, 0.6667])
    """
    power = torch.exp(-number(time)).to(probs.dtype)
    return torch.softmax(power * probs.log(), -1)
