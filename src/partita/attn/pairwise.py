"""Scores that change pair by pair: a multiplier and an offset for each (i, j), in tiles.

    score_ij = multiplier_ij * scale * <query_i, key_j> + offset_ij

A row's scale folds into its query; a pair's does not fold into anything, so a tile of scores is written out, and again
in the backward pass. Memory is that of one tile, whatever the length; tiles that no row sees cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from partita.attn.problem import Problem
from partita.attn.rows import squares, states_by_tiles
from partita.attn.sdpa import finish
from partita.engine import State, Stats
from partita.errors import ValueRangeError
from partita.precision import finest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from partita.attn.problem import Options

__all__ = ["PairHook", "ScaleInvariant", "pair_attention"]

PairHook = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(i (rows, 1), j (keys,)) of a tile -> multiplier, offset, each broadcastable to (..., rows, keys)"""


def pair_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pair: PairHook,
    *,
    where: int = 0,
    sink: Tensor | None = None,
    return_stats: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Stats]:
    """Attention whose scores are changed pair by pair before the bias is added; takes the options of `attention`.

    where: the place of the first query among the keys (with a cache: how many keys came before); the hook is told it.

    >>> flat = lambda i, j: (torch.zeros(()), torch.zeros(()))  # forget the content
    >>> pair_attention(torch.ones(1, 1), torch.tensor([[1.0], [9.0]]), torch.tensor([[2.0], [4.0]]), flat)
    tensor([[3.]])
    """
    if options.get("softcap") is not None:
        raise ValueRangeError("pair_attention takes no softcap; put it into the hook.")
    problem = Problem.of(query, key, **options).resolved()
    values = problem.spread(value)
    batch, device = problem.batch(value), query.device

    def run(rows: slice, cols: slice) -> State:
        i = torch.arange(where + rows.start, where + rows.stop, device=device)[:, None]
        multiplier, offset = pair(i, torch.arange(cols.start, cols.stop, device=device))
        scores = problem.content(rows, cols)
        scores = problem.plus_bias(multiplier.to(scores) * scores + offset.to(scores), rows, cols)
        return State.of(problem.hidden(scores, rows, cols), values[..., cols, :].to(scores.dtype))

    def shown(rows: slice, cols: slice) -> bool:
        seen = problem.seen(rows, cols, batch)
        return seen is None or bool(seen.any())

    state = states_by_tiles(run, shown, *squares(problem.n_query, problem.n_key, batch))
    return finish(state, value, sink, return_stats)


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
