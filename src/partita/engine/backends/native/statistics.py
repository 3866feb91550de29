"""Sums over the rows of each head, on the native library: one walk in place of some sixty small tensor operations.

How finely a histogram or a band is cut is the caller's: the shapes of what is added to say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partita.engine.backends.native import layout, library
from partita.engine.backends.native.operands import address, pointer, sound
from partita.engine.backends.native.plain_attention import row_statistics

__all__ = ["Totals", "accumulate", "accumulate_attention"]

_SUMS, _BAND_SUMS, _MOST_BANDS = 11, 5, 64


class Totals(NamedTuple):
    """Float64 sums of each head, added to in place."""

    sums: Tensor  # (11, heads)
    peak: Tensor  # (heads,): the largest score
    length: Tensor  # (heads,): the most keys seen
    histogram: Tensor  # (heads, bins) of H / log(visible)
    bands: Tensor  # (5, heads, bands of log2(visible))


def accumulate(
    totals: Sequence[Tensor],  # those of `Totals`
    entropy: Tensor,  # (batch, heads, rows) float32, like the next four
    log_partition: Tensor,
    score_variance: Tensor,
    max_score: Tensor,
    visible: Tensor,
    sink: Tensor | tuple[Tensor, Tensor, float],  # mass on key 0; or query, key and scale, where every row sees it
    keep: Tensor | None,  # (batch, rows) bool
) -> bool:
    """Add the rows to the sums of their heads; False, and nothing done, where the library does not serve them."""
    if library.load() is None:
        return False
    rows = [entropy, log_partition, score_variance, max_score, visible]
    mass = sink if isinstance(sink, Tensor) else None
    rows += [mass] if mass is not None else []
    shape = entropy.shape
    if len(shape) != 3 or any(t.shape != shape or t.dtype != torch.float32 or not t.is_cpu for t in rows):
        return False
    batch, heads, n = shape
    places = _checked(totals, heads)
    if places is None or not _fits(keep, batch, n):
        return False
    keep = None if keep is None else sound(keep, "keep").contiguous()
    lines = [sound(t, "statistics").contiguous() for t in rows]
    query = key = None
    strides: tuple[int, ...] = (0,) * 5
    dim, scale = 0, 1.0
    if not isinstance(sink, Tensor):
        query, key, scale = sink
        dim = query.shape[-1]
        fits = query.shape == (*shape, dim) and key.dim() == 4 and key.shape[:2] == shape[:2] and key.shape[3] == dim
        if not fits or key.shape[2] < 1 or any(t.dtype != torch.float32 or not t.is_cpu for t in (query, key)):
            return False
        query, key = sound(query, "query"), sound(key, "key")
        query, key = (t if t.stride(-1) == 1 or dim < 2 else t.contiguous() for t in (query, key))
        strides = (*query.stride()[:3], *key.stride()[:2])
    if not entropy.numel():
        return True
    columns = [*map(pointer, lines), *([0] if mass is None else [])]
    packed = layout.STATISTICS.pack(
        batch, heads, n, dim, torch.get_num_threads(), *places[:2], False, scale,
        *columns, pointer(query), pointer(key), *strides, pointer(keep), *places[2:],
    )  # fmt: skip
    return library.run("statistics", packed)


def accumulate_attention(
    totals: Sequence[Tensor],  # those of `Totals`
    query: Tensor,  # (batch, heads, rows, D)
    key: Tensor,  # (batch, heads or a divisor, K, D)
    scale: float,
    causal: bool,
    keep: Tensor | None,  # (batch, rows) bool
) -> bool:
    """Add the rows of plain attention, with what each has on key 0; False, and nothing done, for the long way."""
    if query.dim() != 4 or query.dtype == torch.float64:
        return False
    batch, heads, n, _ = query.shape
    places = _checked(totals, heads)
    if places is None or not _fits(keep, batch, n):
        return False
    keep = None if keep is None else sound(keep, "keep").contiguous()
    made = row_statistics(query, key, scale, causal)
    if made is None:
        return False
    log_z, entropy, _, variance, top, visible, first = (made.data_ptr() + i * 4 * made.stride(0) for i in range(7))
    packed = layout.STATISTICS.pack(
        batch, heads, n, 0, torch.get_num_threads(), *places[:2], True, 1.0,
        entropy, log_z, variance, top, visible, first, 0, 0, *(0,) * 5, pointer(keep), *places[2:],
    )  # fmt: skip
    return library.run("statistics", packed)


def _checked(totals: Sequence[Tensor], heads: int) -> tuple[int, ...] | None:
    """Bins, bands and where the totals lie; None where they are cut in a way that the library does not serve."""
    given = Totals(*totals)
    bins, bands = given.histogram.shape[-1], given.bands.shape[-1]
    if not (bins and 0 < bands <= _MOST_BANDS):
        return None
    expected = ((_SUMS, heads), (heads,), (heads,), (heads, bins), (_BAND_SUMS, heads, bands))
    for name, t, wanted in zip(Totals._fields, given, expected, strict=True):
        if tuple(t.shape) != wanted or t.dtype != torch.float64 or not t.is_cpu or not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous float64 {wanted} on the CPU; got {t.dtype} {tuple(t.shape)}")
    return bins, bands, *(address(t, name) for name, t in zip(Totals._fields, given, strict=True))


def _fits(keep: Tensor | None, batch: int, n: int) -> bool:
    return keep is None or (keep.shape == (batch, n) and keep.dtype == torch.bool and keep.is_cpu)
