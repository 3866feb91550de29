"""InfoNCE of one query and its candidates: loss, every gradient, and what the temperature does to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import Number, above_zero, require

__all__ = [
    "BatchGradients",
    "InfoNCEGradients",
    "candidates_in_batch",
    "hardness_weights",
    "info_nce",
    "info_nce_batch_gradients",
    "info_nce_gradients",
    "normalized_gradient",
]


class InfoNCEGradients(NamedTuple):
    """Derivatives of one InfoNCE loss with respect to each of its arguments."""

    query: Tensor  # (..., dim)
    keys: Tensor  # (..., n, dim); the row of the positive is the pull, the others are pushes
    scores: Tensor  # (..., n), by similarity
    temperature: Tensor  # (...)
    scale: Tensor  # (...)


class BatchGradients(NamedTuple):
    """Derivatives of the mean loss of a batch of pairs."""

    queries: Tensor  # (B, dim)
    keys: Tensor  # (B, dim)


def info_nce(
    query: Tensor,  # (..., dim)
    keys: Tensor,  # (..., n, dim)
    positive: int = 0,
    *,
    temperature: Number = 1.0,
) -> Tensor:  # (...)
    """InfoNCE of one query: cross entropy over its n candidates, one of which is the positive.

        loss = -log( exp(s_+ / t) / sum_j exp(s_j / t) ),     s_j = <query, key_j>

    The anchor itself is not a candidate. Between 0 and, for equal scores, log n. Spec: M-INC-1, M-GIB-7.
    From van den Oord, Li and Vinyals (2018), Representation learning with contrastive predictive coding.

    >>> info_nce(torch.zeros(2), torch.zeros(8, 2))  # log 8
    tensor(2.0794)
    """
    z = _scores(query, keys) / above_zero("temperature", temperature, query.dtype)
    return torch.logsumexp(z, -1) - z[..., positive]


def candidates_in_batch(batch: int, *, views: int = 1) -> int:
    """How many candidates an anchor of a batch has, its positive included: the n of the mutual-information bound.

        two towers: B        two views of B items as 2B anchors: 2B - 1

    Spec: M-INC-1.

    >>> candidates_in_batch(8), candidates_in_batch(8, views=2)
    (8, 15)
    """
    require(views in (1, 2), f"views is 1 (two towers) or 2 (two views as anchors); got {views}.")
    require(batch >= 1, f"batch must be at least 1; got {batch}.")
    return batch if views == 1 else 2 * batch - 1


def info_nce_gradients(
    query: Tensor,  # (..., dim)
    keys: Tensor,  # (..., n, dim)
    positive: int = 0,
    *,
    temperature: Number = 1.0,
) -> InfoNCEGradients:
    """Every derivative of InfoNCE in closed form, with P = softmax(s / t).

        d/dq   = (E_P[k] - k_+) / t = (1 - P_+) (mean negative - k_+) / t
        d/dk_+ = -(1 - P_+) q / t,      d/dk_m = P_m q / t
        d/ds_j = (P_j - [j = +]) / t,   d/dt = (s_+ - E_P[s]) / t^2,    d/d(1/t) = E_P[s] - s_+

    The pull on the positive is weighted by 1 - P_+, not by P_+. Query and keys are independent leaves. Spec: M-INC-3.

    >>> g = info_nce_gradients(torch.tensor([1.0]), torch.tensor([[0.0], [0.0]]))
    >>> g.keys.squeeze()  # pull -1/2, push +1/2
    tensor([-0.5000,  0.5000])
    """
    t = above_zero("temperature", temperature, query.dtype)
    s = _scores(query, keys)
    p = torch.softmax(s / t, -1)
    residual = p.clone()
    residual[..., positive] = -(p.sum(-1) - p[..., positive])  # P_+ - 1, without cancelling
    residual = residual / t
    scale = (p * s).sum(-1) - s[..., positive]
    return InfoNCEGradients(
        (residual[..., None] * keys).sum(-2), residual[..., None] * query[..., None, :], residual, -scale / t**2, scale
    )


def info_nce_batch_gradients(
    queries: Tensor,  # (B, dim)
    keys: Tensor,  # (B, dim)
    *,
    temperature: Number = 1.0,
    symmetric: bool = False,
) -> BatchGradients:
    """Gradients of the mean in-batch loss: row i's positive is column i, all other columns are negatives.

        d/dQ = (P - I) K / (B t),      d/dK = (P - I)^T Q / (B t)

    Symmetric averages rows and columns. Equal items in a batch are false negatives. Spec: M-INC-4.

    >>> g = info_nce_batch_gradients(torch.ones(1, 1), torch.ones(1, 1))
    >>> g.queries.item()  # a single pair has nothing to contrast with
    0.0
    """
    t = above_zero("temperature", temperature, queries.dtype)
    z = queries @ keys.T / t
    residual = torch.softmax(z, -1) - torch.eye(len(z), dtype=z.dtype, device=z.device)
    if symmetric:
        residual = (residual + torch.softmax(z, 0) - torch.eye(len(z), dtype=z.dtype, device=z.device)) / 2
    residual = residual / (len(z) * t)
    return BatchGradients(residual @ keys, residual.T @ queries)


def normalized_gradient(vector: Tensor, gradient: Tensor, eps: float = 1e-12) -> Tensor:  # (..., dim)
    """Carry a gradient by the unit vector q = u / |u| back to u: only the part across u is left.

        d/du = (I - q q^T) (d/dq) / |u|

    Spec: M-INC-6.

    >>> normalized_gradient(torch.tensor([2.0, 0.0]), torch.tensor([5.0, 4.0]))
    tensor([0., 2.])
    """
    length = vector.square().sum(-1, keepdim=True).sqrt().clamp(min=eps)
    unit = vector / length
    return (gradient - unit * (unit * gradient).sum(-1, keepdim=True)) / length


def hardness_weights(
    query: Tensor,  # (..., dim)
    keys: Tensor,  # (..., n, dim)
    positive: int = 0,
    *,
    temperature: Number = 1.0,
) -> Tensor:  # (..., n)
    """How the push is shared among the negatives: at low temperature the hardest takes it all.

        P_m / (1 - P_+),     0 at the positive

    The length of the gradient itself is *not* monotone in the temperature. Spec: M-INC-7.
    From Wang and Liu (2021), Understanding the behaviour of contrastive loss.

    >>> hardness_weights(torch.tensor([1.0]), torch.tensor([[9.0], [0.0], [0.0]]))
    tensor([0.0000, 0.5000, 0.5000])
    """
    z = _scores(query, keys) / above_zero("temperature", temperature, query.dtype)
    z[..., positive] = -torch.inf
    return torch.softmax(z, -1)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    return (keys @ query[..., None]).squeeze(-1)
