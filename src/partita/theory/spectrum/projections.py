"""The bilinear form behind a head: its singular values, its rank, the bound it puts on scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import require_shape

__all__ = ["RowFactors", "match_form", "match_singular_values", "row_svd", "score_bound"]


class RowFactors(NamedTuple):
    """W = rotate @ diag(stretch) @ back, in the order a row vector x meets them."""

    rotate: Tensor  # (dim_in, r)
    stretch: Tensor  # (r,)
    back: Tensor  # (r, dim_out)


def row_svd(weight: Tensor) -> RowFactors:  # (dim_in, dim_out)
    """A projection taken apart in the order in which x @ W applies it: U first, then the stretch, then V^T.

        x W = ((x U) S) V^T

    For column vectors W x the order is V^T, S, U. Spec: M-RMK-3.

    >>> row_svd(torch.diag(torch.tensor([3.0, 2.0]))).stretch
    tensor([3., 2.])
    """
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    return RowFactors(u, s, vh)


def match_form(weight_q: Tensor, weight_k: Tensor) -> Tensor:  # (dim_model, dim), (dim_model, dim)
    """The matrix with which two inputs are compared: bilinear, of rank at most the head dimension.

        <x W_Q, y W_K> = x (W_Q W_K^T) y^T

    A bias of the keys adds the same number to a whole row and is inert. Spec: M-ATT-2, M-RMK-3.

    >>> match_form(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [0.0]]))
    tensor([[3., 0.],
            [6., 0.]])
    """
    require_shape(
        weight_q.shape[-1] == weight_k.shape[-1],
        f"query and key projections must end in one dim; got {tuple(weight_q.shape)} and {tuple(weight_k.shape)}.",
    )
    return weight_q @ weight_k.transpose(-1, -2)


def match_singular_values(weight_q: Tensor, weight_k: Tensor, scale: float | None = None) -> Tensor:  # (..., dim)
    """Singular values of the scaled match, without building the dim_model x dim_model matrix.

        sv(W_Q W_K^T) * scale,      scale None: 1 / sqrt(dim)

    Through the two small triangular factors: O(dim_model dim^2). Spec: M-RMK-3.

    >>> match_singular_values(torch.eye(3)[:, :1], 2 * torch.eye(3)[:, :1])
    tensor([2.])
    """
    r_q = torch.linalg.qr(weight_q).R
    r_k = torch.linalg.qr(weight_k).R
    factor = weight_q.shape[-1] ** -0.5 if scale is None else scale
    values: Tensor = torch.linalg.svdvals(r_q @ r_k.transpose(-1, -2))
    return factor * values


def score_bound(weight_q: Tensor, weight_k: Tensor, norm_x: float, norm_y: float, scale: float | None = None) -> Tensor:
    """The largest score two inputs of these lengths can have.

        |score| <= sigma_max * |x| * |y|

    Spec: M-RMK-3, M-SCL-18.

    >>> score_bound(torch.eye(1), torch.eye(1), 2.0, 3.0)
    tensor(6.)
    """
    return match_singular_values(weight_q, weight_k, scale)[..., 0] * norm_x * norm_y
