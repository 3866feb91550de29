"""Attention a block of rows at a time, recomputed in the backward pass.

What belongs to pairs and is no operand of the engine (dropout masks, distance biases, noise) exists for one block only.
"""

from __future__ import annotations

import functools
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

__all__ = ["KeysOf", "RowsOf", "blocks", "by_rows", "squares", "states_by_rows", "states_by_tiles"]

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


def squares(n_query: int, n_key: int, batch: Sequence[int]) -> tuple[list[slice], list[slice]]:
    """Rows and keys of square tiles with about `_CELLS` pairs each; one tile where that is enough, or while tracing."""
    cells = math.prod(batch)
    if torch.compiler.is_compiling() or n_query * n_key * cells <= _CELLS:
        return [slice(0, n_query)], [slice(0, n_key)]
    side = max(_FEWEST, math.isqrt(_CELLS // max(1, cells)))
    rows, keys = ([slice(i, min(i + side, n)) for i in range(0, n, side)] for n in (n_query, n_key))
    return rows, keys


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
    return _joined([_state(_recomputed(lambda rows: _sums(run(rows)), rows)) for rows in parts])


def states_by_tiles(
    run: Callable[[slice, slice], State],
    shown: Callable[[slice, slice], bool],
    rows: Sequence[slice],
    keys: Sequence[slice],
) -> State:
    """States of tiles, merged along the keys and joined along the rows; tiles without a visible key are passed by.

    Nothing of a tile is kept for the backward pass but what it was made of.
    """
    if len(rows) == 1 and len(keys) == 1:
        return run(rows[0], keys[0])
    found = []
    for part in rows:
        seen = [cols for cols in keys if shown(part, cols)] or keys[:1]
        each = (_state(_recomputed(lambda r, c=cols: _sums(run(r, c)), part)) for cols in seen)  # type: ignore[misc]
        found.append(functools.reduce(State.merge, each))
    return _joined(found)


def _sums(state: State) -> tuple[Tensor, ...]:
    return tuple(getattr(state, name) for name in _SUMS)


def _state(sums: tuple[Tensor, ...]) -> State:
    peak, mass, first, spread, count, moment = sums
    return State(peak, mass, first, spread, count, moment)


def _joined(states: Sequence[State]) -> State:
    """Of rows that follow one another."""
    parts = zip(*map(_sums, states), strict=True)
    return _state(tuple(torch.cat(p, -2 if name == "moment" else -1) for name, p in zip(_SUMS, parts, strict=True)))
