"""The simplex and its laws: projections, the Jacobian of softmax, divergences, the Fisher metric, smooth maxima."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from partita_theory._domain import Number, number, require, require_shape
from partita_theory.information.shannon import entropy_of, score_cumulants
from partita_theory.law import gibbs_law, softmax_jacobian


def is_distribution(probs: Tensor, tolerance: float = 1e-6) -> Tensor:  # (..., n) -> (...) bool
    """Whether each row lies in the simplex, up to a tolerance. NaN does not.

        p_j >= 0,    sum_j p_j = 1        (M-GEO-1)

    >>> is_distribution(torch.tensor([[0.5, 0.5], [0.9, 0.2], [1.5, -0.5]]))
    tensor([ True, False, False])
    """
    return (probs >= -tolerance).all(-1) & ((probs.sum(-1) - 1).abs() <= tolerance)


def tangent_projection(vector: Tensor) -> Tensor:  # (..., n)
    """The part of a vector along the simplex.

        d - mean(d)        (M-GEO-1, M-GEO-4)

    >>> tangent_projection(torch.tensor([3.0, 1.0]))
    tensor([ 1., -1.])
    """
    return vector - vector.mean(-1, keepdim=True)


def simplex_projection(point: Tensor) -> Tensor:  # (..., n)
    """The nearest point of the simplex: sparsemax. Unlike softmax it is a projection, so twice is once.

        argmin_p |p - x|^2 = max(x - t, 0)  with t such that the sum is 1        (M-GIB-8)

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

        x = p_2 + p_3 / 2,    y = p_3 sqrt(3)/2        (M-GEO-1, M-LOSS-6)

    >>> triangle_coordinates(torch.tensor([0.0, 1.0, 0.0]))
    tensor([1., 0.])
    """
    require_shape(probs.shape[-1] == 3, f"a triangle shows three weights; got {probs.shape[-1]}.")
    return torch.stack([probs[..., 1] + probs[..., 2] / 2, probs[..., 2] * 3**0.5 / 2], -1)


def simplex_grid(steps: int, *, interior: bool = False) -> Tensor:  # (points, 3)
    """Evenly spaced points of the triangle of three weights, the corners included unless `interior`.

        (i, j, k) / steps    with i + j + k = steps        (M-GEO-1)

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

        height = loss(p, target)    at each interior grid point p        (M-LOSS-6)

    >>> xy, height = loss_surface(lambda p, y: (p - y).square().sum(-1), torch.tensor([1.0, 0.0, 0.0]), steps=3)
    >>> round(height.item(), 4)  # the only interior point is the centre: 4/9 + 1/9 + 1/9
    0.6667
    """
    points = simplex_grid(steps, interior=True)
    return triangle_coordinates(points), loss(points, target.to(points.dtype))


def squared_error_profile(p: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error on the two-point simplex with target (1, 0), and its slope: bounded by 4.

        loss = 2 (1 - p)^2,     slope = -4 (1 - p)        (M-LOSS-6)

    >>> squared_error_profile(torch.tensor(0.5))
    (tensor(0.5000), tensor(-2.))
    """
    return 2 * (1 - p) ** 2, -4 * (1 - p)


