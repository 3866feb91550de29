"""The Jacobian of softmax: as a matrix, as a product, and its norms."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import require

__all__ = ["JacobianNorms", "jacobian_norms", "jacobian_trace", "softmax_jacobian", "softmax_vjp", "subset_norm"]


class JacobianNorms(NamedTuple):
    """Operator norms of J(p), named by the norms of input and output."""

    two_two: Tensor
    inf_inf: Tensor
    one_inf: Tensor
    inf_one: Tensor


def softmax_jacobian(probs: Tensor) -> Tensor:  # (..., n) -> (..., n, n)
    """The derivative of weights by logits, as a matrix: symmetric, positive semidefinite, rows summing to 0.

        J = diag(p) - p p^T

    Also the Hessian of log Z, and of cross entropy, by logits. For raw scores multiply by the scale.
    Spec: M-DER-1, M-DER-2.

    >>> softmax_jacobian(torch.tensor([0.5, 0.5]))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """
    return torch.diag_embed(probs) - probs[..., :, None] * probs[..., None, :]


def softmax_vjp(probs: Tensor, grad: Tensor) -> Tensor:  # (..., n)
    """The Jacobian times a vector, without the matrix; the same from the left and from the right.

        J g = p * (g - <p, g>)

    Spec: M-DER-1.

    >>> softmax_vjp(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
    tensor([ 0.2500, -0.2500])
    """
    return probs * (grad - (probs * grad).sum(-1, keepdim=True))


def jacobian_trace(probs: Tensor) -> Tensor:  # (...)
    """How much gradient a row lets through: 0 when it is one-hot.

        tr J = 1 - sum_i p_i^2 = 1 - 1/n_eff

    Spec: M-DER-7, M-INF-8.

    >>> jacobian_trace(torch.full((4,), 0.25))
    tensor(0.7500)
    """
    return 1 - probs.square().sum(-1)


def jacobian_norms(probs: Tensor) -> JacobianNorms:  # (..., n)
    """Four norms of the Jacobian: how much weights can move per unit of score, by the way both are measured.

        2->2: top eigenvalue;   inf->inf: max 2 p_i (1 - p_i);   1->inf: max p_i (1 - p_i);   inf->1: `subset_norm`

    Over all p their suprema are 1/2, 1/2, 1/4 and 1, all at a two-way tie. Dense (n x n). Spec: M-DER-1, M-ROB-11.

    >>> [round(x.item(), 4) for x in jacobian_norms(torch.tensor([0.5, 0.5]))]
    [0.5, 0.5, 0.25, 1.0]
    """
    spread = (probs * (1 - probs)).amax(-1)
    top = torch.linalg.eigvalsh(softmax_jacobian(probs))[..., -1]
    return JacobianNorms(top, 2 * spread, spread, subset_norm(probs))


def subset_norm(probs: Tensor) -> Tensor:  # (...)
    """The inf->1 norm of the Jacobian: how well the keys split into two halves of equal mass.

        max over subsets A of 4 P(A) (1 - P(A)),     P(A) = sum of p over A

    1 for a tie and for a uniform row of even length. Exact by enumeration up to 16 keys; beyond, the largest keys are
    dealt greedily, which is a lower bound. Spec: M-ROB-11.

    >>> subset_norm(torch.full((3,), 1 / 3))  # best split 1/3, 2/3
    tensor(0.8889)
    """
    n = probs.shape[-1]
    require(n >= 1, "a law needs at least one key.")
    if n <= 16:
        corners = list(product((0.0, 1.0), repeat=n - 1))
        mass = probs[..., :-1] @ torch.tensor(corners, dtype=probs.dtype, device=probs.device).T
        return (4 * mass * (1 - mass)).amax(-1)
    left = torch.zeros_like(probs[..., 0])
    right = torch.zeros_like(left)
    for mass in probs.sort(-1, descending=True).values.unbind(-1):
        to_left = left <= right
        left, right = left + torch.where(to_left, mass, 0.0), right + torch.where(to_left, 0.0, mass)
    return 4 * left * right
