"""Rows of a loss: what a pass with a target says about each, torch's reductions, and work done a few rows at a time.

    nll        = log Z - score_target                 surprise of the target
    confidence = max_j p_j = 1 / mass                 the peak has weight 1 in its own sum
    correct    = (rank == 0)                          no visible key scores higher than the target

Everything here is a function of row vectors that the engine has already reduced; losses and contrast share it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partita import _checks
from partita.engine import State, Stats
from partita.engine.state import divided
from partita.engine.sums import Sums
from partita.errors import ValueRangeError

__all__ = [
    "ClassStats",
    "LossStats",
    "among_all_rows",
    "and_fields",
    "blank_ignored",
    "check_unit",
    "in_row_blocks",
    "loss_stats",
    "probabilities",
    "reduce_rows",
    "sums_of",
]

_AT_ONCE = 1 << 20  # scores held at a time by a function that is applied to a few rows
_SMALL = 1 << 18  # below this many scores nothing is recomputed: torch.func and second derivatives stay open


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
    if sums.places is None:
        return LossStats(*known)  # type: ignore[call-arg]
    return ClassStats(*known, sums.places[0])  # type: ignore[call-arg]


def among_all_rows(stats: LossStats, kept: Tensor, shape: Sequence[int]) -> LossStats:
    """Statistics of the kept rows put back among the ignored ones; `kept` are flat positions."""
    total = torch.Size(shape).numel()
    out = []
    for name, rows in zip(stats._fields, stats, strict=True):
        whole = rows.new_full((total,), _IGNORED.get(name, 0))
        out.append(whole.index_put((kept,), rows).reshape(tuple(shape)))
    return type(stats)(*out)


def blank_ignored(stats: LossStats, kept: Tensor) -> LossStats:
    """Statistics of rows that all went through the pass, of which `kept` tells those that count."""
    fields = zip(stats._fields, stats, strict=True)
    return type(stats)(*(torch.where(kept, x, torch.full_like(x, _IGNORED.get(name, 0))) for name, x in fields))


def sums_of(scores: Tensor, target: Tensor) -> Sums:  # (..., n, K), (..., n)
    """What a pass would give for scores that already exist; -inf hides a key."""
    chosen = scores.gather(-1, target[..., None])
    rank = (scores.detach() > chosen.detach()).sum(-1)
    seen = torch.where(scores.isneginf(), torch.inf, scores.detach())
    hidden = seen.isposinf().all(-1)
    least, low = seen.min(-1)
    places = torch.where(hidden, -1, torch.stack([scores.argmax(-1), low]))
    return Sums.of(State.of(scores), chosen[..., 0], rank)._replace(least=least, places=places)


def probabilities(scores: Tensor) -> Tensor:  # (..., K)
    """The distribution of explicit scores, dense as they are."""
    state = State.of(scores)
    level = torch.where(state.empty(), torch.zeros_like(state.peak), state.log_partition())
    return (scores - level[..., None]).exp()


def reduce_rows(rows: Tensor, reduction: str, total: Tensor | None = None) -> Tensor:
    """torch's reduction of a loss per row; `total` replaces the number of rows, and nothing at all gives 0."""
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    if total is None:
        return rows.sum() / max(rows.numel(), 1)
    return divided(rows.sum(), total)


def in_row_blocks(
    function: Callable[..., Tensor], rows: Sequence[Tensor], shared: Sequence[Tensor], width: int
) -> Tensor:
    """function(*rows, *shared) for a few rows at a time, joined; what it holds is computed again in the backward pass.

    `function` gives a result per row and may hold `width` numbers for each: nothing of size n * width stays. Whatever
    needs a gradient must be among the arguments. Second derivatives are taken of the whole at once, and so is a graph:
    while tracing nothing can be cut by size.
    """
    if torch.compiler.is_compiling() or rows[0].shape[0] * width <= _SMALL:
        return function(*rows, *shared)
    step = max(1, _AT_ONCE // max(width, 1))
    out: Tensor = _InRowBlocks.apply(function, len(rows), step, *rows, *shared)  # type: ignore[no-untyped-call]
    return out


class _InRowBlocks(torch.autograd.Function):
    """Forward and backward in pieces; torch's checkpoint would keep every piece until the last is done."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], n_rows: int, step: int, *tensors: Tensor) -> Tensor:
        ctx.function, ctx.n_rows, ctx.step = function, n_rows, step
        ctx.save_for_backward(*tensors)
        rows, shared = tensors[:n_rows], tensors[n_rows:]
        pieces = range(0, rows[0].shape[0], step)
        return torch.cat([function(*(x[i : i + step] for x in rows), *shared) for i in pieces])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, n_rows, step = ctx.saved_tensors, ctx.n_rows, ctx.step
        wanted = [i for i in range(len(tensors)) if ctx.needs_input_grad[3 + i]]
        total: dict[int, Tensor] = {}
        if torch.is_grad_enabled():
            found = torch.autograd.grad(
                ctx.function(*tensors), [tensors[i] for i in wanted], grad, create_graph=True, allow_unused=True
            )
            total = {i: g for i, g in zip(wanted, found, strict=True) if g is not None}
        else:
            total = {i: torch.zeros_like(tensors[i]) for i in wanted}
            for first in range(0, tensors[0].shape[0], step):
                part = slice(first, first + step)
                with torch.enable_grad():
                    inputs = [(x[part] if i < n_rows else x).detach() for i, x in enumerate(tensors)]
                    for i in wanted:
                        inputs[i].requires_grad_()
                    out = ctx.function(*inputs)
                found = torch.autograd.grad(out, [inputs[i] for i in wanted], grad[part], allow_unused=True)
                for i, g in zip(wanted, found, strict=True):
                    if g is not None:
                        place = total[i][part] if i < n_rows else total[i]
                        place += g
        return (None, None, None, *(total.get(i) for i in range(len(tensors))))


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
