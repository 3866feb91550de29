"""The engine: one streaming pass over a request, and the state it leaves. `reduce` is the only door.

`scan` walks the tiles of scores themselves, for readers that need more than sums (samples, the best keys).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from partita.engine.grid import Grid, tile_shape
from partita.engine.registry import backend, backends, current, explain
from partita.engine.request import Request, build, extend
from partita.engine.run import run as reduce
from partita.engine.state import State, Stats, merge
from partita.engine.tile import Clean, scores
from partita.engine.tiled import Sums

__all__ = [
    "Request",
    "State",
    "Stats",
    "Sums",
    "backend",
    "backends",
    "build",
    "current",
    "explain",
    "extend",
    "merge",
    "reduce",
    "scan",
    "tile_shape",
    "whole",
]


@torch.no_grad()
def scan(request: Request) -> Iterator[tuple[slice, Iterator[tuple[slice, Tensor]]]]:
    """For each row tile its rows, and an iterator of (columns, scores) tiles; -inf is not visible."""
    clean, grid = Clean.of(request), Grid(request)
    for index, rows in enumerate(grid.rows):

        def tiles(index: int = index, rows: slice = rows) -> Iterator[tuple[slice, Tensor]]:
            for cols, mask in grid.visit(index):
                s, _, _ = scores(clean, clean.operands(rows, cols), rows, cols, mask)
                yield cols, s.expand(*request.batch, *s.shape[-2:])

        yield rows, tiles()


def whole(request: Request) -> Tensor:
    """All scores at once, differentiable: the one dense thing here."""
    clean = Clean.of(request)
    grid = Grid(request, (max(1, request.n_query), max(1, request.n_key)))
    rows, cols = slice(0, request.n_query), slice(0, request.n_key)
    shape = (*request.batch, request.n_query, request.n_key)
    if not grid.rows:
        return request.scale.new_zeros(shape)
    for cols, mask in grid.visit(0):
        return scores(clean, clean.operands(rows, cols), rows, cols, mask)[0].expand(shape)
    return request.scale.new_full(shape, -torch.inf)
