"""Several heads over the same keys: how different their laws are, densely and streaming."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.support import Support
from partita.theory._domain import Number, require_shape
from partita.theory.geometry.divergence import jensen_shannon
from partita.theory.information.entropy import Bounds, entropy_of

__all__ = [
    "HeadDiversity",
    "head_affinity",
    "head_cosine",
    "head_diversity",
    "head_fisher_rao",
    "head_kl",
    "joint_entropy_bounds",
]


class HeadDiversity(NamedTuple):
    """Entropies of the heads of a row, and how different their laws are."""

    mean: Tensor
    least: Tensor
    most: Tensor
    divergence: Tensor


def head_diversity(probs: Tensor) -> HeadDiversity:  # (..., heads, n) -> fields (...)
    """Spread and Jensen-Shannon divergence of the heads of a row. Dense.

        JSD = H(mean over heads of p) - mean over heads of H     in [0, log heads]

    The spread of the *numbers* H is not diversity: two one-hot heads on different keys have H = 0 twice and JSD log 2.
    Spec: M-INF-6.

    >>> d = head_diversity(torch.eye(2))
    >>> d.mean.abs().item(), round(d.divergence.item(), 4)
    (0.0, 0.6931)
    """
    each = entropy_of(probs)
    return HeadDiversity(each.mean(-1), each.amin(-1), each.amax(-1), jensen_shannon(probs))


def joint_entropy_bounds(entropies: Tensor) -> Bounds:  # (..., heads) -> (...)
    """What the entropies of the heads allow for the entropy of all their indices together.

        max_r H_r  <=  H(all)  <=  sum_r H_r        the upper end for independent draws, the lower for equal heads

    Spec: M-INF-6.

    >>> joint_entropy_bounds(torch.tensor([1.0, 2.0]))
    Bounds(lower=tensor(2.), upper=tensor(3.))
    """
    return Bounds(entropies.amax(-1), entropies.sum(-1))


def head_affinity(
    query: Tensor,  # (..., heads, n_query, dim)
    key: Tensor,  # (..., heads, n_key, dim)
    *,
    scale: Number = 1.0,
    power: float = 0.5,
    support: Support | None = None,
) -> Tensor:  # (..., heads, heads, n_query)
    """Overlap of each pair of heads in every row, streaming: scores of two heads add up when vectors are concatenated.

        log sum_j (p_r p_s)^a = log Z(a z_r + a z_s) - a log Z(z_r) - a log Z(z_s),     a = power

    power 1/2 is Bhattacharyya's coefficient, power 1 the collision mass. Returned as a logarithm.
    Spec: M-INF-6, M-GEO-5.

    >>> q, k = torch.zeros(2, 1, 1), torch.zeros(2, 4, 1)
    >>> head_affinity(q, k)[0, 1].abs().item()  # equal laws overlap fully: log 1
    0.0
    """
    h = _heads(query, key)
    log_z = Gibbs(query, key, scale=scale, support=support).log_partition()
    rows = []
    for r in range(h):
        both_q = torch.cat([query[..., r : r + 1, :, :].expand_as(query), query], -1)
        both_k = torch.cat([key[..., r : r + 1, :, :].expand_as(key), key], -1)
        pair = Gibbs(both_q, both_k, scale=power * scale, support=support).log_partition()
        rows.append(pair - power * (log_z[..., r : r + 1, :] + log_z))
    return torch.stack(rows, -3)


def head_fisher_rao(query: Tensor, key: Tensor, *, scale: Number = 1.0, support: Support | None = None) -> Tensor:
    """Fisher-Rao distance of each pair of heads in every row, (..., heads, heads, n_query), streaming.

        2 arccos sum_j sqrt(p_r p_s)     in [0, pi]

    Spec: M-INF-6, M-GEO-5.

    >>> head_fisher_rao(torch.zeros(2, 1, 1), torch.zeros(2, 4, 1))[0, 1].item()
    0.0
    """
    affinity = head_affinity(query, key, scale=scale, support=support)
    return 2 * torch.acos(affinity.exp().clamp(max=1.0))


def head_cosine(query: Tensor, key: Tensor, *, scale: Number = 1.0, support: Support | None = None) -> Tensor:
    """Cosine of the angle between the weights of each pair of heads, (..., heads, heads, n_query), streaming.

        <p_r, p_s> / (|p_r| |p_s|)

    Spec: M-INF-6.

    >>> round(head_cosine(torch.zeros(2, 1, 1), torch.zeros(2, 4, 1))[0, 1].item(), 6)
    1.0
    """
    log_overlap = head_affinity(query, key, scale=scale, power=1.0, support=support)
    own = torch.diagonal(log_overlap, dim1=-3, dim2=-2).movedim(-1, -2)  # (..., heads, n_query)
    return torch.exp(log_overlap - (own[..., :, None, :] + own[..., None, :, :]) / 2)


def head_kl(query: Tensor, key: Tensor, *, scale: Number = 1.0, support: Support | None = None) -> Tensor:
    """KL(head r || head s) of every row, (..., heads, heads, n_query), streaming: one head's mean key is all it needs.

        KL = E_r[z_r] - log Z_r - (scale * <query_s, E_r[key_s]> - log Z_s)

    Exact; infinite differences do not occur, as both heads see the same support. Spec: M-INF-6, M-GEO-2.

    >>> head_kl(torch.zeros(2, 1, 1), torch.zeros(2, 4, 1))[0, 1].abs().item()
    0.0
    """
    h = _heads(query, key)
    law = Gibbs(query, key, scale=scale, support=support)
    log_z = law.log_partition()
    factor = scale[..., None] if isinstance(scale, Tensor) and scale.dim() else scale
    out = []
    for s in range(h):
        key_s = key[..., s : s + 1, :, :].expand(*key.shape)
        query_s = query[..., s : s + 1, :, :]
        mean = (factor * law.expectation(key_s) * query_s).sum(-1)
        out.append(law.mean_score() - log_z - (mean - log_z[..., s : s + 1, :]))
    return torch.stack(out, -2)


def _heads(query: Tensor, key: Tensor) -> int:
    require_shape(
        query.dim() >= 3 and query.shape[-3] == key.shape[-3],
        f"heads stand at dimension -3 of query and key; got {tuple(query.shape)} and {tuple(key.shape)}.",
    )
    return int(query.shape[-3])
