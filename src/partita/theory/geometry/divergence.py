"""Distances between laws: from weights, from logits, and the metric one."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import require
from partita.theory.information.derivatives import score_cumulants
from partita.theory.information.entropy import entropy_of
from partita.theory.law import gibbs_law

__all__ = ["fisher_rao_distance", "gibbs_kl", "jensen_shannon", "kl", "kl_scale_expansion", "total_variation"]


def kl(p: Tensor, q: Tensor) -> Tensor:  # (..., n) -> (...)
    """Kullback-Leibler divergence of q from p; not symmetric.

        KL(p || q) = sum_j p_j log(p_j / q_j) >= 0

    Infinite where q misses a key that p has. Spec: M-GEO-2.
    From Kullback and Leibler (1951), On information and sufficiency.

    >>> kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))  # log 2
    tensor(0.6931)
    """
    cross = torch.where(p > 0, p * q.log(), 0.0)
    return (torch.xlogy(p, p) - cross).sum(-1)


def gibbs_kl(logits: Tensor, other: Tensor) -> Tensor:  # (..., n) -> (...)
    """The same between softmax(logits) and softmax(other): the Bregman divergence of log Z.

        KL = log Z(z') - log Z(z) - <p, z' - z>

    Spec: M-GEO-2.

    >>> gibbs_kl(torch.zeros(2), torch.zeros(2)).item()
    0.0
    """
    law, that = gibbs_law(logits), gibbs_law(other)
    return torch.where(law.probs > 0, law.probs * (law.log_probs - that.log_probs), 0.0).sum(-1)


def kl_scale_expansion(scores: Tensor, scale: float, step: float) -> Tensor:  # (...)
    """Divergence between a row at scale and at scale + step, to second order.

        KL = step^2 / 2 * Var_p(s)

    Spec: M-GEO-2.

    >>> kl_scale_expansion(torch.tensor([1.0, -1.0]), 0.0, 0.1)  # 0.01 / 2
    tensor(0.0050)
    """
    return 0.5 * step**2 * score_cumulants(scores, scale).variance


def jensen_shannon(laws: Tensor, dim: int = -2) -> Tensor:
    """How different several laws are: the divergence of each from their mean, averaged.

        JSD = H(mean p) - mean H(p)   in [0, log count]

    Spec: M-GEO-2, M-INF-6.
    From Lin (1991), Divergence measures based on the Shannon entropy.

    >>> jensen_shannon(torch.eye(2))  # two different one-hots: log 2
    tensor(0.6931)
    """
    require(dim != -1 and dim != laws.dim() - 1, "dim is the axis of the laws; the last axis holds their weights.")
    # xlogy keeps 0 log 0 = 0; entropy_of works on the last axis, which stays last.
    return entropy_of(laws.mean(dim)) - entropy_of(laws).mean(dim if dim >= 0 else dim + 1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the l1 distance: the most by which the probability of an event can differ.

        TV = sum_j |p_j - q_j| / 2

    Spec: M-SPA-1, M-GEO-6.

    >>> total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    tensor(0.5000)
    """
    return (p - q).abs().sum(-1) / 2


def fisher_rao_distance(p: Tensor, q: Tensor) -> Tensor:  # (..., n) -> (...)
    """The length of the shortest path between two laws in the Fisher metric.

        d = 2 arccos sum_j sqrt(p_j q_j)   in [0, pi]

    Defined on the closed simplex: pi for laws without a common key. Spec: M-GEO-5.
    From Rao (1945), Information and the accuracy attainable in the estimation of statistical parameters.

    >>> fisher_rao_distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor(3.1416)
    """
    # arccos(1 - x) loses half the digits near 1; 4 arcsin(|sqrt p - sqrt q| / 2) is the same angle and does not.
    chord = (p.sqrt() - q.sqrt()).norm(dim=-1)
    return 4 * torch.asin((chord / 2).clamp(max=0.5**0.5))
