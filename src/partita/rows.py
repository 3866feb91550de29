"""Rows of a loss: what a pass with a target gives for each, and torch's reductions.

    nll        = log Z - score_target                 surprise of the target
    confidence = max_j p_j = 1 / mass                 the peak has weight 1 in its own sum
    correct    = (rank == 0)                          no visible key scores higher than the target

Everything here is a function of row vectors that the engine has already reduced; losses and contrast share it.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita import _checks
from partita.engine import State, Stats
from partita.engine.state import divided
from partita.engine.sums import Sums
from partita.recompute import in_row_blocks

__all__ = [
    "ClassStats", "LossStats", "Rows", "and_fields", "in_row_blocks", "loss_stats", "placed", "reduce_rows", "sums_of",
]  # fmt: skip


def and_fields(stats: type[Stats], *names: str) -> Any:
    """A tuple with the fields of these statistics and more: what a wider kind of them is built on."""
    return namedtuple("and_fields", (*stats._fields, *names))


class LossStats(and_fields(Stats, "target_rank", "correct", "confidence", "nll"), Stats):  # type: ignore[misc]
    """The row statistics of `Stats`, and what a pass with a target knows besides.

    A row that was ignored is like an empty one: log_partition and max_score -inf, visible 0, rank -1, the rest 0; so it
    is for one output per row and for several, eager and compiled.
    """

    __slots__ = ()
    __repr__ = Stats.__repr__
    target_rank: Tensor  # int64: how many keys score higher than the target
    correct: Tensor  # bool: none does
    confidence: Tensor  # the largest probability
    nll: Tensor  # -log p(target), before weights and smoothing


class ClassStats(and_fields(LossStats, "predicted"), LossStats):  # type: ignore[misc]
    """`LossStats` of a classifier's rows, and the class it would choose; -1 where a row was ignored."""

    __slots__ = ()
    __repr__ = Stats.__repr__
    predicted: Tensor  # int64: the class of the largest score, the first of those that tie


_IGNORED = {"log_partition": -torch.inf, "max_score": -torch.inf, "target_rank": -1, "predicted": -1}  # the others: 0


def loss_stats(sums: Sums) -> LossStats:
    """Statistics of every row of a pass that had a target and counted its rank."""
    assert sums.rank is not None
    state = sums.state
    known = (*state.stats(), sums.rank, sums.rank == 0, state.confidence(), sums.nll())
    if sums.argmax is None:
        return LossStats(*known)  # type: ignore[call-arg]
    return ClassStats(*known, sums.argmax)  # type: ignore[call-arg]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a loss, in the caller's shape, and which of them count.

    Ignored ones are left out before a pass, so that they cost nothing and cannot spoil anything. Where values cannot be
    read (in a graph, under vmap, on a device) they go through, and are blank in the end.
    """

    shape: tuple[int, ...]
    where: Tensor | None = None  # flat positions of the rows that are left; None: all are here
    counts: Tensor | None = None  # of the caller's shape, False where a row is here and ignored; None: all count

    @staticmethod
    def of(counts: Tensor, *, fixed: bool = False) -> Rows:
        """fixed: none can be left out."""
        shape = tuple(counts.shape)
        if not _checks.has_values(counts):
            return Rows(shape, None, counts)
        if bool(counts.all()):
            return Rows(shape)
        return Rows(shape, None, counts) if fixed else Rows(shape, counts.reshape(-1).nonzero()[:, 0])

    def take(self, x: Tensor) -> Tensor:
        """What was given for the rows, (*shape, ...), of those that are left, (n, ...)."""
        flat = x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :])
        return flat if self.where is None else flat.index_select(0, self.where)

    def place(self, found: Tensor, blank: float = 0, tail: int = 0) -> Tensor:
        """Results of the rows in the caller's shape, blank where ignored; `tail` dimensions follow the rows."""
        lead, rest = found.shape[: found.dim() - tail], found.shape[found.dim() - tail :]
        if self.where is not None:
            found = found.new_full((math.prod(self.shape), *rest), blank).index_put((self.where,), found)
        elif self.counts is not None:
            found = found.masked_fill(~self.counts.reshape((*lead, *[1] * tail)), blank)
        return found.reshape((*self.shape, *rest))


def placed(stats: LossStats, place: Callable[[Tensor, float], Tensor]) -> LossStats:
    """Statistics through `Rows.place`, or a function like it."""
    return type(stats)(*(place(x, _IGNORED.get(name, 0)) for name, x in zip(stats._fields, stats, strict=True)))


def sums_of(scores: Tensor, target: Tensor) -> Sums:  # (..., n, K), (..., n)
    """What a pass would give for scores that already exist; -inf hides a key."""
    target, lost = _checks.within(target, scores.shape[-1])
    chosen = scores.gather(-1, target[..., None])
    rank = (scores.detach() > chosen.detach()).sum(-1)
    if lost is not None:
        chosen, rank = chosen.masked_fill(lost[..., None], torch.nan), rank.masked_fill(lost, -1)
    best = torch.where(scores.isneginf().all(-1), -1, scores.argmax(-1))
    return Sums.of(State.of(scores), chosen[..., 0], rank)._replace(argmax=best)


def reduce_rows(rows: Tensor, reduction: _checks.Reduction, total: Tensor | None = None) -> Tensor:
    """torch's reduction of a loss per row; `total` replaces the number of rows, and nothing at all gives 0."""
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    if total is None:
        return rows.sum() / max(rows.numel(), 1)
    return divided(rows.sum(), total)
