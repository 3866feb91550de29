"""What a contrastive batch says about itself: how many negatives really push, how hard the hardest is, who wins.

effective_negatives = exp(H(p restricted to the negatives))     between 1 and their number
hardest_share       = largest share of one negative in the push, P_m / (1 - P_+)         (M-INC-7)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.contrastive.candidates import Bank
from partita.engine import State, Stats
from partita.precision import product
from partita.rows import LossStats, and_fields

__all__ = ["ContrastStats", "LabelStats", "above", "per_row", "readout", "similarity_moments", "width_of"]


_APART = (
    *("effective_negatives", "hardest_share", "positive_similarity", "negative_similarity", "negative_variance"),
    *("negatives", "scale", "query_norm", "key_norm"),
)
_BY_LABEL = ("correct", "confidence", "nll", "positives", "negatives", "effective_negatives", "scale", "query_norm")


class ContrastStats(and_fields(LossStats, *_APART), LossStats):  # type: ignore[misc]
    """`LossStats` of each anchor's candidates, and what is said of positive and negatives apart.

    Similarities are before the temperature; `negative_similarity` and `negative_variance` are over all negatives given.
    """

    __slots__ = ()
    __repr__ = Stats.__repr__
    effective_negatives: Tensor
    hardest_share: Tensor
    positive_similarity: Tensor
    negative_similarity: Tensor  # mean over the negatives, each counted once
    negative_variance: Tensor
    negatives: Tensor  # how many there are
    scale: Tensor  # what similarities are multiplied by: 1 / temperature
    query_norm: Tensor  # of the anchor, as it enters the product
    key_norm: Tensor  # of its positive, likewise

    @property
    def information_cap(self) -> Tensor:
        """The most that a loss with so many candidates can say, log(1 + negatives), the mean over the anchors."""
        return self.negatives.log1p().mean()

    @property
    def information_bound(self) -> Tensor:
        """Mutual information of anchor and positive is at least this, in expectation: the cap minus the mean nll.

        What `partita.mutual_information_bound` says of the loss, for as many candidates as each anchor really had.
        """
        return self.information_cap - self.nll.detach().mean()


class LabelStats(and_fields(Stats, *_BY_LABEL), Stats):  # type: ignore[misc]
    """The row statistics of anchors with many positives, and what is said of positives and negatives apart."""

    __slots__ = ()
    __repr__ = Stats.__repr__
    correct: Tensor  # the best candidate is a positive
    confidence: Tensor
    nll: Tensor  # the mean over the anchor's positives; 0 where it has none
    positives: Tensor  # how many there are
    negatives: Tensor
    effective_negatives: Tensor
    scale: Tensor
    query_norm: Tensor


def readout(
    whole: State,
    negatives: State,
    rank: Tensor,
    nll: Tensor,
    positive: Tensor,
    moments: tuple[Tensor, Tensor],
    scale: float | Tensor,
    vectors: tuple[Tensor, Tensor],
) -> ContrastStats:
    """Statistics of the rows, from the state of all candidates and that of the negatives; vectors: anchors, positives.

    With no negative at all the share of the hardest and the number that push are 0.
    """
    share = negatives.confidence()
    return ContrastStats(  # type: ignore[call-arg]
        *whole.stats(),
        rank,
        rank == 0,
        1.0 / whole.mass,
        nll,
        width_of(negatives),
        share.detach(),
        positive.detach(),
        *(x.detach() for x in moments),
        negatives.count.detach(),
        per_row(scale, nll),
        *(torch.linalg.vector_norm(x.detach().to(nll.dtype), dim=-1) for x in vectors),
    )


@torch.no_grad()
def width_of(negatives: State) -> Tensor:  # (n,)
    """exp(H) of the negatives, 0 where there are none."""
    width = negatives.entropy().exp()
    return torch.where(negatives.empty(), torch.zeros_like(width), width)


def per_row(scale: float | Tensor, like: Tensor) -> Tensor:
    """One number per row, without gradient."""
    return torch.as_tensor(scale, dtype=like.dtype, device=like.device).detach().expand(like.shape)


@torch.no_grad()
def above(bank: Bank, query: Tensor, level: Tensor) -> Tensor:  # (n,)
    """How many of the keys a row may see are more similar to it than `level`, which need not be a key's."""
    rows = query if bank.query is None else bank.query
    if bank.key.dim() == 3:
        return ((rows[:, None, :] * bank.key).sum(-1) > level[:, None]).sum(-1)
    return bank.processes.count_above(rows, bank.key, level, support=bank.support, view=bank.view, kind=bank.kind)


@torch.no_grad()
def similarity_moments(
    banks: list[Bank], query: Tensor, positive: Tensor, left_out: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:  # (n,), (n,)
    """Mean and variance of the negatives' similarities, each counted once: polynomials of the keys, no pass.

    left_out: similarities (n,) of keys in the banks that are no negatives.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    count: int | Tensor = 0
    first, second = torch.zeros_like(positive), torch.zeros_like(positive)
    for bank in banks:
        rows, key = query.to(dtype), bank.key.to(dtype)
        if key.dim() == 3:
            s = (rows[:, None, :] * key).sum(-1)
            first, second, keys = first + s.sum(-1), second + s.square().sum(-1), key.shape[-2]
        else:
            sums, squares = (bank.processes.added(x) for x in (key.sum(0), product(key.mT, key)))
            sizes = bank.processes.sizes  # none where nobody had to be asked
            keys = sum(sizes[bank.kind]) if sizes else key.shape[-2]
            keys = keys if bank.used is None else bank.used.sum()  # type: ignore[assignment]
            first = first + product(rows, sums)
            second = second + (product(rows, squares) * rows).sum(-1)
        count = count + keys
    for one in left_out:
        first, second, count = first - one, second - one.square(), count - 1
    n = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
    mean = first / n
    return mean, (second / n - mean.square()).clamp(min=0.0)
