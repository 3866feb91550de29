"""What a contrastive batch says about itself: how many negatives really push, how hard the hardest is, who wins.

effective_negatives = exp(H(p restricted to the negatives))     between 1 and their number
hardest_share       = largest share of one negative in the push, P_m / (1 - P_+)         (M-INC-7)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.contrastive.candidates import Bank
from partita.engine import State
from partita.rows import LossStats, multiplier

__all__ = ["ContrastStats", "above", "readout", "similarity_moments"]


class _ContrastFields(NamedTuple):
    log_partition: Tensor
    entropy: Tensor
    mean_score: Tensor
    score_variance: Tensor
    max_score: Tensor
    visible: Tensor
    target_rank: Tensor
    correct: Tensor
    confidence: Tensor
    nll: Tensor
    effective_negatives: Tensor
    hardest_share: Tensor
    positive_similarity: Tensor
    negative_similarity: Tensor  # mean over the negatives, each counted once
    negative_variance: Tensor


class ContrastStats(_ContrastFields, LossStats):  # type: ignore[misc]  # tuples whose first fields agree
    """`LossStats` of each anchor's candidates, and what is said of positive and negatives apart.

    Similarities are before the temperature; `negative_similarity` and `negative_variance` are over all negatives given.
    """

    __slots__ = ()


def readout(
    whole: State, negatives: State, rank: Tensor, nll: Tensor, positive: Tensor, moments: tuple[Tensor, Tensor]
) -> ContrastStats:
    """Statistics of the rows, from the state of all candidates and that of the negatives."""
    share = negatives.confidence()
    width = torch.where(negatives.empty(), torch.zeros_like(share), multiplier(negatives.entropy()))
    return ContrastStats(
        *whole.stats(),
        rank,
        rank == 0,
        1.0 / whole.mass,
        nll,
        width.detach(),
        share.detach(),
        positive.detach(),
        *(x.detach() for x in moments),
    )


@torch.no_grad()
def above(bank: Bank, query: Tensor, level: Tensor) -> Tensor:  # (n,)
    """How many of the keys a row may see are more similar to it than `level`, which need not be a key's."""
    rows = query if bank.query is None else bank.query
    if bank.key.dim() == 3:
        return ((rows[:, None, :] * bank.key).sum(-1) > level[:, None]).sum(-1)
    return bank.processes.count_above(rows, bank.key, level, support=bank.support, view=bank.view, kind=bank.kind)


@torch.no_grad()
def similarity_moments(
    banks: list[Bank], query: Tensor, positive: Tensor, in_batch: bool
) -> tuple[Tensor, Tensor]:  # (n,), (n,)
    """Mean and variance of the negatives' similarities, each counted once: polynomials of the keys, no pass."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    count, first, second = 0, torch.zeros_like(positive), torch.zeros_like(positive)
    for bank in banks:
        rows, key = query.to(dtype), bank.key.to(dtype)
        if key.dim() == 3:
            s = (rows[:, None, :] * key).sum(-1)
            first, second, keys = first + s.sum(-1), second + s.square().sum(-1), key.shape[-2]
        else:
            sums, squares = (bank.processes.added(x) for x in (key.sum(0), key.mT @ key))
            keys = sum(bank.processes.sizes[bank.kind])
            first = first + rows @ sums
            second = second + ((rows @ squares) * rows).sum(-1)
        count += keys
    if in_batch:
        first, second, count = first - positive, second - positive.square(), count - 1
    mean = first / max(count, 1)
    return mean, (second / max(count, 1) - mean.square()).clamp(min=0.0)
