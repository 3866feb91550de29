"""Backend: tiles, one at a time, on any torch device; scores are recomputed in the backward pass.

The loop over a row tile is: score the next keys, take their sums, merge. Neither rows nor columns are ever whole unless
they fit. `dense` is the same loop with a single tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.engine.backends.tiled import exact
from partita.engine.backends.tiled.divergence import divergence, divergence_backward
from partita.engine.backends.tiled.grid import Grid, choose_tile, tile_shape
from partita.engine.backends.tiled.tile import Clean, add, gradients, scores, sums, view, zeros
from partita.engine.request import Request
from partita.engine.state import State, centre
from partita.engine.sums import SumGrads, Sums
from partita.engine.terms import window_mask
from partita.exactness import in_exact_rows

__all__ = [
    "backward", "column_sums", "count_above", "divergence", "divergence_backward", "forward", "score_tiles",
    "scores_whole", "second_order", "tile_shape",
]  # fmt: skip


def _neutral(request: Request, n_query: int) -> State:
    rows, new = (*request.batch, n_query), request.scale.new_zeros
    moment = None if request.value is None else new(*rows, request.value.shape[-1])
    return State(new(rows) - torch.inf, new(rows), new(rows), new(rows), new(rows), moment)


@torch.no_grad()
def forward(request: Request, *, whole: bool = False) -> Sums:
    """State, target score, rank and best key of every row; `whole`: in a single tile."""
    if in_exact_rows() and request.pairs is None and request.query.is_cpu:
        return exact.forward(request, _forward)
    return _forward(request, whole)


def _forward(request: Request, whole: bool = False) -> Sums:
    clean, grid = Clean.of(request), Grid(request, choose_tile(request, whole))
    parts: list[Sums] = []
    for index, rows in enumerate(grid.rows):
        state = _neutral(request, rows.stop - rows.start)
        target = None  # the targets' scores: -inf until their tile comes by, nan where no key has such a number
        if request.target is not None:
            target = torch.full_like(state.peak, -torch.inf).masked_fill_(_outside(request, rows), torch.nan)
        best = _Best(state.peak) if request.argmax else None
        for cols, mask in grid.visit(index):
            x = clean.operands(rows, cols)
            s, mask, _ = scores(clean, x, rows, cols, mask)
            if target is not None and request.target is not None:
                target = _pick(s, request.target[..., rows], cols, target)
            if best is not None:
                best.add(s, cols.start)
            state = state.merge(sums(clean, x, s, mask, cols))
        rank = _rank(clean, grid, index, target) if request.rank and target is not None else None
        part = Sums.of(state, target, rank)
        parts.append(part if best is None else part._replace(argmax=best.key))
    return _stack(parts).answering(request)


def _outside(request: Request, rows: slice) -> Tensor:
    """Rows whose target is no key."""
    assert request.target is not None
    target = request.target[..., rows]
    return (target < 0) | (target >= request.n_key)


def _pick(s: Tensor, target: Tensor, cols: slice, so_far: Tensor) -> Tensor:
    """The target's score, once its tile comes by."""
    at = target - cols.start
    inside = (at >= 0) & (at < s.shape[-1])
    index = at.clamp(0, s.shape[-1] - 1)[..., None].expand(*so_far.shape, 1)
    found = s.expand(*so_far.shape, s.shape[-1]).gather(-1, index)[..., 0]
    return torch.where(inside, found, so_far)


class _Best:
    """The first key of the largest score of each row, tile by tile; a nan is the largest, as for torch."""

    def __init__(self, like: Tensor):  # (*b, q)
        self._score = torch.full_like(like, -torch.inf)
        self.key = torch.full_like(like, -1, dtype=torch.int64)

    def add(self, s: Tensor, first: int) -> None:
        """A tile of scores, -inf where not visible, whose keys begin at `first`."""
        top, at = s.expand(*self.key.shape, s.shape[-1]).max(-1)
        better = (top > self._score) | (top.isnan() & ~self._score.isnan())
        self._score = torch.where(better, top, self._score)
        self.key = torch.where(better, at + first, self.key)


def _rank(clean: Clean, grid: Grid, index: int, target_score: Tensor) -> Tensor:
    """A second sweep: only now is the score known that others are compared with, with the same rounding."""
    target = clean.request.target
    assert target is not None
    rows = grid.rows[index]
    rank = torch.zeros(target_score.shape, dtype=torch.int64, device=target_score.device)
    for cols, mask in grid.visit(index):
        s, _, _ = scores(clean, clean.operands(rows, cols), rows, cols, mask)
        other = torch.arange(cols.start, cols.stop, device=s.device) != target[..., rows, None]
        rank += ((s > target_score[..., None]) & other).sum(-1)
    return rank.masked_fill_(_outside(clean.request, rows), -1)


def _stack(parts: Sequence[Sums]) -> Sums:
    """All row tiles together."""
    rows: dict[str, Any] = {}
    for name in Sums._fields:
        found = [x for part in parts if (x := getattr(part, name)) is not None]
        rows[name] = torch.cat(found, -2 if name == "moment" else -1) if found else None
    return Sums(**rows)


