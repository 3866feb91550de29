"""Attention a block of rows at a time, recomputed in the backward pass.

What belongs to pairs and is no operand of the engine (dropout masks, distance biases, noise) exists for one block only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from partita.engine import State
from partita.engine.terms import Term
from partita.engine.visibility import Visibility
from partita.support import Support

__all__ = ["KeysOf", "RowsOf", "blocks", "by_rows", "states_by_rows"]

_CELLS = 1 << 22  # pairs in a block, over all heads
_FEWEST = 64  # rows: smaller blocks would spend their time starting
_SUMS = ("peak", "mass", "first", "spread", "count", "moment")  # of a state, in its order


@dataclass(frozen=True, eq=False)
class RowsOf(Support):
    """The support of some rows of a larger problem: row 0 here is row `first` there."""

    whole: Support
    first: int
    n_query: int

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        terms = self.whole.bind(self.n_query, n_key, batch, device)
        seen = Visibility(terms, self.n_query, n_key, tuple(batch), device)
        return seen.cut(rows=slice(self.first, self.first + n_query)).terms_here()


@dataclass(frozen=True, eq=False)
class KeysOf(Support):
    """The support over some keys of a larger problem: key 0 here is key `first` there."""

    whole: Support
    first: int
    n_key: int

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        terms = self.whole.bind(n_query, self.n_key, batch, device)
        seen = Visibility(terms, n_query, self.n_key, tuple(batch), device)
        return seen.cut(keys=slice(self.first, self.first + n_key)).terms_here()


def blocks(n_query: int, n_key: int, batch: Sequence[int]) -> list[slice]:
    """Blocks of rows with about `_CELLS` pairs each; one block while tracing, where nothing can be cut by size."""
    if torch.compiler.is_compiling():
        return [slice(0, n_query)]
    step = max(_FEWEST, _CELLS // max(1, n_key * math.prod(batch)))
    if n_query <= step:
        return [slice(0, n_query)]
    return [slice(i, min(i + step, n_query)) for i in range(0, n_query, step)]


def by_rows(
    run: Callable[[slice], tuple[Tensor, ...]], parts: Sequence[slice], tails: Sequence[int]
) -> tuple[Tensor, ...]:
    """`run` on each block, joined along the rows; tails[k] is how many dimensions follow the rows in result k."""
    if len(parts) == 1:
        return run(parts[0])
    done = [_recomputed(run, rows) for rows in parts]
    return tuple(torch.cat([part[k] for part in done], -1 - tail) for k, tail in enumerate(tails))


def _recomputed(run: Callable[[slice], tuple[Tensor, ...]], rows: slice) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return run(rows)
    # every random number comes from a seed of its own, so there is no generator state to restore
    out: tuple[Tensor, ...] = checkpoint(run, rows, use_reentrant=False, preserve_rng_state=False)
    return out


def states_by_rows(run: Callable[[slice], State], parts: Sequence[slice]) -> State:
    """States of blocks of rows, each with a moment, joined."""
    if len(parts) == 1:
        return run(parts[0])

    def flat(rows: slice) -> tuple[Tensor, ...]:
        state = run(rows)
        return tuple(getattr(state, name) for name in _SUMS)

    joined = by_rows(flat, parts, [1 if name == "moment" else 0 for name in _SUMS])
    peak, mass, first, spread, count, moment = joined
    return State(peak, mass, first, spread, count, moment)
