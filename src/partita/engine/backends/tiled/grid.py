"""Which tiles a pass visits: empty ones are skipped, full ones need no mask.

The bounds of every term are read once for all tiles. Those of a term on another device are not read, which would wait
for it: each of its tiles gets its mask.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from partita._checks import check_positive
from partita.engine.axes import parts
from partita.engine.request import Request
from partita.engine.terms import Term, cut, window_mask

__all__ = ["Grid", "choose_tile", "tile_shape"]

_forced: ContextVar[tuple[int, int] | None] = ContextVar("partita_tile_shape", default=None)
_AREA = {"cpu": 1 << 18, "other": 1 << 24}  # scores held at a time
_SIDE = 1024


@contextlib.contextmanager
def tile_shape(rows: int, cols: int) -> Iterator[None]:
    """Force the size of the tiled backend's tiles; results do not depend on it."""
    check_positive("rows", rows)
    check_positive("cols", cols)
    token = _forced.set((rows, cols))
    try:
        yield
    finally:
        _forced.reset(token)


def choose_tile(request: Request, whole: bool = False) -> tuple[int, int]:
    """Rows and columns of a tile: square for one head, flatter when many heads share the pass; `whole`: all of them."""
    if whole:
        return max(1, request.n_query), max(1, request.n_key)
    forced = _forced.get()
    if forced is not None:
        return forced
    area = _AREA.get(request.query.device.type, _AREA["other"]) // max(1, math.prod(request.batch))
    if request.pairs is not None:  # a function may hold a number of its own for each feature of a pair
        many = request.pairs.per_pair or max(request.query.shape[-1], request.key.shape[-1])
        area //= max(1, many)
    cols = min(_SIDE, max(64, 1 << max(0, int(math.log2(max(1, area)) / 2))))
    rows = min(4 * _SIDE, max(16, area // cols))
    return rows, cols


class Grid:
    """Tiles of one request. Where there are no rows they are one tile of none, which sees nothing."""

    def __init__(self, request: Request, shape: tuple[int, int]):
        rows, cols = shape
        self.rows = parts(request.n_query, rows) or [slice(0, 0)]
        self.cols = parts(request.n_key, cols) if request.n_query else []
        self._terms = request.terms
        self._device = request.query.device
        self._status = [_status(term, self.rows, self.cols) for term in request.terms] if self.cols else []

    def visit(self, row: int) -> Iterator[tuple[slice, Tensor | None]]:
        """The column tiles a row tile sees, with their mask (None where all is visible)."""
        for col, keys in enumerate(self.cols):
            status = [tiles[row][col] for tiles in self._status]
            if not status or _FULL in status:
                yield keys, None
            elif _MIXED in status:
                alive = [term for term, s in zip(self._terms, status, strict=True) if s != _EMPTY]
                yield keys, window_mask(alive, self.rows[row], keys, self._device)


_EMPTY, _MIXED, _FULL = range(3)


def _status(term: Term, rows: Sequence[slice], cols: Sequence[slice]) -> list[list[int]]:
    """How much a term shows of each tile, as far as its bounds over the tile's rows and columns determine it."""
    if any(not t.is_cpu for t in term if isinstance(t, Tensor)):
        return [[_MIXED] * len(cols)] * len(rows)
    first, end = (
        torch.tensor(at, dtype=torch.int64, device="cpu") for at in ([c.start for c in cols], [c.stop for c in cols])
    )
    empty = torch.zeros(len(rows), len(cols), dtype=torch.bool, device="cpu")
    full = ~empty
    if term.start is not None:
        low, high = _bounds(term.start, rows)
        empty, full = empty | (low >= end), full & (high <= first)
    if term.stop is not None:
        low, high = _bounds(term.stop, rows)
        empty, full = empty | (high <= first), full & (low >= end)
    if term.query_segment is not None and term.key_segment is not None:
        (low, high), (least, most) = _bounds(term.query_segment, rows), _bounds(term.key_segment, cols)
        least, most = least.mT, most.mT
        empty = empty | (high < least) | (most < low)
        full = full & (low == high) & (least == most) & (low == least)
    if term.mask is not None:
        shown = [[cut(term.mask, r, c) for c in cols] for r in rows]
        empty = empty | ~torch.stack([torch.stack([part.any() for part in row]) for row in shown])
        full = full & torch.stack([torch.stack([part.all() for part in row]) for row in shown])
    if term.skip is not None:
        low, high = _bounds(term.skip, rows)
        full = full & ((high < first) | (low >= end))
    found: list[list[int]] = torch.where(empty, _EMPTY, torch.where(full, _FULL, _MIXED)).tolist()
    return found


def _bounds(tensor: Tensor, slices: Sequence[slice]) -> tuple[Tensor, Tensor]:  # (tiles, 1) each
    """The smallest and the largest number of each slice."""
    if not tensor.numel():
        return (torch.zeros(len(slices), 1, dtype=torch.int64, device="cpu"),) * 2
    low, high = zip(*[tensor[..., s].aminmax() for s in slices], strict=True)
    return torch.stack(low)[:, None], torch.stack(high)[:, None]
