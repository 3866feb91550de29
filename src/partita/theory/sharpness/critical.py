"""The critical scale of a row: where its best key parts from those that compete with it.

    N(x) = #{ j : max_k s_k - s_j <= x }          critical = max over x > 0 of log N(x) / x

At a scale above it every gap is worth its competitors, N(x) exp(-scale x) < 1, and the row condenses on a few keys; at
a scale below it the competitors at the gap that decides outweigh the best. The growth of N with the length is all there
is to the laws sqrt(log n), log n and n: they are rows of Gaussian scores, of one key with a margin, of bounded scores.
From Hayase and Karakida (2026), A unified framework for critical scaling of inverse temperature in self-attention,
arXiv 2605.12697: the number is their upper-tail accumulation scale, the smallest L with N(x) <= exp(L x) for all x (as
it is restated elsewhere; their own text was not at hand). The bounds below hold for any row, not in the limit alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require

__all__ = ["critical_mass_bound", "critical_scale", "critical_scale_from_gaps", "gaussian_critical_scale"]


def critical_scale(scores: Tensor, *, least: int = 2) -> Tensor:  # (..., n) -> (...)
    """The scale at which the best key of each row parts from its competitors; -inf is a key that is not visible.

        critical = max over j >= least of log(j) / gap_j          gap_j the j-th smallest gap to the maximum, gap_1 = 0

    For scores that were made with a scale, it is what that scale must be multiplied by. inf where the best key is tied,
    0 where a row sees fewer keys than `least`. A larger `least` leaves out the nearest competitors, which are chance.
    Spec: M-COL-6.

    >>> critical_scale(torch.tensor([0.0, -1.0, -1.0, -1.0]))  # one key leads three by 1: log 4
    tensor(1.3863)
    """
    require(least >= 2, f"least counts the best key and its competitors, at least 2; got {least}.")
    found = scores.sort(-1, descending=True).values
    best = found[..., :1]
    gaps = torch.where(found.isneginf(), torch.inf, torch.where(best.isneginf(), 0.0, best) - found)
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=gaps.dtype)
    each = (count.log() / gaps)[..., least - 1 :]  # log 2 / 0 = inf: a tie never parts
    if each.shape[-1] == 0:
        return torch.zeros(scores.shape[:-1], dtype=gaps.dtype, device=scores.device)
    return each.amax(-1)


def critical_scale_from_gaps(edges: Tensor, counts: Tensor, *, least: int = 2) -> Tensor:  # (E,), (..., E) -> (...)
    """The same from the gap-counting function at some edges, as `Gibbs.gaps(edges)` streams it: at most the true one.

        critical >= max over edges of log N(edge) / edge          edges with at least `least` keys

    Spec: M-COL-6, M-COL-5.

    >>> critical_scale_from_gaps(torch.tensor([0.5, 1.0, 2.0]), torch.tensor([[1, 4, 4]]))  # log 4 at a gap of 1
    tensor([1.3863])
    """
    require(edges > 0, f"edges must be positive; got {edges}.")
    require(least >= 2, f"least counts the best key and its competitors, at least 2; got {least}.")
    wide = edges if edges.is_floating_point() else edges.double()
    each = counts.clamp(min=1).to(wide.dtype).log() / wide
    return torch.where(counts >= least, each, 0.0).amax(-1)


def critical_mass_bound(ratio: Number) -> Tensor:
    """The most that all keys together can weigh, the best one counting 1, at so many times the critical scale.

        sum_j exp(-scale gap_j) <= zeta(scale / critical)          so p_max >= 1 / zeta(ratio), whatever n

    since gap_j >= log(j) / critical. inf at and below the critical scale, where there is no bound for all n: there,
    with the gap x that decides, the mass is at least N(x)^(1 - ratio). Spec: M-COL-6.

    >>> round(critical_mass_bound(2.0).item(), 4)  # pi^2 / 6
    1.6449
    """
    ratio = number(ratio)
    above = torch.where(ratio > 1, ratio, 2.0)
    return torch.where(ratio > 1, torch.special.zeta(above, torch.ones_like(above)), torch.inf)


def gaussian_critical_scale(n: Number, sigma: Number = 1.0) -> Tensor:
    """The typical critical scale of n Gaussian scores: the rate at which competitors gather below their maximum.

        n phi(a) / sigma,   n (1 - Phi(a)) = 1          near sqrt(2 log n) / sigma

    N(x) is about exp(rate * x) near the maximum, as for scores with an exponential tail, whose rate does not grow.
    Spec: M-COL-6, M-SCL-14.

    >>> round(gaussian_critical_scale(1e6).item(), 2), round((2 * math.log(1e6)) ** 0.5, 2)
    (4.95, 5.26)
    """
    size = number(n)
    require(size > 1, f"n counts keys, more than one; got {size}.")
    level = -torch.special.ndtri(1 / size)
    return size * torch.exp(-(level**2) / 2) / math.sqrt(2 * math.pi) / number(sigma)
