"""Plain attention without a graph: what is known of a geometry is worked out once, a call fills in addresses.

For a short sequence the checks and tables of a call cost as much as the pass. They depend on shapes, strides and dtypes
alone, so the structures the library reads are kept for the geometries seen last, with everything but the addresses.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from partita.engine.axes import offsets
from partita.engine.backends.native import layout, library
from partita.engine.backends.native.operands import CODES, CPU, NOTHING, extent
from partita.engine.state import Stats

__all__ = ["attention", "row_statistics"]

_CACHED = 4096  # batch entries, or rows of a causal geometry, of one that is kept: 160 kB at the most
_pack = layout.ATTENTION.pack


class Geometry(NamedTuple):
    """What calls of the same shapes, strides and dtype share."""

    problem: bytes
    sums: bytes
    rows: tuple[int, ...]  # (*b, heads, Q)
    like_query: bool  # the result lies in memory as the query does
    reach: tuple[int, ...]  # elements of query, key and value, if there is one, from first to last
    alive: tuple[Tensor, ...]  # tables whose addresses are in the structures


def attention(
    query: Tensor,  # (*b, heads, Q, D)
    key: Tensor,  # (*b, heads or a divisor, K, D)
    value: Tensor,  # (*b, as key, K, V)
    scale: float,
    causal: bool,  # row i sees keys j <= i
    statistics: bool,
) -> tuple[Tensor, Stats | None] | None:
    """E[value_j] of each row, lying in memory as the query does, and the rows' statistics.

    None where the library does not serve these, or where a result is not finite. Nobody may differentiate or trace.
    """
    if not (query.is_cpu and key.is_cpu and value.is_cpu) or library.load() is None or not math.isfinite(scale):
        return None
    dtype = query.dtype
    q, k, v = query.shape, key.shape, value.shape
    strides = query.stride(), key.stride(), value.stride()
    given = (q, k, v, *strides, dtype, key.dtype, value.dtype, causal, torch.get_num_threads())
    geometry = (_kept_geometry if math.prod(q[:-1] if causal else q[:-2]) <= _CACHED else _geometry)(*given)
    if geometry is None or query.is_neg() or key.is_neg() or value.is_neg():
        return None
    for tensor, reach in zip((query, key, value), geometry.reach, strict=True):
        if (tensor.storage_offset() + reach) * tensor.itemsize > tensor.untyped_storage().nbytes():
            return None  # the long way says what is wrong
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    if not geometry.like_query:
        mean = torch.empty((*geometry.rows, v[-1]), dtype=acc, device=CPU)
    else:
        mean = torch.empty_like(query) if acc == dtype else torch.empty_like(query, dtype=acc)
    stats = mean.new_empty((6, *geometry.rows)) if statistics else None  # half the price of torch.empty
    to_stats = 0 if stats is None else stats.data_ptr()
    to_count = 0 if stats is None else to_stats + 5 * stats.stride(0) * acc.itemsize
    call = _pack(scale, query.data_ptr(), key.data_ptr(), value.data_ptr(), mean.data_ptr(), to_stats, to_count, 0)
    if not library.run("attention", geometry.problem, geometry.sums, call):
        return None
    out = mean if acc == dtype else mean.to(dtype)
    return out, None if stats is None else Stats._make(stats.unbind())


def row_statistics(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor | None:  # (7, *b, heads, Q)
    """Each row's statistics alone, in the order of `Stats`, then the score of key 0; None as for `attention`."""
    if not (query.is_cpu and key.is_cpu) or library.load() is None or not math.isfinite(scale):
        return None
    q, k = query.shape, key.shape
    known = _kept_geometry if math.prod(q[:-1] if causal else q[:-2]) <= _CACHED else _geometry
    dtypes = query.dtype, key.dtype, key.dtype
    geometry = known(q, k, None, query.stride(), key.stride(), (), *dtypes, causal, torch.get_num_threads())
    if geometry is None:
        return None
    for t, reach in zip((query, key), geometry.reach, strict=True):
        if t.is_neg() or (t.storage_offset() + reach) * t.itemsize > t.untyped_storage().nbytes():
            return None
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    stats = torch.empty((7, *geometry.rows), dtype=acc, device=CPU)
    at, step = stats.data_ptr(), stats.stride(0) * acc.itemsize
    call = _pack(scale, query.data_ptr(), key.data_ptr(), 0, 0, at, at + 5 * step, at + 6 * step)
    return stats if library.run("attention", geometry.problem, geometry.sums, call) else None


