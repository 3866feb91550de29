"""Cross entropy of a softmax classifier: value, every gradient, Hessians by logits and by weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory.geometry.divergence import kl
from partita.theory.geometry.jacobian import softmax_jacobian, softmax_vjp
from partita.theory.information.entropy import entropy_of

__all__ = [
    "ClassifierGradients",
    "cross_entropy_decomposition",
    "cross_entropy_gradients",
    "cross_entropy_hessian_logits",
    "cross_entropy_hessian_weights",
    "cross_entropy_hvp",
    "soft_cross_entropy",
]


class ClassifierGradients(NamedTuple):
    """Gradients of the mean cross entropy of logits = inputs @ weight.T + bias."""

    logits: Tensor  # (n_sample, n_class)
    probs: Tensor  # (n_sample, n_class)
    target: Tensor  # (n_sample, n_class)
    weight: Tensor  # (n_class, dim)
    bias: Tensor  # (n_class,)
    inputs: Tensor  # (n_sample, dim)


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:  # (..., n), (..., n) -> (...)
    """Cross entropy with soft targets; -log p_c only when the target is one-hot.

        CE = log Z * sum(y) - <y, z>

    Equal to ``F.cross_entropy(logits, target, reduction="none")`` for sum(y) = 1. Spec: M-LOSS-1.

    >>> soft_cross_entropy(torch.zeros(4), torch.full((4,), 0.25))  # log 4
    tensor(1.3863)
    """
    return torch.logsumexp(logits, -1) * target.sum(-1) - torch.where(target > 0, target * logits, 0.0).sum(-1)


def cross_entropy_decomposition(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a cross entropy that no model can remove, and the part that is its fault.

        CE(y, p) = H(y) + KL(y || p)

    Exact, for targets that sum to 1. Spec: M-LOSS-1, M-GIB-6.

    >>> cross_entropy_decomposition(torch.zeros(2), torch.tensor([0.5, 0.5]))  # all floor, no fault
    (tensor(0.6931), tensor(0.))
    """
    return entropy_of(target), kl(target, torch.softmax(logits, -1))


def cross_entropy_gradients(
    inputs: Tensor,  # (n_sample, dim)
    weight: Tensor,  # (n_class, dim)
    target: Tensor,  # (n_sample, n_class)
    bias: Tensor | None = None,  # (n_class,)
) -> ClassifierGradients:
    """Gradients of the mean cross entropy with respect to every argument; the sign is plus.

        d/dz = (p * sum(y) - y) / N,   d/dp = -y/p / N,   d/dy = -log p / N
        d/dW = sum_n (p - y) x^T / N,   d/db = sum_n (p - y) / N,   d/dx = W^T (p - y) / N

    Does not vanish on samples that are confidently wrong, does on those that are confidently right. Spec: M-LOSS-2.

    >>> g = cross_entropy_gradients(torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([[1.0, 0.0]]))
    >>> g.weight  # (1/2, 1/2) - (1, 0)
    tensor([[-0.5000],
            [ 0.5000]])
    """
    z = inputs @ weight.T if bias is None else inputs @ weight.T + bias
    log_p = torch.log_softmax(z, -1)
    p, n = log_p.exp(), inputs.shape[0]
    residual = (p * target.sum(-1, keepdim=True) - target) / n
    by_p = torch.where(target > 0, -target / p, 0.0) / n
    return ClassifierGradients(residual, by_p, -log_p / n, residual.T @ inputs, residual.sum(0), residual @ weight)


def cross_entropy_hessian_logits(probs: Tensor) -> Tensor:  # (..., n, n)
    """Second derivative of cross entropy by logits; it does not depend on the target.

        diag(p) - p p^T

    Positive semidefinite. Spec: M-LOSS-3.

    >>> torch.linalg.eigvalsh(cross_entropy_hessian_logits(torch.tensor([0.5, 0.5]))).max()
    tensor(0.5000)
    """
    return softmax_jacobian(probs)


def cross_entropy_hessian_weights(
    inputs: Tensor,  # (n_sample, dim)
    probs: Tensor,  # (n_sample, n_class)
) -> Tensor:  # (n_class * dim, n_class * dim)
    """Second derivative of the mean cross entropy by the flattened (row-major) weight matrix.

        (1/N) sum_n J(p_n) kron x_n x_n^T

    Positive semidefinite, with a null space of dimension at least dim: the same vector added to every class changes
    nothing. Dense; `cross_entropy_hvp` multiplies without it. Spec: M-LOSS-3.
    From Bohning (1992), Multinomial logistic regression algorithm.

    >>> cross_entropy_hessian_weights(torch.tensor([[2.0]]), torch.tensor([[0.5, 0.5]]))  # 4 * J
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    n, dim = inputs.shape
    n_class = probs.shape[-1]
    blocks = torch.einsum("nab,ni,nj->aibj", softmax_jacobian(probs), inputs, inputs) / n
    return blocks.reshape(n_class * dim, n_class * dim)


def cross_entropy_hvp(
    inputs: Tensor,  # (n_sample, dim)
    probs: Tensor,  # (n_sample, n_class)
    vector: Tensor,  # (n_class, dim)
) -> Tensor:  # (n_class, dim)
    """That Hessian times a weight-shaped vector, at the cost of two matrix products.

        H U = (1/N) sum_n J(p_n) (U x_n) x_n^T

    Spec: M-LOSS-3.

    >>> cross_entropy_hvp(torch.tensor([[2.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0], [0.0]]))
    tensor([[ 1.],
            [-1.]])
    """
    return softmax_vjp(probs, inputs @ vector.T).T @ inputs / inputs.shape[0]
