"""Scores that change pair by pair: a multiplier and an offset for each (i, j), in blocks of rows.

    score_ij = multiplier_ij * scale * <query_i, key_j> + offset_ij

A row's scale folds into its query; a pair's does not fold into anything, so a block of scores is written out, and again
in the backward pass. Memory is that of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from partita.attn.problem import Problem
from partita.attn.rows import states_by_rows
from partita.attn.sdpa import finish
from partita.engine import State, Stats
from partita.errors import ValueRangeError
from partita.precision import finest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from partita.attn.problem import Options

__all__ = ["PairHook", "ScaleInvariant", "pair_attention"]

PairHook = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(i (rows, 1), j (n_key,)) -> multiplier, offset, each broadcastable to (..., rows, n_key)"""


def pair_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pair: PairHook,
    *,
    sink: Tensor | None = None,
    return_stats: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Stats]:
    """Attention whose scores are changed pair by pair before the bias is added; takes the options of `attention`.

    >>> flat = lambda i, j: (torch.zeros(()), torch.zeros(()))  # forget the content
    >>> pair_attention(torch.ones(1, 1), torch.tensor([[1.0], [9.0]]), torch.tensor([[2.0], [4.0]]), flat)
    tensor([[3.]])
    """
    if options.get("softcap") is not None:
        raise ValueRangeError("pair_attention takes no softcap; put it into the hook.")
    problem = Problem.of(query, key, **options).resolved()
    values = problem.spread(value)
    j = torch.arange(problem.n_key, device=query.device)

    def run(rows: slice) -> State:
        i = torch.arange(rows.start, rows.stop, device=query.device)[:, None]
        multiplier, offset = pair(i, j)
        scores = problem.content(rows)
        scores = multiplier.to(scores) * scores + offset.to(scores)
        return State.of(problem.hidden(problem.plus_bias(scores, rows), rows), values.to(scores.dtype))

    return finish(states_by_rows(run, problem.blocks(value)), value, sink, return_stats)


@dataclass(frozen=True)
class ScaleInvariant:
    """The hook of scale-invariant attention: sharper and lower with distance t, so that each octave keeps its share.

        multiplier_t^2 = 2 (log(t/tau + 1) - log a + b/a)        offset_t = b/a - multiplier_t^2        a = b = sqrt(e)

    At distance 0 it changes nothing. Equal to the formula of arXiv 2505.17083 for unit-variance scores.

    >>> ScaleInvariant()(torch.tensor([[0]]), torch.tensor([0]))
    (tensor([[1.]], dtype=torch.float64), tensor([[0.]], dtype=torch.float64))
    """

    tau: float = 10.0
    a: float = math.exp(0.5)
    b: float = math.exp(0.5)

    def __call__(self, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        distance = (i - j).abs().to(finest(i.device))  # the caller rounds once, to the dtype of its scores
        square = 2 * (torch.log1p(distance / self.tau) - math.log(self.a) + self.b / self.a)
        return square.sqrt(), self.b / self.a - square
