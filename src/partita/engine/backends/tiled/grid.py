"""Which tiles a pass visits: empty ones are skipped, full ones need no mask.

The extents of every term are read once, so that asking about a tile costs a few comparisons of plain integers. Those of
a term on another device are not read, which would wait for it: each of its tiles gets its mask.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from partita._checks import check_positive
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


def _slices(n: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


class Grid:
    """Tiles of one request. Where there are no rows they are one tile of none, which sees nothing."""

    def __init__(self, request: Request, shape: tuple[int, int]):
        rows, cols = shape
        self.rows = _slices(request.n_query, rows) or [slice(0, 0)]
        self.cols = _slices(request.n_key, cols) if request.n_query else []
        self._terms = request.terms
        self._device = request.query.device
        self._extents = [_Extent(term, self.rows, self.cols) for term in request.terms]

    def visit(self, row: int) -> Iterator[tuple[slice, Tensor | None]]:
        """The column tiles a row tile sees, with their mask (None where all is visible)."""
        for col, keys in enumerate(self.cols):
            if not self._extents:
                yield keys, None
                continue
            status = [extent.status(row, col) for extent in self._extents]
            if "full" in status:
                yield keys, None
            elif "mixed" in status:
                alive = [term for term, s in zip(self._terms, status, strict=True) if s != "empty"]
                yield keys, window_mask(alive, self.rows[row], keys, self._device)


class _Extent:
    """Bounds of one term over each row tile and column tile."""

    def __init__(self, term: Term, rows: Sequence[slice], cols: Sequence[slice]):
        self.term, self.rows, self.cols = term, rows, cols
        self.unread = any(not t.is_cpu for t in term if isinstance(t, Tensor))
        if self.unread:
            return
        self.start = _bounds(term.start, rows)
        self.stop = _bounds(term.stop, rows)
        self.query = _bounds(term.query_segment, rows)
        self.key = _bounds(term.key_segment, cols)
        self.skip = _bounds(term.skip, rows)

    def status(self, row: int, col: int) -> str:
        if self.unread:
            return "mixed"
        rows, cols = self.rows[row], self.cols[col]
        full = True
        if self.start is not None:
            low, high = self.start[row]
            if low >= cols.stop:
                return "empty"
            full = full and high <= cols.start
        if self.stop is not None:
            low, high = self.stop[row]
            if high <= cols.start:
                return "empty"
            full = full and low >= cols.stop
        if self.query is not None and self.key is not None:
            (a, b), (c, d) = self.query[row], self.key[col]
            if b < c or d < a:
                return "empty"
            full = full and a == b == c == d
        if self.term.mask is not None:
            part = cut(self.term.mask, rows, cols)
            if not bool(part.any()):
                return "empty"
            full = full and bool(part.all())
        if self.skip is not None:
            low, high = self.skip[row]
            full = full and (high < cols.start or low >= cols.stop)
        return "full" if full else "mixed"


def _bounds(tensor: Tensor | None, slices: Sequence[slice]) -> list[tuple[int, int]] | None:
    if tensor is None:
        return None
    if tensor.numel() == 0 or not slices:
        return [(0, 0)] * len(slices)
    low = torch.stack([tensor[..., s].amin() for s in slices]).tolist()
    high = torch.stack([tensor[..., s].amax() for s in slices]).tolist()
    return list(zip(low, high, strict=True))
