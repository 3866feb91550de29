"""Statistics of a contrastive batch: how many negatives really push, how hard the hardest is, who wins.

effective_negatives = exp(H(p restricted to the negatives))     between 1 and their number
hardest_share       = largest share of one negative in the push, P_m / (1 - P_+)         (M-INC-7)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita.contrastive.candidates import Anchors, Bank, paired_scores
from partita.engine import State, Stats
from partita.precision import no_autocast, product
from partita.rows import LossStats, and_fields, in_row_blocks
from partita.support import Support

__all__ = ["ContrastStats", "LabelStats", "label_stats", "readout"]


_SPLIT = (
    *("effective_negatives", "hardest_share", "positive_similarity", "negative_similarity", "negative_variance"),
    *("negatives", "scale", "query_norm", "key_norm"),
)
_BY_LABEL = ("correct", "confidence", "nll", "positives", "negatives", "effective_negatives", "scale", "query_norm")


class ContrastStats(and_fields(LossStats, *_SPLIT), LossStats):  # type: ignore[misc]
    """`LossStats` of each anchor's candidates, and separate ones of positive and negatives.

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
        """The most that the loss can reach with these candidates, log(1 + negatives), the mean over the anchors."""
        return self.negatives.log1p().mean()

    @property
    def information_bound(self) -> Tensor:
        """Mutual information of anchor and positive is at least this, in expectation: the cap minus the mean nll.

        As `partita.mutual_information_bound` of the loss, for the number of candidates that each anchor really had.
        """
        return self.information_cap - self.nll.detach().mean()


class LabelStats(and_fields(Stats, *_BY_LABEL), Stats):  # type: ignore[misc]
    """The row statistics of anchors with many positives, and separate ones of positives and negatives."""

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
    anchors: Anchors,
    key: Tensor,  # the positives
    banks: Sequence[Bank],
    whole: State,
    negatives: State,
    nll: Tensor,
    left_out: Sequence[Tensor] = (),
    rank: Tensor | None = None,
) -> ContrastStats:
    """Statistics of anchors and their positives, from the state of all candidates and that of the negatives.

    left_out: similarities (n,) of keys in the banks that are no negatives.
    rank: how many negatives are more similar than the positive; counted unless given.
    With no negative at all the share of the hardest and the number that push are 0.
    """
    with torch.no_grad():
        positive = anchors.positive(key)
        if anchors.score is not None:
            rank, mean, variance = _among(anchors, banks, positive, left_out)
        else:
            rank = torch.stack([_above(anchors, bank, positive) for bank in banks]).sum(0) if rank is None else rank
            mean, variance = _similarity_moments(anchors, banks, left_out)
        norms = [torch.linalg.vector_norm(x.to(nll.dtype), dim=-1) for x in (anchors.query, key)]
        push = _width_of(negatives), negatives.confidence()
    count = negatives.count.detach()
    known = (*push, positive, mean, variance, count, _per_row(anchors.scale, nll), *norms)
    return ContrastStats(*whole.stats(), rank, rank == 0, whole.confidence(), nll, *known)  # type: ignore[call-arg]


def label_stats(
    whole: State, negatives: State, right: Tensor, rows: Tensor, positives: Tensor, x: Tensor, scale: float | Tensor
) -> LabelStats:
    """Statistics of anchors with many positives; right: where the best candidate is one of them."""
    with torch.no_grad():
        confidence, norm = whole.confidence(), torch.linalg.vector_norm(x.to(rows.dtype), dim=-1)
    push = negatives.count, _width_of(negatives), _per_row(scale, rows), norm
    return LabelStats(*whole.stats(), right, confidence, rows, positives, *push)  # type: ignore[call-arg, unused-ignore]


@torch.no_grad()
def _width_of(negatives: State) -> Tensor:  # (n,)
    """exp(H) of the negatives, 0 where there are none."""
    width = negatives.entropy().exp()
    return torch.where(negatives.empty(), torch.zeros_like(width), width)


