"""Backend: tiles, one at a time, on any torch device; scores are recomputed in the backward pass.

The loop over a row tile is: score the next keys, take their sums, merge. Neither rows nor columns are ever whole unless
they fit. `dense` is the same loop with a single tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from partita.engine.backends.tiled.accumulator import Accumulator, view
from partita.engine.backends.tiled.extremes import Extremes
from partita.engine.backends.tiled.grid import Grid, choose_tile, tile_shape
from partita.engine.backends.tiled.tile import Clean, Operands, gradients, scores, sums
from partita.engine.request import Request
from partita.engine.state import State
from partita.engine.sums import Sums, Upstream
from partita.engine.terms import window_mask

__all__ = [
    "always",
    "backward",
    "forward",
    "score_tiles",
    "scores_whole",
    "second_order",
    "tile_shape",
]


def always(request: Request) -> str | None:
    """It serves whatever is asked."""
    return None


def _neutral(request: Request, n_query: int) -> State:
    rows = (*request.batch, n_query)
    new = request.scale
    moment = None if request.value is None else new.new_zeros(*rows, request.value.shape[-1])
    mass, first, spread, count = (new.new_zeros(rows) for _ in range(4))
    return State(new.new_full(rows, -torch.inf), mass, first, spread, count, moment)


@torch.no_grad()
def forward(request: Request, *, whole: bool = False) -> Sums:
    """State, target score, rank and ends of every row; `whole`: in a single tile."""
    clean, grid = Clean.of(request), Grid(request, choose_tile(request, whole))
    parts: list[Sums] = []
    for index, rows in enumerate(grid.rows):
        state = _neutral(request, rows.stop - rows.start)
        target = None if request.target is None else torch.full_like(state.peak, -torch.inf)
        ends = Extremes(state.peak) if request.extremes else None
        for cols, mask in grid.visit(index):
            x = clean.operands(rows, cols)
            s, mask, _ = scores(clean, x, rows, cols, mask)
            if target is not None and request.target is not None:
                target = _pick(s, request.target[..., rows], cols, target)
            if ends is not None:
                ends.add(s, cols.start)
            state = state.merge(sums(clean, x, s, mask, cols))
        rank = _rank(clean, grid, index, target) if request.rank and target is not None else None
        part = Sums.of(state, target, rank)
        parts.append(part if ends is None else part._replace(least=ends.least, places=ends.places))
    return _stack(parts).answering(request)


def _pick(s: Tensor, target: Tensor, cols: slice, so_far: Tensor) -> Tensor:
    """The target's score, once its tile comes by."""
    at = target - cols.start
    inside = (at >= 0) & (at < s.shape[-1])
    index = at.clamp(0, s.shape[-1] - 1)[..., None].expand(*so_far.shape, 1)
    found = s.expand(*so_far.shape, s.shape[-1]).gather(-1, index)[..., 0]
    return torch.where(inside, found, so_far)


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
    return rank


def _stack(parts: Sequence[Sums]) -> Sums:
    """All row tiles together."""
    rows: dict[str, Any] = {}
    for name in Sums._fields:
        found = [x for part in parts if (x := getattr(part, name)) is not None]
        rows[name] = torch.cat(found, -2 if name == "moment" else -1) if found else None
    return Sums(**rows)


def _upstream(g: Upstream, rows: slice) -> Upstream:
    return Upstream(
        g.mass[..., rows],
        g.first[..., rows],
        g.second[..., rows],
        None if g.moment is None else g.moment[..., rows, :],
        None if g.target is None else g.target[..., rows],
    )


