"""The backward pass of an attention layer in closed form: the reference for gradient tests. Dense."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import Number, per_row
from partita.theory.geometry.jacobian import softmax_vjp
from partita.theory.law import gibbs_law

__all__ = ["AttentionGradients", "attention_backward", "projection_gradients", "query_gradient"]


class AttentionGradients(NamedTuple):
    """Gradients of a loss through out = softmax(scale * Q K^T + bias) V."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor  # (..., n_query, n_key)
    scale: Tensor  # (..., n_query)


def attention_backward(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    value: Tensor,  # (..., n_key, dim_value)
    grad: Tensor,  # (..., n_query, dim_value)
    *,
    scale: Number = 1.0,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> AttentionGradients:
    """Gradients with respect to everything attention is made of.

        dV = A^T G,   dA = G V^T,   dZ = A * (dA - rowsum(A * dA)),   db = dZ
        dS = scale dZ,   dscale_i = sum_j dZ_ij s_ij,   dQ = dS K,   dK = dS^T Q

    Rows without keys contribute 0. Spec: M-DER-6.

    >>> g = attention_backward(torch.ones(1, 1), torch.ones(2, 1), torch.ones(2, 1), torch.ones(1, 1))
    >>> g.query.item(), g.value.squeeze().tolist()  # equal values: the scores do not matter
    (0.0, [0.5, 0.5])
    """
    scores = query @ key.mT
    weights = gibbs_law(scores, scale=scale, bias=bias, keep=keep).probs
    dz = softmax_vjp(weights, grad @ value.mT)
    ds = per_row(scale, dz) * dz
    return AttentionGradients(ds @ key, ds.mT @ query, weights.mT @ grad, dz, (dz * scores).sum(-1))


def projection_gradients(inputs: Tensor, grad: Tensor) -> Tensor:  # (..., n, dim_model), (..., n, dim)
    """Gradient of a projection from that of what it produced; a product, not a chain of matrices.

        dW = X^T dQ

    Spec: M-DER-6.

    >>> projection_gradients(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]))
    tensor([[11.]])
    """
    return inputs.transpose(-1, -2) @ grad


def query_gradient(
    probs: Tensor,  # (..., n_key)
    key: Tensor,  # (n_key, dim)
    value: Tensor,  # (n_key, dim_value)
    grad: Tensor,  # (..., dim_value)
    scale: float = 1.0,
) -> Tensor:  # (..., dim)
    """Gradient of <grad, out> by one query: a covariance under its weights.

        scale * Cov_p(key, <grad, value>)

    Spec: M-DER-6.

    >>> sign = torch.tensor([[1.0], [-1.0]])
    >>> query_gradient(torch.tensor([0.5, 0.5]), sign, sign, torch.ones(1))  # variance of a fair sign
    tensor([1.])
    """
    c = grad @ value.transpose(-1, -2)
    return scale * torch.einsum("...n,...n,nd->...d", probs, c - (probs * c).sum(-1, keepdim=True), key)
