"""Rows of a loss: what a pass with a target gives for each, and torch's reductions.

    nll        = log Z - score_target                 surprise of the target
    confidence = max_j p_j = 1 / mass                 the peak has weight 1 in its own sum
    correct    = (rank == 0)                          no visible key scores higher than the target

Everything here is a function of row vectors that the engine has already reduced; losses and contrast share it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita import _checks
from partita.engine import State, Stats
from partita.engine.state import divided, levels
from partita.engine.sums import Sums
from partita.errors import ValueRangeError
from partita.recompute import in_row_blocks

__all__ = [
    "ClassStats", "LossStats", "among_all_rows", "and_fields", "blank_ignored", "check_unit", "in_row_blocks",
    "loss_stats", "probabilities", "reduce_rows", "sums_of",
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


def among_all_rows(stats: LossStats, kept: Tensor, shape: Sequence[int]) -> LossStats:
    """Statistics of the kept rows put back among the ignored ones; `kept` are flat positions."""
    total = torch.Size(shape).numel()
    out = []
    for name, rows in zip(stats._fields, stats, strict=True):
        whole = rows.new_full((total,), _IGNORED.get(name, 0))
        out.append(whole.index_put((kept,), rows).reshape(tuple(shape)))
    return type(stats)(*out)


def blank_ignored(stats: LossStats, kept: Tensor) -> LossStats:
    """Statistics of rows that all went through the pass, of which `kept` are those that count."""
    fields = zip(stats._fields, stats, strict=True)
    return type(stats)(*(torch.where(kept, x, torch.full_like(x, _IGNORED.get(name, 0))) for name, x in fields))


def sums_of(scores: Tensor, target: Tensor) -> Sums:  # (..., n, K), (..., n)
    """What a pass would give for scores that already exist; -inf hides a key."""
    target, lost = _checks.within(target, scores.shape[-1])
    chosen = scores.gather(-1, target[..., None])
    rank = (scores.detach() > chosen.detach()).sum(-1)
    if lost is not None:
        chosen, rank = chosen.masked_fill(lost[..., None], torch.nan), rank.masked_fill(lost, -1)
    best = torch.where(scores.isneginf().all(-1), -1, scores.argmax(-1))
    return Sums.of(State.of(scores), chosen[..., 0], rank)._replace(argmax=best)


def probabilities(scores: Tensor) -> Tensor:  # (..., K)
    """The distribution of explicit scores, dense as they are."""
    return (scores - levels(scores)[..., None]).exp()


def reduce_rows(rows: Tensor, reduction: _checks.Reduction, total: Tensor | None = None) -> Tensor:
    """torch's reduction of a loss per row; `total` replaces the number of rows, and nothing at all gives 0."""
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    if total is None:
        return rows.sum() / max(rows.numel(), 1)
    return divided(rows.sum(), total)


def check_unit(name: str, vectors: Tensor) -> None:
    """Vectors of length 1, where a formula is only true for those."""
    if not _checks.has_values(vectors) or vectors.numel() == 0:
        return
    length = torch.linalg.vector_norm(vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)
    worst = float((length - 1).abs().max())
    if not worst <= 16 * torch.finfo(vectors.dtype).eps ** 0.5:
        raise ValueRangeError(
            f"{name} must hold unit vectors; a length differs from 1 by {worst:.3g}. "
            f"Normalise them (F.normalize), or pass normalize=True."
        )