@torch.no_grad()
def backward(
    request: Request, peak: Tensor, g: Upstream, needs: Sequence[bool], *, whole: bool = False
) -> dict[str, Tensor]:
    """Gradients of (query, key, value, scale, bias), as far as needed, in the accumulation dtype."""
    clean, grid = Clean.of(request), Grid(request, choose_tile(request, whole))
    level = peak.to(request.dtype)
    total = Accumulator(request, needs)
    for index, rows in enumerate(grid.rows):
        gr = _upstream(g, rows)
        for cols, mask in grid.visit(index):
            x = clean.operands(rows, cols)
            total.add(gradients(clean, x, gr, level[..., rows], rows, cols, mask), rows, cols)
    return total.total


def second_order(
    request: Request, peak: Tensor, g: Upstream, above: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Derivative of `backward`: gradients of the operands and of g, given those of its results.

    With the peak held constant every sum over keys is a sum over tiles, so this too goes tile by tile.
    """
    clean, grid = Clean.of(request), Grid(request, choose_tile(request))
    level = peak.to(request.dtype)
    given = Operands(request.query, request.key, request.value, request.scale, request.bias)
    whole = {**_present(given), **{"g_" + name: t for name, t in _present(g).items()}}
    total = {name: torch.zeros_like(t, dtype=request.dtype) for name, t in whole.items()}
    for index, rows in enumerate(grid.rows):
        gr = _upstream(g, rows)
        for cols, mask in grid.visit(index):
            x = clean.operands(rows, cols)
            inputs = {**_present(x), **{"g_" + name: t for name, t in _present(gr).items()}}
            wanted = {name: view(name, t, rows, cols) for name, t in above.items()}

            def first_order(
                given: dict[str, Tensor], rows: slice = rows, cols: slice = cols, mask: Tensor | None = mask
            ) -> dict[str, Tensor]:
                xs = Operands(**{f.name: given.get(f.name) for f in fields(Operands)})  # type: ignore[arg-type]
                gs = Upstream(**{f.name: given.get("g_" + f.name) for f in fields(Upstream)[:5]})  # type: ignore[arg-type]
                part = _present(gradients(clean, xs, gs, level[..., rows], rows, cols, mask))
                return {name: part[name] for name in above}

            pull = torch.func.vjp(first_order, inputs)[1]
            (back,) = pull(wanted)
            for name, piece in back.items():
                # added out of place: under vmap a piece may have a batch dimension the total lacks
                total[name] = total[name] + _placed(name, piece, whole[name], rows, cols)
    operands = {name: t for name, t in total.items() if not name.startswith("g_")}
    return operands, {name[2:]: t for name, t in total.items() if name.startswith("g_")}


def _placed(name: str, piece: Tensor, whole: Tensor, rows: slice, cols: slice) -> Tensor:
    """A tile's piece in a tensor of the whole's size, zero elsewhere."""
    over = (rows.start, whole.shape[-1] - rows.stop)  # of a row vector
    if name in ("query", "g_moment"):
        pad = (0, 0, rows.start, whole.shape[-2] - rows.stop)
    elif name in ("key", "value"):
        pad = (0, 0, cols.start, whole.shape[-2] - cols.stop)
    elif name == "bias":
        across = (0, 0) if whole.shape[-1] == 1 else (cols.start, whole.shape[-1] - cols.stop)
        down = (0, 0) if whole.shape[-2] == 1 else (rows.start, whole.shape[-2] - rows.stop)
        pad = (*across, *down)
    else:
        return torch.nn.functional.pad(piece, (0, 0) if whole.shape[-1] == 1 else over)
    return torch.nn.functional.pad(piece, pad)


def _present(group: Operands | Upstream) -> dict[str, Tensor]:
    return {f.name: t for f in fields(group) if isinstance(t := getattr(group, f.name), Tensor)}


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


def scores_whole(request: Request) -> Tensor:  # (*b, Q, K)
    """All scores at once, differentiable."""
    rows, cols = slice(0, request.n_query), slice(0, request.n_key)
    clean, mask = Clean.of(request), window_mask(request.terms, rows, cols, request.query.device)
    found = scores(clean, clean.operands(rows, cols), rows, cols, mask)[0]
    return found.expand(*request.batch, request.n_query, request.n_key)