def cross_entropy_profile(p: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy on the two-point simplex with target (1, 0), and its slope: unbounded.

        loss = -log p,     slope = -1 / p        (M-LOSS-6)

    >>> cross_entropy_profile(torch.tensor(0.5))
    (tensor(0.6931), tensor(-2.))
    """
    return -p.log(), -1 / p


def absolute_error(probs: Tensor, target: Tensor) -> Tensor:  # (..., n), (...) -> (...)
    """l1 distance to a one-hot target: twice the missing mass.

        |p - e_t|_1 = 2 (1 - p_t),     gradient by logits  -2 p_t (e_t - p)        (M-LOSS-10)

    >>> absolute_error(torch.tensor([0.25, 0.75]), torch.tensor(1))
    tensor(0.5000)
    """
    return 2 * (1 - probs.gather(-1, target[..., None]).squeeze(-1))


class JacobianNorms(NamedTuple):
    """Operator norms of J(p), named by the norms of input and output."""

    two_two: Tensor
    inf_inf: Tensor
    one_inf: Tensor
    inf_one: Tensor


def jacobian_trace(probs: Tensor) -> Tensor:  # (...)
    """How much gradient a row lets through: 0 when it is one-hot.

        tr J = 1 - sum_i p_i^2 = 1 - 1/n_eff        (M-DER-7, M-INF-8)

    >>> jacobian_trace(torch.full((4,), 0.25))
    tensor(0.7500)
    """
    return 1 - probs.square().sum(-1)


def jacobian_norms(probs: Tensor) -> JacobianNorms:  # (..., n)
    """Four norms of the Jacobian: how much weights can move per unit of score, by the way both are measured. Dense.

        2->2: top eigenvalue;   inf->inf: max 2 p_i (1 - p_i);   1->inf: max p_i (1 - p_i);   inf->1: `subset_norm`
        over all p at most 1/2, 1/2, 1/4 and 1, all at a two-way tie        (M-DER-1, M-ROB-11)

    >>> [round(x.item(), 4) for x in jacobian_norms(torch.tensor([0.5, 0.5]))]
    [0.5, 0.5, 0.25, 1.0]
    """
    spread = (probs * (1 - probs)).amax(-1)
    top = torch.linalg.eigvalsh(softmax_jacobian(probs))[..., -1]
    return JacobianNorms(top, 2 * spread, spread, subset_norm(probs))


def subset_norm(probs: Tensor) -> Tensor:  # (...)
    """The inf->1 norm of the Jacobian: how well the keys split into two halves of equal mass.

        max over subsets A of 4 P(A) (1 - P(A)),     P(A) = sum of p over A        (M-ROB-11)

    1 for a tie and for a uniform row of even length, 1 - 1/n^2 for one of odd length n. Exact by enumeration up to 16
    keys; beyond, the largest keys are dealt greedily, which is a lower bound.

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


def gibbs_kl(logits: Tensor, other: Tensor) -> Tensor:  # (..., n) -> (...)
    """The same between softmax(logits) and softmax(other): the Bregman divergence of log Z.

        KL = log Z(z') - log Z(z) - <p, z' - z>        (M-GEO-2)

    >>> gibbs_kl(torch.zeros(2), torch.zeros(2)).item()
    0.0
    """
    law, that = gibbs_law(logits), gibbs_law(other)
    return torch.where(law.probs > 0, law.probs * (law.log_probs - that.log_probs), 0.0).sum(-1)


def kl_scale_expansion(scores: Tensor, scale: float, step: float) -> Tensor:  # (...)
    """Divergence between a row at scale and at scale + step, to second order.

        KL = step^2 / 2 * Var_p(s)        (M-GEO-2)

    >>> kl_scale_expansion(torch.tensor([1.0, -1.0]), 0.0, 0.1)  # 0.01 / 2
    tensor(0.0050)
    """
    return 0.5 * step**2 * score_cumulants(scores, scale).variance


def jensen_shannon(laws: Tensor, dim: int = -2) -> Tensor:
    """How different several laws are: the divergence of each from their mean, averaged.

        JSD = H(mean p) - mean H(p)   in [0, log count]        (M-GEO-2, M-INF-6)

    From Lin (1991), Divergence measures based on the Shannon entropy.

    >>> jensen_shannon(torch.eye(2))  # two different one-hots: log 2
    tensor(0.6931)
    """
    require(dim != -1 and dim != laws.dim() - 1, "dim is the axis of the laws; the last axis holds their weights.")
    # xlogy keeps 0 log 0 = 0; entropy_of works on the last axis, which stays last.
    return entropy_of(laws.mean(dim)) - entropy_of(laws).mean(dim if dim >= 0 else dim + 1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the l1 distance: the most by which the probability of an event can differ.

        TV = sum_j |p_j - q_j| / 2        (M-SPA-1, M-GEO-6)

    >>> total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    tensor(0.5000)
    """
    return (p - q).abs().sum(-1) / 2


def fisher_rao_distance(p: Tensor, q: Tensor) -> Tensor:  # (..., n) -> (...)
    """The length of the shortest path between two laws in the Fisher metric; pi for laws without a common key.

        d = 2 arccos sum_j sqrt(p_j q_j)   in [0, pi]        (M-GEO-5)

    From Rao (1945), Information and the accuracy attainable in the estimation of statistical parameters.

    >>> fisher_rao_distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor(3.1416)
    """
    # arccos(1 - x) loses half the digits near 1; 4 arcsin(|sqrt p - sqrt q| / 2) is the same angle and does not.
    chord = (p.sqrt() - q.sqrt()).norm(dim=-1)
    return 4 * torch.asin((chord / 2).clamp(max=0.5**0.5))


fisher_logits = softmax_jacobian  # degenerate along a common shift


def fisher_free(probs: Tensor) -> Tensor:  # (..., n - 1, n - 1)
    """Fisher information in the free coordinates p_1 .. p_{n-1}: the only invertible one.

        g_ij = [i = j] / p_i + 1 / p_n        (M-GEO-3)

    >>> fisher_free(torch.tensor([0.5, 0.25, 0.25]))
    tensor([[6., 4.],
            [4., 8.]])
    """
    require_shape(probs.shape[-1] >= 2, "free coordinates need at least two weights.")
    return torch.diag_embed(1 / probs[..., :-1]) + (1 / probs[..., -1])[..., None, None]


def fisher_homogeneous(probs: Tensor) -> Tensor:  # (..., n, n)
    """Fisher information in homogeneous coordinates p = a / sum(a), at sum(a) = 1; singular along p.

        g_ij = [i = j] / p_i - 1        (M-GEO-3)

    >>> fisher_homogeneous(torch.tensor([0.5, 0.5])) @ torch.tensor([0.5, 0.5])
    tensor([0., 0.])
    """
    return torch.diag_embed(1 / probs) - 1


def fisher_quadratic_form(probs: Tensor, tangent: Tensor) -> Tensor:  # (...)
    """Squared length of a tangent vector (entries summing to 0) in the Fisher metric, in any coordinates.

        g(d, d) = sum_j d_j^2 / p_j        (M-GEO-3)

    >>> fisher_quadratic_form(torch.tensor([0.5, 0.5]), torch.tensor([0.1, -0.1]))
    tensor(0.0400)
    """
    return (tangent.square() / probs).sum(-1)


def entropy_differential(probs: Tensor) -> Tensor:
    """The plain derivative of the entropy by the weights, as if they were free.

        -log p - 1        (M-GEO-4)

    >>> entropy_differential(torch.tensor([1.0]))
    tensor([-1.])
    """
    return -probs.log() - 1


def entropy_tangent_gradient(probs: Tensor) -> Tensor:
    """The Euclidean gradient of the entropy along the simplex.

        -log p + mean(log p)        (M-GEO-4)

    >>> entropy_tangent_gradient(torch.full((3,), 1 / 3)).abs().max().item()
    0.0
    """
    log_p = probs.log()
    return log_p.mean(-1, keepdim=True) - log_p


def entropy_fisher_gradient(probs: Tensor) -> Tensor:
    """The gradient of the entropy in the Fisher metric; in general not parallel to uniform - p.

        -p * (log p + H)        (M-GEO-4)

    From Amari (1998), Natural gradient works efficiently in learning.

    >>> entropy_fisher_gradient(torch.full((2,), 0.5)).abs().max().item()
    0.0
    """
    return -torch.xlogy(probs, probs) - probs * entropy_of(probs)[..., None]


def temper(probs: Tensor, time: Number) -> Tensor:
    """Where Fisher-gradient ascent of the entropy has carried a law after some time: temperature exp(time), exactly.

        p(t) ~ p(0)^exp(-t)        (M-GEO-4)

    >>> temper(torch.tensor([0.2, 0.8]), torch.tensor(2.0).log())  # square roots: odds 4 become 2
    tensor([0.3333, 0.6667])
    """
    power = torch.exp(-number(time)).to(probs.dtype)
    return torch.softmax(power * probs.log(), -1)


class MaximumBounds(NamedTuple):
    """An interval that holds a smooth maximum."""

    lower: Tensor
    upper: Tensor


def smooth_max(scores: Tensor, scale: Number = 1.0) -> Tensor:  # (..., n) -> (...)
    """A smooth upper bound of the maximum. Close to the maximum only if its lead is much more than log(n) / scale.

        log(sum_j exp(scale * s_j)) / scale        (M-GIB-5)

    >>> smooth_max(torch.zeros(4), 2.0)  # log(4) / 2
    tensor(0.6931)
    """
    require(scale > 0, f"smooth_max needs scale > 0; got {scale}. For the minimum negate the scores.")
    return torch.logsumexp(scale * scores, -1) / scale


def smooth_mean_max(scores: Tensor, scale: Number = 1.0) -> Tensor:  # (..., n) -> (...)
    """The averaged form, between the mean and the maximum. The mean as scale goes to 0, the maximum as it grows.

        mean s  <=  log(mean_j exp(scale * s_j)) / scale  <=  max s        (M-GIB-5, M-ENT-6)

    >>> smooth_mean_max(torch.full((3,), 5.0), 2.0)
    tensor(5.)
    """
    return smooth_max(scores, scale) - log(scores.shape[-1]) / scale


def smooth_max_bounds(scores: Tensor, scale: Number = 1.0) -> MaximumBounds:
    """Where the smooth maximum must lie.

        max s  <=  smooth_max  <=  max s + log(n) / scale,     reached by equal scores alone        (M-GIB-5)

    >>> smooth_max_bounds(torch.tensor([1.0, 3.0]), 1.0)
    MaximumBounds(lower=tensor(3.), upper=tensor(3.6931))
    """
    require(scale > 0, f"smooth_max needs scale > 0; got {scale}.")
    top = scores.amax(-1)
    return MaximumBounds(top, top + log(scores.shape[-1]) / scale)
