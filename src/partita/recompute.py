"""Work done in blocks and repeated block by block in the backward pass: only the inputs of a block are kept.

What belongs to pairs and is no operand of the engine (dropout masks, position biases, noise) exists for
one block at a time. While tracing there is one block: nothing can be cut by a size that is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from partita.engine import State
from partita.engine.axes import parts

__all__ = ["by_rows", "in_row_blocks", "row_blocks", "slices", "states_by_rows"]

_CELLS = 1 << 22  # pairs in a block, over all heads
_FEWEST = 64  # rows: smaller blocks would spend their time starting
_NUMBERS = 1 << 20  # numbers in a block of `in_row_blocks`
_SMALL = 1 << 18  # below this many numbers nothing is recomputed: torch.func stays open
_TAILS = {"peak": 0, "mass": 0, "first": 0, "spread": 0, "count": 0, "moment": 1}  # of a state: dimensions after rows


def in_row_blocks(
    function: Callable[..., Tensor], rows: Sequence[Tensor], shared: Sequence[Tensor], width: int
) -> Tensor:
    """function(*rows, *shared) for some rows at a time, joined.

    `function` gives a result per row and may hold `width` numbers for each: nothing of size n * width stays.
    """
    if torch.compiler.is_compiling() or rows[0].shape[0] * width <= _SMALL:
        return function(*rows, *shared)
    step = max(1, _NUMBERS // max(width, 1))
    blocks = zip(*(x.split(step) for x in rows), strict=True)
    return torch.cat([_recomputed(function, *block, *shared) for block in blocks])


def row_blocks(n_query: int, n_key: int, batch: Sequence[int]) -> list[slice]:
    """Blocks of rows with about `_CELLS` pairs each."""
    return slices(n_query, max(_FEWEST, _CELLS // max(1, n_key * math.prod(batch))))


def slices(n: int, step: int) -> list[slice]:
    """`parts` of n rows or keys, one at least; whether a list of slices is empty would bind a graph to their size."""
    return [slice(0, n)] if torch.compiler.is_compiling() or n <= step else parts(n, step)


def by_rows(
    run: Callable[[slice], tuple[Tensor, ...]], blocks: Sequence[slice], tails: Sequence[int]
) -> tuple[Tensor, ...]:
    """`run` on each block, joined along the rows; tails[k] dimensions follow the rows in result k."""
    if len(blocks) == 1:
        return run(blocks[0])
    done = zip(*[_recomputed(run, rows) for rows in blocks], strict=True)
    return tuple(torch.cat(found, -1 - tail) for found, tail in zip(done, tails, strict=True))


def states_by_rows(run: Callable[[slice], State], blocks: Sequence[slice]) -> State:
    """States of blocks of rows, each with a moment, joined."""
    if len(blocks) == 1:
        return run(blocks[0])

    def sums(rows: slice) -> tuple[Tensor, ...]:
        state = run(rows)
        return tuple(getattr(state, name) for name in _TAILS)

    return State(*by_rows(sums, blocks, tuple(_TAILS.values())))  # type: ignore[arg-type]


def _recomputed(function: Callable[..., Any], *given: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*given)
    # every random number comes from a seed of its own, so there is no generator state to restore
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
