"""Entropies in one pass over keys, without a row of scores in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from partita.errors import ShapeError
from partita.gibbs import Gibbs
from partita.support import Support
from partita.theory._domain import Number, require

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["collision_log_mass", "renyi_entropy", "streaming_entropy"]


class Ingredients(TypedDict, total=False):
    """What makes a distribution besides query and key."""

    scale: Number
    bias: Tensor | None
    support: Support | None


def streaming_entropy(chunks: Iterable[Tensor]) -> Tensor:  # (...)
    """Entropy of one long row given piece by piece, with the centred recurrence.

        m' = max(m, max z),   c = exp(m - m'),   w = exp(z - m')
        t <- c (t + (m - m') l) + sum w (z - m'),   l <- c l + sum w
        H  = log l - t / l

    The old l enters t before it is rescaled. Masked logits are -inf. No keys at all give 0. Spec: M-ENT-3.
    The running maximum and sum are those of Milakov and Gimelshein (2018), Online normalizer calculation for softmax.

    >>> streaming_entropy([torch.zeros(3), torch.zeros(5)])  # uniform over 8
    tensor(2.0794)
    """
    peak = mass = first = None
    for z in chunks:
        top = z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:-1], -torch.inf)
        if peak is None or mass is None or first is None:
            peak, mass, first = torch.full_like(top, -torch.inf), torch.zeros_like(top), torch.zeros_like(top)
        new = torch.maximum(peak, top)
        shift = torch.where(peak.isneginf(), 0.0, peak - new)
        ratio = torch.where(peak.isneginf(), 0.0, shift.exp())
        centred = torch.where(z.isneginf(), 0.0, z - new[..., None])
        weight = torch.where(z.isneginf(), 0.0, centred.exp())
        first = ratio * (first + shift * mass) + (weight * centred).sum(-1)
        mass = ratio * mass + weight.sum(-1)
        peak = new
    if mass is None or first is None:
        raise ShapeError("streaming_entropy needs at least one chunk to know the shape of the rows; got none.")
    safe = torch.where(mass > 0, mass, 1.0)
    return safe.log() - first / safe


def collision_log_mass(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    *,
    order: float = 2.0,
    scale: Number = 1.0,
    bias: Tensor | None = None,
    support: Support | None = None,
) -> Tensor:  # (..., n_query)
    """Log of the sum of powers of the weights, streaming: two log-partitions, one at `order` times the scale.

        log sum_j p_j^a = log Z(a z) - a log Z(z)

    -inf on an empty row. Spec: M-ENT-4.

    >>> collision_log_mass(torch.zeros(1, 2), torch.zeros(4, 2))  # 4 * (1/4)^2 = 1/4
    tensor([-1.3863])
    """
    once = Gibbs(query, key, scale=scale, bias=bias, support=support)
    more = Gibbs(query, key, scale=order * scale, bias=None if bias is None else order * bias, support=support)
    log_z, log_za = once.log_partition(), more.log_partition()
    return torch.where(log_z.isneginf(), -torch.inf, log_za - order * log_z)


def renyi_entropy(query: Tensor, key: Tensor, *, order: float = 2.0, **ingredients: Unpack[Ingredients]) -> Tensor:
    """Renyi entropy of every row, streaming; exp of order 2 is the effective sample size.

        H_a = log sum_j p_j^a / (1 - a)

    Order 1 is Shannon's and belongs to `Gibbs.entropy`. 0 on an empty row. Spec: M-ENT-4, M-SPE-4.
    Shapes and ingredients (scale, bias, support) as for `collision_log_mass`.
    From Renyi (1961), On measures of entropy and information.

    >>> round(renyi_entropy(torch.zeros(1, 2), torch.zeros(4, 2)).exp().item(), 4)  # four equal weights
    4.0
    """
    require(order > 0 and order != 1, f"order must be positive and not 1 (that is Gibbs.entropy); got {order}.")
    log_mass = collision_log_mass(query, key, order=order, **ingredients)
    return torch.where(log_mass.isneginf(), 0.0, log_mass / (1.0 - order))
