"""Metrics of a classifier or a retriever from the statistics of a loss, without ever holding its logits.

    from the rank of the target           top-k accuracy (recall at k), mean reciprocal rank
    from confidence and correctness       expected calibration error
    from log Z at two scales              Brier score:  sum_j p_j^2 = exp( log Z(2s) - 2 log Z(s) )
    from the surprise                     perplexity
    from the loss of n candidates         a lower bound on mutual information

Rows that were ignored (rank -1) are left out everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partita._checks import check_float, check_index_dtype, check_kind, check_whole, number, require
from partita.errors import ShapeError
from partita.gibbs import Gibbs, sharper
from partita.rows import LossStats

__all__ = [
    "InformationBound",
    "brier_score",
    "expected_calibration_error",
    "mean_reciprocal_rank",
    "mutual_information_bound",
    "perplexity",
    "top_k_accuracy",
]


def top_k_accuracy(rank: Tensor | LossStats, k: int = 1) -> Tensor:
    """Share of rows whose target is among the k best; `rank` counts the keys that score higher, 0 is the best.

    Where a query has one relevant key, this is recall at k.

    >>> top_k_accuracy(torch.tensor([0, 2, 5]), k=3)
    tensor(0.6667)
    """
    check_whole("k", k, least=1)
    ranks = _ranks(rank)
    return _mean((ranks < k).float(), ranks >= 0)


def mean_reciprocal_rank(rank: Tensor | LossStats) -> Tensor:
    """Mean of 1 / (rank + 1).

    >>> mean_reciprocal_rank(torch.tensor([0, 1, 3]))  # (1 + 1/2 + 1/4) / 3
    tensor(0.5833)
    """
    ranks = _ranks(rank)
    return _mean(1.0 / (ranks.float() + 1), ranks >= 0)


def perplexity(nll: Tensor | LossStats) -> Tensor:
    """exp of the mean surprise: the number of equally likely tokens that would surprise as much.

    >>> perplexity(torch.tensor([2.0, 8.0]).log())  # sqrt(2 * 8)
    tensor(4.)
    """
    if isinstance(nll, LossStats):
        return _mean(nll.nll, nll.target_rank >= 0).exp()
    check_float("nll", nll)
    return _mean(nll, torch.ones_like(nll, dtype=torch.bool)).exp()


def expected_calibration_error(
    confidence: Tensor | LossStats, correct: Tensor | None = None, *, bins: int = 15
) -> Tensor:
    """How far confidence is from accuracy, averaged over bins of equal width, weighted by their rows.

        ECE = sum_b n_b / n |accuracy_b - mean confidence_b|

    >>> expected_calibration_error(torch.full((4,), 0.75), torch.tensor([True, True, True, False]))
    tensor(0.)
    """
    check_whole("bins", bins, least=1)
    if isinstance(confidence, LossStats):
        kept = confidence.target_rank >= 0
        sure, right = confidence.confidence, confidence.correct
    elif not isinstance(correct, Tensor) or not isinstance(confidence, Tensor) or correct.shape != confidence.shape:
        raise ShapeError("give a LossStats, or confidence and correct of one shape.")
    else:
        sure, right = confidence, correct
        kept = torch.ones_like(correct, dtype=torch.bool)
    sure, right, kept = sure.detach().reshape(-1), right.reshape(-1), kept.reshape(-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=sure.dtype, device=sure.device)[1:-1]
    at = torch.bucketize(sure, edges)
    missed = torch.where(kept, right.to(sure.dtype) - sure, torch.zeros_like(sure))
    gap = torch.zeros(bins, dtype=sure.dtype, device=sure.device).index_add(0, at, missed)
    return gap.abs().sum() / kept.sum().clamp(min=1)


def brier_score(gibbs: Gibbs, target: Tensor) -> Tensor:  # (..., n_query)
    """Squared distance of the distribution from the truth, per row, in two passes.

        |p - e_target|^2 = sum_j p_j^2 - 2 p_target + 1

    >>> brier_score(Gibbs(torch.zeros(1, 2), torch.zeros(2, 2)), torch.tensor([0]))  # 2 (1/2)^2
    tensor([0.5000])
    """
    check_kind("gibbs", gibbs, Gibbs, "Make one: brier_score(Gibbs(query, key), target).")
    nll = gibbs.nll(target)
    twice = (sharper(gibbs, 2.0).log_partition() - 2 * gibbs.log_partition()).exp()
    return (twice - 2 * (-nll).exp() + 1).clamp(min=0.0)


@dataclass(frozen=True)
class InformationBound:
    """A lower bound on mutual information in nats, and what it could not have exceeded.

    `slack` is cap - value; below half a nat the bound depends more on the number of candidates than on the data.
    """

    value: Tensor
    cap: Tensor

    @property
    def slack(self) -> Tensor:
        """How far below its cap the bound is, in nats; negative never."""
        return self.cap - self.value

    @property
    def fraction(self) -> Tensor:
        """value / cap: 1 is saturation; NaN when there is a single candidate."""
        return self.value / self.cap.masked_fill(self.cap == 0, torch.nan)

    @property
    def saturated(self) -> Tensor:
        """True where the slack is below half a nat."""
        return self.slack < 0.5


def mutual_information_bound(loss: float | Tensor, n: float | Tensor) -> InformationBound:
    """What an InfoNCE loss with n candidates (one positive, n - 1 negatives) implies about mutual information.

        I >= log n - E[loss],      never more than the cap log n

    `loss` may hold many batch values: their mean is used, as the bound is true in expectation only, a single batch may
    exceed I. Negatives must be independent draws from the marginal; with two views of each item only the cap is sure.
    A negative value is a valid, empty bound. Spec: M-INC-2, M-RMK-5.
    From van den Oord, Li and Vinyals (2018), Representation learning with contrastive predictive coding; Poole, Ozair,
    van den Oord, Alemi and Tucker (2019), On variational bounds of mutual information.

    >>> b = mutual_information_bound(0.25, 128)
    >>> round(b.value.item(), 4), round(b.cap.item(), 4), b.saturated.item()  # log 128 - 0.25
    (4.602, 4.852, True)
    """
    mean, n = number(loss).mean(), number(n)
    require(n >= 1, f"n counts candidates, the positive included, so n >= 1; got {n}.")
    require(~(mean < 0), f"an InfoNCE loss is -log of a probability, so it is not negative; got {mean}.")
    cap = n.log().to(mean.dtype)
    return InformationBound(cap - mean, cap)


def _ranks(rank: Tensor | LossStats) -> Tensor:
    if isinstance(rank, LossStats):
        return rank.target_rank
    check_index_dtype("rank", rank)
    return rank


def _mean(rows: Tensor, kept: Tensor) -> Tensor:
    """Of the kept rows; by adding up, since how many there are is no size that a graph could have."""
    return torch.where(kept, rows, torch.zeros_like(rows)).sum() / kept.sum().clamp(min=1)