@torch.no_grad()
def backward(
    request: Request, peak: Tensor, g: SumGrads, needs: Sequence[bool], *, whole: bool = False
) -> dict[str, Tensor]:
    """Gradients of (query, key, value, scale, bias), as far as needed, in the accumulation dtype."""
    if in_exact_rows() and request.pairs is None and request.query.is_cpu:
        return exact.backward(request, peak, g, needs, _backward)
    return _backward(request, peak, g, needs, whole)


def _backward(
    request: Request, peak: Tensor, g: SumGrads, needs: Sequence[bool], whole: bool = False
) -> dict[str, Tensor]:
    clean, grid = Clean.of(request), Grid(request, choose_tile(request, whole))
    level = peak.to(request.dtype)
    total = zeros(request, needs)
    for index, rows in enumerate(grid.rows):
        of_rows = [None if t is None else view(f"g_{name}", t, rows, rows) for name, t in g._asdict().items()]
        gr = SumGrads(*of_rows)  # type: ignore[arg-type]
        for cols, mask in grid.visit(index):
            x = clean.operands(rows, cols)
            add(total, gradients(clean, x, gr, level[..., rows], rows, cols, mask), rows, cols)
    return total


def second_order(request: Request, peak: Tensor, g: SumGrads, above: dict[str, Tensor]) -> dict[str, Tensor]:
    """Derivative of `backward`: gradients of the operands, and of g as "g_mass" and so on, given those of its results.

    With the peak held constant every sum over keys is a sum over tiles, so this too goes tile by tile.
    """
    clean, grid = Clean.of(request), Grid(request, choose_tile(request))
    level = peak.to(request.dtype)
    if g.moment is None:  # the gradient of the value was 0, whatever the operands are
        above = {name: t for name, t in above.items() if name != "value"}
    whole = {name: t.to(request.dtype) for name, t in clean.tensors().items()}
    whole |= {"g_" + name: t for name, t in g._asdict().items() if t is not None}
    total = {name: torch.zeros_like(t) for name, t in whole.items()}
    for index, rows in enumerate(grid.rows):
        for cols, mask in grid.visit(index):

            def first_order(
                given: dict[str, Tensor], rows: slice = rows, cols: slice = cols, mask: Tensor | None = mask
            ) -> dict[str, Tensor]:
                x = {name: view(name, t, rows, cols) for name, t in given.items()}
                gs = SumGrads(*[x.pop("g_" + name, None) for name in SumGrads._fields])  # type: ignore[arg-type]
                part = gradients(clean, x, gs, level[..., rows], rows, cols, mask)
                return {name: part[name] for name in above}

            pull = torch.func.vjp(first_order, whole)[1]
            (back,) = pull({name: view(name, t, rows, cols) for name, t in above.items()})
            # added out of place: under vmap a piece may have a batch dimension the total lacks
            total = {name: t + back[name] for name, t in total.items()}
    return total


# ---- the scores themselves ------------------------------------------------------------------------------------------


Tiles = Iterator[tuple[slice, Tensor]]  # columns and their scores


@torch.no_grad()
def score_tiles(request: Request, *, whole: bool = False) -> Iterator[tuple[slice, Tiles]]:
    """For each row tile its rows, and an iterator of (columns, scores) tiles; -inf is not visible."""
    clean, grid = Clean.of(request), Grid(request, choose_tile(request, whole))
    for index, rows in enumerate(grid.rows):

        def tiles(index: int = index, rows: slice = rows) -> Tiles:
            for cols, mask in grid.visit(index):
                s, _, _ = scores(clean, clean.operands(rows, cols), rows, cols, mask)
                yield cols, s.expand(*request.batch, *s.shape[-2:])

        yield rows, tiles()


def count_above(request: Request, level: Tensor) -> Tensor:  # (*b, Q) int64
    """How many visible keys of each row are above a level made by `forward` in exact rows; by the same products."""
    return exact.count_above(request, level, score_tiles)


def scores_whole(request: Request) -> Tensor:  # (*b, Q, K)
    """All scores at once, differentiable."""
    rows, cols = slice(0, request.n_query), slice(0, request.n_key)
    clean, mask = Clean.of(request), window_mask(request.terms, rows, cols, request.query.device)
    found = scores(clean, clean.operands(rows, cols), rows, cols, mask)[0]
    return found.expand(*request.batch, request.n_query, request.n_key)


@torch.no_grad()
def column_sums(
    request: Request, peak: Tensor, weight: Tensor, shared: bool, *, whole: bool = False
) -> Tensor:  # (*b, K)
    """sum_i weight_i exp(s_ij - peak_i) of every key; `shared`: also over the last batch dimension, kept with size 1.

    A row gives nothing to a key it does not see, whatever else is in it: not even its nan.
    """
    level = peak.to(request.dtype)
    total = weight.new_zeros((*request.batch, request.n_key))
    for rows, tiles in score_tiles(request, whole=whole):
        own = weight[..., rows, None]
        for cols, s in tiles:
            given = torch.where(s.isneginf(), torch.zeros_like(s), own * centre(s, level[..., rows])[1])
            total[..., cols] += given.sum(-2)
    return total.sum(-2, keepdim=True) if shared else total
