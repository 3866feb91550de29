"""Patterns of sparse attention, as row intervals and ids: O(n) numbers each, and counts in closed form.

They join with the others: a Longformer layer is `window(w, w) | global_tokens([0])`, a BigBird layer adds `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita._checks import check_bool, check_index_dtype, check_positions, check_whole, expands, has_values, shape_text
from partita.engine.axes import align
from partita.engine.terms import Term
from partita.errors import DtypeError, ShapeError
from partita.support.base import Support, text_of
from partita.support.kinds import window as near

__all__ = ["blocks", "dilated", "global_tokens", "strided"]


@dataclass(frozen=True, eq=False)
class _Residue(Support):
    """Keys whose distance from the row is a multiple of a step."""

    step: int

    def __repr__(self) -> str:
        return f"support.strided({self.step})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        check_positions(n_query, n_key)
        rows, keys = (torch.arange(n, dtype=torch.int64, device=device) % self.step for n in (n_query, n_key))
        return (Term(query_segment=rows, key_segment=keys).align(len(batch)),)


@dataclass(frozen=True, eq=False)
class _Blocks(Support):
    block: int
    layout: Tensor

    def __repr__(self) -> str:
        return f"support.blocks({self.block}, {text_of(self.layout)})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        check_positions(n_query, n_key)
        shape = (-(-n_query // self.block), -(-n_key // self.block))
        if tuple(self.layout.shape[-2:]) != shape or not expands(self.layout.shape[:-2], batch):
            raise ShapeError(
                f"layout must broadcast to {(*batch, *shape)}, the blocks of {self.block} in {n_query} rows and "
                f"{n_key} keys; got {shape_text(self.layout)}."
            )
        layout = align(self.layout.to(device), len(batch), 2)
        row = torch.arange(n_query, dtype=torch.int64, device=device) // self.block
        if torch.compiler.is_compiling():  # how many runs a row has is no size that a graph could have
            column = torch.arange(n_key, dtype=torch.int64, device=device) // self.block
            return (Term(mask=layout[..., row, :][..., column]),)
        start, stop = _runs(layout)
        start, stop = ((t * self.block).clamp(max=n_key).to(torch.int32)[..., row, :] for t in (start, stop))
        return tuple(Term(start=a, stop=b) for a, b in zip(start.unbind(-1), stop.unbind(-1), strict=True))


def _runs(layout: Tensor) -> tuple[Tensor, Tensor]:  # (..., rows, cols) -> (..., rows, runs), twice
    """Where the runs of True begin and end in each row; the rows with fewer runs end in empty ones."""
    cols = layout.shape[-1]
    gap = layout.new_zeros((*layout.shape[:-1], 1))
    edge = torch.cat([gap, layout], -1) != torch.cat([layout, gap], -1)  # (..., rows, cols + 1): a run begins or ends
    at = torch.arange(cols + 1, dtype=torch.int64, device=layout.device)
    # the edges of a row in their order, begin and end in turns; a row without any has `cols` in every place
    ordered = torch.where(edge, at, cols).sort(-1).values
    most = cols + 1
    if has_values(edge) and edge.numel():  # else as many as there could be
        most = max(int(edge.sum(-1).max()), 2)
    ordered = torch.nn.functional.pad(ordered, (0, 1), value=cols)[..., : most + most % 2]
    return ordered[..., 0::2], ordered[..., 1::2]


@dataclass(frozen=True, eq=False)
class _GlobalTokens(Support):
    positions: tuple[int, ...]  # sorted, without repeats

    def __repr__(self) -> str:
        return f"support.global_tokens({list(self.positions)})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        check_positions(n_query, n_key)
        own = torch.tensor([p for p in self.positions if p < n_query], dtype=torch.int64, device=device)
        row = torch.zeros(n_query, dtype=torch.int32, device=device)
        sees_all = row.clone()
        sees_all[own] = n_key
        terms = [Term(stop=sees_all)]
        terms += [Term(start=row + first, stop=row + last) for first, last in _neighbours(self.positions, n_key)]
        return tuple(term.align(len(batch)) for term in terms)


def _neighbours(positions: Sequence[int], end: int) -> list[tuple[int, int]]:
    """Positions that lie side by side, as intervals [first, last)."""
    found: list[tuple[int, int]] = []
    for p in positions:
        if p < end:
            joins = found and found[-1][1] == p
            found[-1:] = [(found[-1][0], p + 1)] if joins else [*found[-1:], (p, p + 1)]
    return found


def strided(stride: int, window: int = 0) -> Support:
    """Every stride-th key from the query on, and a window around it: j = i mod stride, or |i - j| <= window.

    >>> strided(3).dense(1, 7).int().tolist()
    [[1, 0, 0, 1, 0, 0, 1]]
    >>> (strided(4, window=1) & near(None, 0)).visible(9, 9)  # row 8: 0, 4, 7, 8
    tensor([1, 2, 2, 2, 3, 3, 3, 3, 4])
    """
    check_whole("stride", stride, least=1)
    check_whole("window", window, least=0)
    every = _Residue(stride)
    return every if window == 0 else near(window, window) | every


def dilated(step: int, left: int | None, right: int | None) -> Support:
    """A window with gaps: j = i + t step for -left <= t <= right; None is unbounded.

    >>> dilated(2, 1, 1).dense(5, 5)[2].int().tolist()  # 0, 2 and 4
    [1, 0, 1, 0, 1]
    """
    check_whole("step", step, least=1)
    for name, reach in (("left", left), ("right", right)):
        if reach is not None:
            check_whole(name, reach)
    return near(None if left is None else left * step, None if right is None else right * step) & _Residue(step)


def blocks(block: int, layout: Tensor) -> Support:
    """Whole blocks of keys: layout[i // block, j // block]; the layout is (..., query blocks, key blocks), True shows.

    Leading dimensions broadcast, aligned at the right, as a mask's do: one layout a head is (heads, ., .). The last
    block of rows or keys may be shorter.

    >>> blocks(2, torch.tensor([[True, False], [True, True]])).visible(4, 3)
    tensor([2, 2, 3, 3])
    """
    check_whole("block", block, least=1)
    check_bool("layout", layout)
    if layout.dim() < 2:
        raise ShapeError(f"layout must be (..., query blocks, key blocks); got {shape_text(layout)}.")
    return _Blocks(block, layout)


def global_tokens(positions: Sequence[int] | Tensor) -> Support:
    """Tokens that see every key and are seen by every query: i or j is one of the positions.

    Positions beyond the last query or key say nothing, so that one pattern serves every length.

    >>> (near(1, 1) | global_tokens([0])).visible(5, 5)  # row 0 sees all; rows 2 to 4 their window and key 0
    tensor([5, 3, 4, 4, 3])
    """
    if isinstance(positions, Tensor):
        check_index_dtype("positions", positions)
        if not has_values(positions):
            raise DtypeError("positions must be known when the support is made; give a list of integers.")
        positions = positions.reshape(-1).tolist()
    for p in positions:
        check_whole("a global position", p, least=0)
    return _GlobalTokens(tuple(sorted(set(positions))))
