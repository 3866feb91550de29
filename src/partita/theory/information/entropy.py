"""Entropy of a softmax row: its value, its distance to the uniform law, its width, its cheap bounds."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.theory._domain import Number, require
from partita.theory.law import logits_of

__all__ = [
    "Bounds",
    "code_length",
    "effective_sample_size",
    "effective_width",
    "entropy",
    "entropy_bounds",
    "entropy_lower_bound",
    "entropy_of",
    "kl_to_uniform",
    "normalized_entropy",
]


class Bounds(NamedTuple):
    """Two numbers between which a third one lies."""

    lower: Tensor
    upper: Tensor


def entropy(
    logits: Tensor,  # (..., n_key)
    keep: Tensor | None = None,  # (..., n_key) bool
    *,
    base: float | None = None,
) -> Tensor:  # (...)
    """Entropy of softmax(logits) in nats (or in the given base), from centred logits.

        H = log sum_j w_j - sum_j w_j c_j / sum_j w_j,     c = z - max z,  w = exp(c)

    Equal to ``torch.distributions.Categorical(logits=logits).entropy()`` where nothing is masked.
    The uncentred log Z - E[z] loses its digits to a common offset. A row without keys gives 0. Spec: M-ENT-1, M-ENT-3.

    >>> entropy(torch.zeros(8), base=2)  # one of 8: three bits
    tensor(3.)
    """
    z = logits_of(logits, 1.0, None, keep)
    seen = ~z.isneginf()
    peak = z.detach().amax(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    weight = torch.exp(z - peak)
    centred = torch.where(seen, z - peak, 0.0)
    mass = weight.sum(-1)
    safe = torch.where(seen.any(-1), mass, 1.0)
    return _in_base(safe.log() - (weight * centred).sum(-1) / safe, base)


def entropy_of(
    probs: Tensor,  # (..., n)
    *,
    base: float | None = None,
) -> Tensor:  # (...)
    """Entropy of weights that are already there, with 0 log 0 = 0.

        H = -sum_j p_j log p_j

    Spec: M-ENT-1.

    >>> entropy_of(torch.tensor([0.5, 0.5, 0.0]))  # log 2
    tensor(0.6931)
    """
    return _in_base(-torch.xlogy(probs, probs).sum(-1), base)


def code_length(entropy_nats: Tensor) -> Bounds:
    """Mean bits per key of the best prefix code for keys drawn from the row.

        H / ln 2  <=  length  <  H / ln 2 + 1

    Spec: M-ENT-5, M-RMK-4.
    From Shannon (1948), A mathematical theory of communication.

    >>> code_length(entropy(torch.zeros(1024))).lower  # ten bits name one of 1024
    tensor(10.)
    """
    bits = entropy_nats / log(2.0)
    return Bounds(bits, bits + 1.0)


def kl_to_uniform(
    logits: Tensor,  # (..., n_key)
    keep: Tensor | None = None,
) -> Tensor:  # (...)
    """The information a row has already used: how far it is from the uniform law on its visible keys.

        D = log n - H = KL(p || uniform) >= 0

    0 on rows with at most one key. Spec: M-ENT-2.

    >>> kl_to_uniform(torch.tensor([9e9, 0.0, 0.0, 0.0]))  # one-hot among four: log 4
    tensor(1.3863)
    """
    return _visible(logits, keep).clamp(min=1).log() - entropy(logits, keep)


def normalized_entropy(
    logits: Tensor,  # (..., n_key)
    keep: Tensor | None = None,
) -> Tensor:  # (...)
    """Entropy as a fraction of the most it can be.

        H / log n

    NaN on rows with fewer than two keys, where the fraction has no meaning. Spec: M-ENT-2, M-INF-8.

    >>> normalized_entropy(torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]]))
    tensor([1., nan])
    """
    n = _visible(logits, keep)
    return torch.where(n > 1, entropy(logits, keep) / n.clamp(min=2).log(), torch.nan)


def effective_width(logits: Tensor, keep: Tensor | None = None) -> Tensor:
    """How many equally weighted keys would have this entropy; not a rank (see `spectrum.effective_rank`).

        width = exp(H)

    1 on an empty row. Spec: M-ENT-4.

    >>> effective_width(torch.tensor([0.0, 0.0, 0.0, -50.0]))
    tensor(3.)
    """
    return entropy(logits, keep).exp()


def effective_sample_size(logits: Tensor, keep: Tensor | None = None) -> Tensor:
    """How many equally weighted keys would average noise as well as this row.

        n_eff = 1 / sum_j p_j^2,     1 <= n_eff <= exp(H) <= n

    0 on an empty row. Spec: M-ENT-4, M-ROB-2.

    >>> effective_sample_size(torch.tensor([1.0, 3.0]).log())  # 1 / (1/16 + 9/16)
    tensor(1.6000)
    """
    z = logits_of(logits, 1.0, None, keep)
    empty = z.isneginf().all(-1)
    z = z.masked_fill(empty[..., None], 0.0)
    size = torch.exp(2.0 * torch.logsumexp(z, -1) - torch.logsumexp(2.0 * z, -1))
    return size.masked_fill(empty, 0.0)


def entropy_lower_bound(
    scores: Tensor,  # (..., n_key)
    scale: Number = 1.0,
    keep: Tensor | None = None,
) -> Tensor:  # (...)
    """A certificate from the mean and the maximum alone; never an estimate of H.

        H >= log n - scale * (max s - mean s)

    Vacuous (negative) once scale * (max - mean) > log n. No bias, scale >= 0. Spec: M-ENT-6.

    >>> entropy_lower_bound(torch.tensor([1.0, -1.0]), 0.5)  # log 2 - 0.5 * 1
    tensor(0.1931)
    """
    require(scale >= 0, f"the bound needs scale >= 0; got {scale}. Negate the scores instead.")
    z = logits_of(scores, 1.0, None, keep)
    n = _visible(scores, keep)
    mean = torch.where(z.isneginf(), 0.0, z).sum(-1) / n.clamp(min=1)
    spread = torch.where(n > 0, z.amax(-1) - mean, 0.0)
    return n.clamp(min=1).log() - scale * spread


def entropy_bounds(gibbs: Gibbs) -> Bounds:  # (..., n_query)
    """What the largest weight alone says about the entropy, streaming.

        -log p_max  <=  H  <=  h(p_max) + (1 - p_max) log(n - 1),      log p_max = max_score - log_partition

    with h the entropy of a coin. Both ends meet for a one-hot and for a uniform row. 0 on empty rows.
    Spec: M-ENT-1, M-SPA-2.

    >>> from partita import Gibbs
    >>> bounds = entropy_bounds(Gibbs(torch.zeros(1, 2), torch.zeros(4, 2)))
    >>> [round(x.item(), 4) for x in bounds]  # uniform: log 4 twice
    [1.3863, 1.3863]
    """
    n = gibbs.visible()
    log_top = torch.where(n > 0, gibbs.max_score() - gibbs.log_partition(), 0.0).clamp(max=0.0)
    top = log_top.exp()
    coin = -torch.xlogy(top, top) - torch.xlogy(1.0 - top, 1.0 - top)
    return Bounds(-log_top, coin + (1.0 - top) * (n - 1.0).clamp(min=1.0).log())


def _visible(logits: Tensor, keep: Tensor | None) -> Tensor:
    return (~logits_of(logits, 1.0, None, keep).isneginf()).sum(-1).to(logits.dtype)


def _in_base(nats: Tensor, base: float | None) -> Tensor:
    if base is None:
        return nats
    require(base > 1.0, f"the base of a logarithm must exceed 1; got {base}.")
    return nats / log(base)
