"""The probability simplex: who belongs to it, its tangents, its pictures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partita.theory._domain import require, require_shape

__all__ = [
    "absolute_error",
    "cross_entropy_profile",
    "is_distribution",
    "loss_surface",
    "simplex_grid",
    "simplex_projection",
    "squared_error_profile",
    "tangent_projection",
    "triangle_coordinates",
]


def is_distribution(probs: Tensor, tolerance: float = 1e-6) -> Tensor:  # (..., n) -> (...) bool
    """Whether each row lies in the simplex, up to a tolerance.

        p_j >= 0,    sum_j p_j = 1

    NaN does not. Spec: M-GEO-1.

    >>> is_distribution(torch.tensor([[0.5, 0.5], [0.9, 0.2], [1.5, -0.5]]))
    tensor([ True, False, False])
    """
    return (probs >= -tolerance).all(-1) & ((probs.sum(-1) - 1).abs() <= tolerance)


def tangent_projection(vector: Tensor) -> Tensor:  # (..., n)
    """The part of a vector along the simplex.

        d - mean(d)

    Spec: M-GEO-1, M-GEO-4.

    >>> tangent_projection(torch.tensor([3.0, 1.0]))
    tensor([ 1., -1.])
    """
    return vector - vector.mean(-1, keepdim=True)


def simplex_projection(point: Tensor) -> Tensor:  # (..., n)
    """The nearest point of the simplex: sparsemax. Unlike softmax it is a projection, so twice is once.

        argmin_p |p - x|^2 = max(x - t, 0)  with t such that the sum is 1

    Spec: M-GIB-8.
    From Duchi, Shalev-Shwartz, Singer and Chandra (2008), Efficient projections onto the l1-ball for learning in high
    dimensions; as a map of scores, Martins and Astudillo (2016), From softmax to sparsemax.

    >>> simplex_projection(torch.tensor([2.0, 0.0]))
    tensor([1., 0.])
    """
    ordered = point.sort(-1, descending=True).values
    rank = torch.arange(1, point.shape[-1] + 1, device=point.device, dtype=point.dtype)
    excess = (ordered.cumsum(-1) - 1) / rank
    kept = (ordered > excess).sum(-1, keepdim=True)
    return (point - excess.gather(-1, kept - 1)).clamp(min=0)


def triangle_coordinates(probs: Tensor) -> Tensor:  # (..., 3) -> (..., 2)
    """Where three weights lie in a triangle with corners (0, 0), (1, 0) and (1/2, sqrt(3)/2).

        x = p_2 + p_3 / 2,    y = p_3 sqrt(3)/2

    Spec: M-GEO-1, M-LOSS-6.

    >>> triangle_coordinates(torch.tensor([0.0, 1.0, 0.0]))
    tensor([1., 0.])
    """
    require_shape(probs.shape[-1] == 3, f"a triangle shows three weights; got {probs.shape[-1]}.")
    return torch.stack([probs[..., 1] + probs[..., 2] / 2, probs[..., 2] * 3**0.5 / 2], -1)


def simplex_grid(steps: int, *, interior: bool = False) -> Tensor:  # (points, 3)
    """Evenly spaced points of the triangle of three weights, the corners included unless `interior`.

        (i, j, k) / steps    with i + j + k = steps

    Spec: M-GEO-1.

    >>> simplex_grid(1)
    tensor([[0., 0., 1.],
            [0., 1., 0.],
            [1., 0., 0.]], dtype=torch.float64)
    """
    require(steps >= 1, f"steps must be at least 1; got {steps}.")
    side = torch.arange(steps + 1, device="cpu")
    i, j = torch.meshgrid(side, side, indexing="ij")
    keep = i + j <= steps
    points = torch.stack([i[keep], j[keep], steps - i[keep] - j[keep]], -1).double() / steps
    return points[(points > 0).all(-1)] if interior else points


def loss_surface(
    loss: Callable[[Tensor, Tensor], Tensor],
    target: Tensor,  # (3,)
    steps: int = 40,
) -> tuple[Tensor, Tensor]:  # (points, 2), (points,)
    """A loss over the triangle of three weights: plane coordinates and heights, ready for a contour plot.

        height = loss(p, target)    at each interior grid point p

    Spec: M-LOSS-6.

    >>> xy, height = loss_surface(lambda p, y: (p - y).square().sum(-1), torch.tensor([1.0, 0.0, 0.0]), steps=3)
    >>> round(height.item(), 4)  # the only interior point is the centre: 4/9 + 1/9 + 1/9
    0.6667
    """
    points = simplex_grid(steps, interior=True)
    return triangle_coordinates(points), loss(points, target.to(points.dtype))


def squared_error_profile(p: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error on the two-point simplex with target (1, 0), and its slope: bounded by 4.

        loss = 2 (1 - p)^2,     slope = -4 (1 - p)

    Spec: M-LOSS-6.

    >>> squared_error_profile(torch.tensor(0.5))
    (tensor(0.5000), tensor(-2.))
    """
    return 2 * (1 - p) ** 2, -4 * (1 - p)


def cross_entropy_profile(p: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy on the two-point simplex with target (1, 0), and its slope: unbounded.

        loss = -log p,     slope = -1 / p

    Spec: M-LOSS-6.

    >>> cross_entropy_profile(torch.tensor(0.5))
    (tensor(0.6931), tensor(-2.))
    """
    return -p.log(), -1 / p


def absolute_error(probs: Tensor, target: Tensor) -> Tensor:  # (..., n), (...) -> (...)
    """l1 distance to a one-hot target: twice the missing mass.

        |p - e_t|_1 = 2 (1 - p_t),     gradient by logits  -2 p_t (e_t - p)

    Spec: M-LOSS-10.

    >>> absolute_error(torch.tensor([0.25, 0.75]), torch.tensor(1))
    tensor(0.5000)
    """
    return 2 * (1 - probs.gather(-1, target[..., None]).squeeze(-1))