def _per_row(scale: float | Tensor, like: Tensor) -> Tensor:
    """One number per row, without gradient."""
    return torch.as_tensor(scale, dtype=like.dtype, device=like.device).detach().expand(like.shape)


def _above(anchors: Anchors, bank: Bank, level: Tensor) -> Tensor:  # (n,)
    """How many of the keys a row may see are more similar to it than `level`, which need not be a key's."""
    if bank.key.dim() == 3:
        return (paired_scores(anchors.query, bank.key, None) > level[:, None]).sum(-1)
    seen: dict[str, Any] = {"support": bank.support, "view": bank.view, "kind": bank.kind}
    return anchors.processes.count_above(anchors.query, bank.key, level, **seen)


def _similarity_moments(
    anchors: Anchors, banks: Sequence[Bank], left_out: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:  # (n,), (n,)
    """Mean and variance of the negatives' similarities, each counted once: polynomials of the keys, no pass."""
    rows, processes = anchors.query.to(torch.promote_types(anchors.query.dtype, torch.float32)), anchors.processes
    count: int | Tensor = 0
    first = second = rows.new_zeros(len(rows))
    for bank in banks:
        key = bank.key.to(rows.dtype)
        if key.dim() == 3:
            s = paired_scores(rows, key, None)
            first, second, keys = first + s.sum(-1), second + s.square().sum(-1), key.shape[-2]
        else:
            sums, squares = (processes.added(x) for x in (key.sum(0), product(key.mT, key)))
            keys = sum(processes.sizes[bank.kind]) if processes.sizes else len(key)  # none of a process alone
            keys = keys if bank.used is None else bank.used.sum()  # type: ignore[assignment]
            first = first + product(rows, sums)
            second = second + (product(rows, squares) * rows).sum(-1)
        count = count + keys
    for one in left_out:
        first, second, count = first - one, second - one.square(), count - 1
    n = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
    mean = first / n
    return mean, (second / n - mean.square()).clamp(min=0.0)


def _among(
    anchors: Anchors, banks: Sequence[Bank], positive: Tensor, left_out: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:  # (n,), (n,), (n,)
    """Rank of the positive, and mean and variance of the negatives' scores, by any score; a few rows at a time."""
    score = anchors.score
    assert score is not None

    def few(rows: Tensor, level: Tensor, seen: Tensor, key: Tensor, used: Tensor) -> Tensor:
        with no_autocast(rows):
            s = score(rows, key) if key.dim() == 2 else paired_scores(rows, key, score)
        count = used.sum().to(s.dtype)
        mean = torch.where(used, s, 0.0).sum(-1) / count.clamp(min=1)
        spread = torch.where(used, s - mean[:, None], 0.0).square().sum(-1)
        rank = (seen & (s > level[:, None])).sum(-1).to(s.dtype)
        return torch.stack([rank, count.expand_as(mean), mean, spread], -1)

    parts, query = [], anchors.query.to(positive.dtype)
    for bank in banks:
        key, n, m = bank.key.to(positive.dtype), len(query), bank.key.shape[-2]
        used = torch.ones(m, dtype=torch.bool, device=key.device) if bank.used is None else bank.used
        own = bank.support if bank.view is None else next(iter(bank.view(0, m)))[2]
        seen = own.dense(n, m, device=key.device) if isinstance(own, Support) else used.expand(n, m)
        given = query, positive, seen, key, used
        parts.append(in_row_blocks(few, given[:3], given[3:], m) if key.dim() == 2 else few(*given))
    rank, count, mean, spread = torch.stack(parts).unbind(-1)
    total = count.sum(0)
    whole = (count * mean).sum(0) / total.clamp(min=1)
    spread = (spread + count * (mean - whole).square()).sum(0)
    for one in left_out:  # taken back out
        total = total - 1
        before, whole = whole, whole + (whole - one) / total.clamp(min=1)
        spread = spread - (one - before) * (one - whole)
    return rank.sum(0).long(), whole, spread.clamp(min=0.0) / total.clamp(min=1)
