"""Second derivatives of InfoNCE: convex in the query alone and in the keys alone, not in both."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import Number, number
from partita.theory.geometry.jacobian import softmax_jacobian

__all__ = ["info_nce_hessian_joint", "info_nce_hessian_keys", "info_nce_hessian_mixed", "info_nce_hessian_query"]


def info_nce_hessian_query(query: Tensor, keys: Tensor, temperature: Number = 1.0) -> Tensor:  # (dim, dim)
    """Second derivative by the query: the covariance of the candidates under P, whatever the positive.

        Cov_P(k) / t^2

    Positive semidefinite. Spec: M-INC-5.

    >>> info_nce_hessian_query(torch.zeros(1), torch.tensor([[1.0], [-1.0]]))
    tensor([[1.]])
    """
    t, p = _law(query, keys, temperature)
    return keys.T @ softmax_jacobian(p) @ keys / t**2


def info_nce_hessian_keys(query: Tensor, keys: Tensor, temperature: Number = 1.0) -> Tensor:  # (n * dim, n * dim)
    """Second derivative by the flattened (row-major) keys.

        J(P) kron q q^T / t^2

    Positive semidefinite, of rank at most n - 1. Spec: M-INC-5.

    >>> info_nce_hessian_keys(torch.tensor([2.0]), torch.zeros(2, 1))  # 4 J
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    t, p = _law(query, keys, temperature)
    return torch.kron(softmax_jacobian(p), torch.outer(query, query)) / t**2


def info_nce_hessian_mixed(
    query: Tensor, keys: Tensor, positive: int = 0, temperature: Number = 1.0
) -> Tensor:  # (n, dim, dim)
    """Mixed derivative, first by key m, then by the query.

        (P_m - [m = +]) I / t + P_m q (k_m - E_P[k])^T / t^2

    Spec: M-INC-5.

    >>> info_nce_hessian_mixed(torch.zeros(1), torch.zeros(2, 1)).squeeze()
    tensor([-0.5000,  0.5000])
    """
    t, p = _law(query, keys, temperature)
    residual = p.clone()
    residual[positive] = residual[positive] - 1
    eye = torch.eye(len(query), dtype=query.dtype, device=query.device)
    centred = keys - p @ keys
    return residual[:, None, None] * eye / t + p[:, None, None] * query[:, None] * centred[:, None, :] / t**2


def info_nce_hessian_joint(query: Tensor, keys: Tensor, positive: int = 0, temperature: Number = 1.0) -> Tensor:
    """The whole second derivative by (query, flattened keys): indefinite in general.

        [[ H_qq, M^T ], [ M, H_kk ]]

    Spec: M-INC-5.

    >>> h = info_nce_hessian_joint(torch.zeros(1), torch.zeros(2, 1))
    >>> round(torch.linalg.eigvalsh(h)[0].item(), 4)  # -sqrt(1/2): a saddle
    -0.7071
    """
    mixed = info_nce_hessian_mixed(query, keys, positive, temperature).flatten(0, 1)  # (n * dim, dim)
    top = torch.cat([info_nce_hessian_query(query, keys, temperature), mixed.T], 1)
    return torch.cat([top, torch.cat([mixed, info_nce_hessian_keys(query, keys, temperature)], 1)], 0)


def _law(query: Tensor, keys: Tensor, temperature: Number) -> tuple[Tensor, Tensor]:
    t = number(temperature).to(query.dtype)
    return t, torch.softmax(keys @ query / t, -1)
