"""Sums over rows, per head, on the native library: what watching a model adds up at every softmax."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from partita.engine.backends.native import reduce as native

__all__ = ["BANDS", "BINS", "Totals", "add_rows"]

BINS = 256  # of the histogram of H / log(visible)
BANDS = 24  # of log2(visible)
_SUMS, _BAND_SUMS = 11, 5
_TALLY = struct.Struct("4q2i2f19q")


class Totals(NamedTuple):
    """Float64 sums of each head, added to in place."""

    sums: Tensor  # (11, heads)
    peak: Tensor  # (heads,): the largest score
    length: Tensor  # (heads,): the most keys seen
    histogram: Tensor  # (heads, BINS) of H / log(visible)
    bands: Tensor  # (5, heads, BANDS)


def add_rows(
    totals: Totals,
    entropy: Tensor,  # (batch, heads, rows) float32, like the next four
    log_partition: Tensor,
    score_variance: Tensor,
    max_score: Tensor,
    visible: Tensor,
    sink: Tensor | tuple[Tensor, Tensor, float],  # mass on key 0; or query, key and scale, where every row sees it
    keep: Tensor | None,  # (batch, rows) bool
) -> bool:
    """Add the rows to the sums of their heads; False, and nothing done, where the library does not serve them."""
    library = native.load()
    if library is None:
        return False
    rows = [entropy, log_partition, score_variance, max_score, visible]
    mass = sink if isinstance(sink, Tensor) else None
    rows += [mass] if mass is not None else []
    shape = entropy.shape
    if len(shape) != 3 or any(t.shape != shape or t.dtype != torch.float32 or not t.is_cpu for t in rows):
        return False
    batch, heads, n = shape
    expected = ((_SUMS, heads), (heads,), (heads,), (heads, BINS), (_BAND_SUMS, heads, BANDS))
    for name, t, wanted in zip(Totals._fields, totals, expected, strict=True):
        if tuple(t.shape) != wanted or t.dtype != torch.float64 or not t.is_cpu or not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous float64 {wanted} on the CPU; got {t.dtype} {tuple(t.shape)}")
    if keep is not None:
        if keep.shape != (batch, n) or keep.dtype != torch.bool or not keep.is_cpu:
            return False
        keep = keep.contiguous()
    lines = [t.contiguous() for t in rows]
    query = key = None
    strides: tuple[int, ...] = (0,) * 5
    dim, scale = 0, 1.0
    if not isinstance(sink, Tensor):
        query, key, scale = sink
        dim = query.shape[-1]
        fits = query.shape == (*shape, dim) and key.dim() == 4 and key.shape[:2] == shape[:2] and key.shape[3] == dim
        if not fits or key.shape[2] < 1 or any(t.dtype != torch.float32 or not t.is_cpu for t in (query, key)):
            return False
        query, key = (t if t.stride(-1) == 1 or dim < 2 else t.contiguous() for t in (query, key))
        strides = (*query.stride()[:3], *key.stride()[:2])
    if not entropy.numel():
        return True

    def at(t: Tensor | None) -> int:
        return 0 if t is None else t.data_ptr()

    columns = [*map(at, lines), *([0] if mass is None else [])]
    library.handle.partita_tally(
        _TALLY.pack(
            batch, heads, n, dim, torch.get_num_threads(), 0, scale, 0.0,
            *columns, at(query), at(key), *strides, at(keep), *map(at, totals),
        )
    )  # fmt: skip
    return True