def _geometry(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size | None,  # where no mean is wanted
    query_strides: tuple[int, ...],
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    dtype: torch.dtype,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
    causal: bool,
    threads: int,
) -> Geometry | None:
    """None where plain attention is not served: other dtypes or devices, batches that broadcast, nothing to see."""
    dims, width = len(q), () if v is None else v[-1:]
    v, value_strides = (k, key_strides) if v is None else (v, value_strides)
    if dtype not in CODES or key_dtype != dtype or value_dtype != dtype or dims < 3 or len(k) != dims or len(v) != dims:
        return None
    *lead, heads, Q, D = q
    key_heads, K, V = k[-3], k[-2], sum(width)
    fits = list(k[:-3]) == lead and v[:-1] == k[:-1] and k[-1] == D
    if not fits or min(*q, *k, *v) == 0 or heads % key_heads or max(Q, K) >= 2**31:
        return None
    if any(
        size > 1 and strides[-1] != 1 for size, strides in ((D, query_strides), (D, key_strides), (V, value_strides))
    ):
        return None
    groups = heads // key_heads
    batch = (*lead, key_heads, groups)  # one more dimension, in which keys and values are shared
    split = (*query_strides[:-3], query_strides[-3] * groups, query_strides[-3])
    shared = (*lead, key_heads, 1)
    tables = [
        offsets(batch, batch, split),
        offsets(batch, shared, (*key_strides[: dims - 2], 0)),
        offsets(batch, shared, (*value_strides[: dims - 2], 0)),
        offsets(batch, (1,) * (dims - 1), (0,) * (dims - 1)),
    ]
    at_query, at_key, at_value, nowhere = (t.data_ptr() for t in tables)
    stop, value = NOTHING, (0, at_value, value_strides[-2], 1) if width else NOTHING
    if causal:
        with torch.inference_mode(False):
            last = torch.arange(1, Q + 1, dtype=torch.int32, device=CPU)
        stop = (last.data_ptr(), nowhere, 1, 1)
        tables.append(last)
    problem = layout.PROBLEM.pack(
        math.prod(batch), Q, K, D, V, CODES[dtype], 0, threads, 0, 0.0,
        *(0, at_query, query_strides[-2], 1), *(0, at_key, key_strides[-2], 1), *value,
        *(0, nowhere, 0, 1), *NOTHING, *NOTHING, *NOTHING, *stop, *NOTHING, *NOTHING, *NOTHING,
    )  # fmt: skip
    rows = tuple(q[:-1])
    like_query, strides = _placed(q, query_strides, V)
    at_mean = offsets(rows[:-1], rows[:-1], strides[:-2])
    sums = layout.SUMS.pack(*(0,) * 11, True, True, at_mean.data_ptr(), strides[-2], 0, 0, 0)
    reach = extent(q, query_strides), extent(k, key_strides), *([extent(v, value_strides)] if width else [])
    return Geometry(problem, sums, rows, like_query, reach, (*tables, at_mean))


_kept_geometry = functools.lru_cache(maxsize=64)(_geometry)


def _placed(q: torch.Size, query_strides: tuple[int, ...], width: int) -> tuple[bool, tuple[int, ...]]:
    """Whether the result may lie as the query does, and its strides."""
    if q[-1] == width:
        like = torch.empty_like(torch.empty_strided(q, query_strides, device="meta"))
        if like.stride(-1) == 1:
            return True, like.stride()
    return False, torch.empty((*q[:-1], width), dtype=torch.float32, device="meta").stride()
