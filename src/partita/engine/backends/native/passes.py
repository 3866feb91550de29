"""The pass and its gradients; plain attention, which needs no request; sums of columns, and scans of the scores.

Where a result is not finite all of them give None: a NaN or infinity in a key or value that some row may not see can
end up in that row (0 * NaN), and only a backend that looks at every key can tell.

Legend: Q query rows, K keys, D features, V value features. Nothing here is differentiable.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.engine.axes import offsets
from partita.engine.backends.disjoint import added, forward_each, split_request, too_large
from partita.engine.backends.native import library
from partita.engine.backends.native.call import CODES, CPU, NAMES, Call, at, block, extent, geometry_of
from partita.engine.request import Request
from partita.engine.state import Stats
from partita.engine.sums import OPERANDS, SumGrads, Sums
from partita.exactness import in_exact_rows

__all__ = [
    "ColumnSums", "attention", "backward", "column_sums", "forward", "gaps", "row_statistics", "top",
]  # fmt: skip


class ColumnSums(NamedTuple):
    """Sums over rows for each key, relative to the key's peak; in backward, the upstream gradient after `peak`."""

    peak: Tensor  # (K,) float64
    mass: Tensor  # (K,)


def forward(r: Request, columns: ColumnSums | None = None) -> Sums | None:
    """Row sums over the visible keys; with `columns`, made here for a single batch entry, sums over rows go there."""
    if len(r.terms) > 1:
        return forward_each(r, _forward)
    return _forward(r, columns)


def _forward(r: Request, columns: ColumnSums | None = None) -> Sums | None:
    call = Call.of(r)
    g, new = call.geometry, r.scale.new_empty  # the dtype of the sums, on the CPU
    rows, aimed, spread = g.rows, r.target is not None, r.statistics
    peak, mass, count = new(rows, dtype=torch.float64), new(rows), new(rows)
    first, second, stats = (new(rows), new(rows), new((5, *rows))) if spread else (None, None, None)
    score = new(rows) if aimed else None
    ranks = new(rows, dtype=torch.int64) if r.rank and aimed else None
    best = new(rows, dtype=torch.int64) if r.argmax else None
    moment: Tensor | None = None
    if r.value is not None:
        moment = torch.empty_like(r.query) if g.as_query else new((*rows, r.value.shape[-1]))
    outputs = at(peak, mass, first, second, moment, score, count, ranks, *(columns or (None, None)), stats, best)
    packed = library.SUMS.pack(*outputs[:-1], r.mean, r.last, g.moment, g.moment_row, outputs[-1])
    if not library.run("forward", call.problem, packed):
        return None
    moment, average = (None, moment) if r.mean else (moment, None)
    return Sums(peak, mass, count, first, second, stats, moment, average, score, ranks, best)


_UPSTREAM = ("peak", "g_mass", "g_first", "g_second", "g_moment", "g_target")


def backward(
    r: Request,
    peak: Tensor,  # (*b, Q) float64, as `forward` gave it
    g: SumGrads,
    needs: Sequence[bool],  # query, key, value, scale, bias
    columns: ColumnSums | None = None,  # the peaks `forward` gave, and upstream gradients of the column sums
    *,
    rounded: bool = False,
) -> dict[str, Tensor] | None:
    """Gradients of the sums at the same operands, by name, in the dtype of the sums.

    `rounded`: the key's may be in its own dtype, which is rounded where it is made: all of it in float32 is never held.
    """
    if len(r.terms) > 1 and (parts := split_request(r)) is not None:
        return added(backward(part, peak, g, needs) for part in parts)
    valued, new = g.moment is not None and r.value is not None, r.scale.new_empty
    call = Call.of(r, valued=valued)
    rows, shared, acc = call.geometry.rows, call.geometry.shared, r.scale.dtype
    batch, D, K = rows[:-1], r.query.shape[-1], r.n_key
    V = r.value.shape[-1] if valued and r.value is not None else 0
    if r.value is not None and not valued and tuple(peak.shape) != rows:
        # batch entries that only the value has, where it needs no gradient: copies, whose gradients add up
        peak = peak[tuple([slice(0, n) for n in rows])]
        g = SumGrads(*[None if t is None else t.sum_to_size(rows) for t in g])  # type: ignore[arg-type]
    want = [name for name, need in zip(OPERANDS, needs, strict=True) if need and getattr(r, name) is not None]
    if not math.prod(rows) or not K:  # nothing to see; and an empty tensor has no address
        return {name: torch.zeros_like(getattr(r, name), dtype=acc) for name in want}
    upstream = (peak, g.mass, g.first, g.second, g.moment, g.target if r.target is not None else None)
    given = [
        None if t is None else block(t, name, (*rows, V) if name == "g_moment" else rows, acc if i else torch.float64)
        for i, (name, t) in enumerate(zip(_UPSTREAM, upstream, strict=True))
    ]
    by_key: Sequence[Tensor | None] = (None, None)
    if columns is not None:
        by_key = block(columns.peak, "column peak", (K,), torch.float64), block(columns.mass, "g_column", (K,), acc)
    shapes = {"query": (*rows, D), "scale": rows, "key": (*shared, K, D), "value": (*shared, K, V)}
    rounded = rounded and r.key.dtype == torch.bfloat16 and r.key.shape == shapes["key"]
    kinds = {"key": r.key.dtype if rounded else acc}
    wanted = [name for name in shapes if name in want and (valued or name != "value")]
    made = {name: new(shapes[name], dtype=kinds.get(name, acc)) for name in wanted}
    by_row, by_col, by_pair, repeats, table = 0, 0, [0, 0, 0, 0], False, None
    if r.bias is not None and "bias" in want:
        made["bias"], by_row, by_col, table = _bias(r.bias, rows, K, acc)
        if table is not None:
            by_pair, repeats = [*at(made["bias"], table), K, 1], math.prod(r.bias.shape[:-2]) < math.prod(batch)
    outputs = at(*given, *[made.get(name) for name in shapes])
    packed = library.GRADIENTS.pack(
        call.geometry.group, math.prod(shared), *outputs, by_row, by_col, *by_pair, repeats, *at(*by_key), rounded
    )
    if not library.run("backward", call.problem, packed):
        return None
    if "value" in want and not valued and r.value is not None:
        made["value"] = torch.zeros((), dtype=r.value.dtype, device=CPU).expand(r.value.shape)
    # summed over the batch dimensions in which an operand has size 1
    return {name: t if t.shape == (n := getattr(r, name).shape) else t.sum_to_size(n) for name, t in made.items()}


def _bias(bias: Tensor, rows: tuple[int, ...], n_key: int, acc: torch.dtype) -> tuple[Tensor, int, int, Tensor | None]:
    """Memory for the gradient of a bias, and its address as sums over keys, or over rows; or a table of its entries."""
    if bias.shape[-1] == 1:
        made = torch.empty((*rows, 1), dtype=acc, device=CPU)
        return made, made.data_ptr(), 0, None
    by_col = bias.shape[-2] == 1
    made = torch.zeros((*rows[:-1], 1, n_key) if by_col else bias.shape, dtype=acc, device=CPU)  # it is added to
    table = None if by_col else offsets(rows[:-1], tuple(bias.shape[:-2]), made.stride()[:-2])
    return made, 0, made.data_ptr() if by_col else 0, table


# ---- plain attention ------------------------------------------------------------------------------------------------


def attention(
    query: Tensor,  # (*b, heads, Q, D)
    key: Tensor,  # (*b, heads or a divisor, K, D)
    value: Tensor,  # (*b, as key, K, V)
    scale: float,
    causal: bool,  # row i sees keys j <= i
    statistics: bool,
) -> tuple[Tensor, Stats | None] | None:
    """E[value_j] of each row, in memory as the query is, and the rows' statistics.

    None where the library does not serve these. Autograd and tracers see nothing of it.
    """
    plain = _plain(query, key, value, scale, causal)
    if plain is None:
        return None
    made = plain.made
    if not plain.as_query:
        mean = torch.empty((*plain.rows, value.shape[-1]), dtype=made, device=CPU)
    else:
        mean = torch.empty_like(query) if made == query.dtype else torch.empty_like(query, dtype=made)
    acc = torch.float64 if made == torch.float64 else torch.float32
    stats = mean.new_empty((6, *plain.rows), dtype=acc) if statistics else None
    to = 0 if stats is None else stats.data_ptr()
    count = 0 if stats is None else to + 5 * stats.stride(0) * stats.itemsize
    places = query.data_ptr(), key.data_ptr(), value.data_ptr(), mean.data_ptr()
    if not library.run("attention", plain.problem, plain.sums, library.ATTENTION.pack(scale, *places, to, count, 0)):
        return None
    out = mean if made == query.dtype else mean.to(query.dtype)
    return out, None if stats is None else Stats._make(stats.unbind())


def row_statistics(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor | None:  # (7, *b, heads, Q)
    """Each row's statistics alone, in the order of `Stats`, then the score of key 0; None as for `attention`."""
    plain = _plain(query, key, None, scale, causal)
    if plain is None:
        return None
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    stats = torch.empty((7, *plain.rows), dtype=acc, device=CPU)
    to, step = stats.data_ptr(), stats.stride(0) * stats.itemsize
    call = library.ATTENTION.pack(scale, *at(query, key, None, None), to, to + 5 * step, to + 6 * step)
    return stats if library.run("attention", plain.problem, plain.sums, call) else None


class Plain(NamedTuple):
    """What calls of plain attention of the same shapes, strides and dtype share."""

    problem: bytes
    sums: bytes
    rows: tuple[int, ...]  # (*b, heads, Q)
    as_query: bool  # the result is laid out in memory as the query is
    made: torch.dtype  # of the result, as the library writes it
    reach: tuple[int, ...]  # elements of query, key and value, if there is one, from first to last
    alive: tuple[object, ...]  # tables whose addresses are in the structures


def _plain(query: Tensor, key: Tensor, value: Tensor | None, scale: float, causal: bool) -> Plain | None:
    """The structures of a call, its operands' memory checked; None for the general path, which serves it or raises."""
    q, dtype, threads = query.shape, query.dtype, torch.get_num_threads()
    if not (query.is_cpu and key.is_cpu and (value is None or value.is_cpu)) or library.load() is None:
        return None
    known: tuple[Any, ...] = (q, query.stride(), dtype), (key.shape, key.stride(), key.dtype)
    known = known if value is None else (*known, (value.shape, value.stride(), value.dtype))
    plain = (_kept_plain if math.prod(q[:-1] if causal else q[:-2]) <= _KEPT else _lay_out_plain)(
        known, causal, threads, in_exact_rows()
    )
    if plain is None or not math.isfinite(scale):
        return None
    for t, reach in zip((query, key, value), plain.reach, strict=False):
        assert t is not None
        if t.is_neg() or (t.storage_offset() + reach) * t.itemsize > t.untyped_storage().nbytes():
            return None
    return plain


def _lay_out_plain(
    given: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...], causal: bool, threads: int, exact: bool
) -> Plain | None:
    """None where plain attention is not served: other dtypes, batches that broadcast, copies, nothing to see."""
    (q, _, dtype), (k, _, _), *values = given
    dims = len(q)
    alike = all(len(shape) == dims and kind == dtype and 0 not in shape for shape, _, kind in given)
    if dtype not in CODES or dims < 3 or not alike or k[:-3] != q[:-3] or k[-1] != q[-1] or q[-3] % k[-3]:
        return None
    if any(shape[:-1] != k[:-1] for shape, _, _ in values):
        return None
    heads, n_query, groups = k[-3], q[-2], q[-3] // k[-3]

    def split(shape: Sequence[int], strides: Sequence[int], many: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        step = strides[-3]  # the heads as (key heads, groups)
        return (*shape[:-3], heads, many, *shape[-2:]), (*strides[:-3], step * many, step, *strides[-2:])

    acc = torch.float64 if dtype == torch.float64 else torch.float32
    ones = (1,) * (dims - 1)
    last: Tensor | None = None
    known: dict[str, Any] = {"scale": ((*ones, 1), (*ones, 1), acc)}
    for name, (shape, strides, _) in zip(("query", "key", "value"), given, strict=False):
        known[name] = (*split(shape, strides, groups if name == "query" else 1), dtype)
    if causal:
        with torch.inference_mode(False):
            last = torch.arange(1, n_query + 1, dtype=torch.int32, device=CPU)
        known["stop"] = (*ones, n_query), (*ones, 1), last.dtype
    g = geometry_of(tuple([known.get(name) for name in NAMES]), 0.0, True, threads, exact)
    if any(place.copied for place in g.places):
        return None
    problem = bytearray(g.problem)
    if last is not None:
        at_stop = library.PROBLEM.offsets["stop.data"]
        problem[at_stop : at_stop + 8] = last.data_ptr().to_bytes(8, "little")
    loaded = library.load()
    rounds = dtype == torch.bfloat16 and loaded is not None and loaded.pairs
    sums = library.SUMS.pack(*(0,) * 11, 1 + rounds, True, g.moment, g.moment_row, 0)
    reach = tuple([extent(shape, strides) for shape, strides, _ in given])
    made = dtype if rounds else acc
    return Plain(bytes(problem), sums, tuple(q[:-1]), g.as_query, made, reach, (g, last))


_KEPT = 4096  # batch entries, or rows of a causal geometry, of one that is kept: 160 kB at the most
_kept_plain = functools.lru_cache(maxsize=64)(_lay_out_plain)


# ---- what is read off the scores while they go by -------------------------------------------------------------------

_MOST_BEST = 64  # of a row's best that are kept in order while its keys go by


def column_sums(request: Request, peak: Tensor, weight: Tensor, shared: bool) -> Tensor | None:
    """sum_i weight_i exp(s_ij - peak_i) of every key; disjoint terms add up."""
    peak = peak.double().expand(*request.batch, request.n_query)
    found = (_received(r, peak, weight, shared) for r in split_request(request) or (request,))
    total = added(None if sums is None else {"sums": sums} for sums in found)
    return None if total is None else total["sums"]


def _received(
    r: Request,
    peak: Tensor,  # (*b, Q) float64, as the pass gave it
    weight: Tensor,  # (*b, Q), accumulation dtype
    shared: bool,  # the entries of the last batch dimension add up
) -> Tensor | None:  # (*b, K)
    """The sums over one term; None where one is not finite."""
    call = Call.of(r, valued=False, aimed=False)
    rows = call.geometry.rows
    peak, weight = block(peak, "peak", rows, torch.float64), block(weight, "weight", rows, r.scale.dtype)
    slots = (*rows[:-2], 1) if shared else rows[:-1]
    sums = torch.empty((*slots, r.n_key), dtype=r.scale.dtype, device=CPU)
    if not math.prod(rows) or not r.n_key:
        return sums.zero_()
    steps = torch.empty(slots, dtype=torch.float32, device="meta").stride()
    packed = library.COLUMNS.pack(*at(peak, weight, offsets(rows[:-1], slots, steps)), math.prod(slots), *at(sums))
    return sums if library.run("received", call.problem, packed) else None


def top(r: Request, k: int) -> tuple[Tensor, Tensor] | None:  # (*b, Q, k) each
    """Falling scores and their keys, -inf and -1 past the visible ones; None: no kernel, or not all are finite."""
    if k > _MOST_BEST or too_large(replace(r, rank=True)):  # as for ranks: parts do not add up
        return None
    call = Call.of(r, valued=False, aimed=False)
    shape = (*call.geometry.rows, k)
    score = torch.empty(shape, dtype=r.scale.dtype, device=CPU)
    index = torch.empty(shape, dtype=torch.int64, device=CPU)
    if not math.prod(shape) or not r.n_key:
        return score.fill_(-math.inf), index.fill_(-1)
    fine = library.run("top", call.problem, library.TOP.pack(k, *at(score, index)))
    return (score, index) if fine else None


def gaps(
    r: Request,
    edges: Tensor,  # (E), not negative, in any order
) -> Tensor | None:  # (*b, Q, E) int64
    """How many keys score within each edge of their row's largest score; None as for `top`."""
    if too_large(replace(r, rank=True)):  # parts have largest scores of their own
        return None
    call = Call.of(r, valued=False, aimed=False)
    count = torch.zeros((*call.geometry.rows, len(edges)), dtype=torch.int64, device=CPU)
    if not math.prod(count.shape) or not r.n_key:
        return count
    rising, order = edges.to(r.scale.dtype).sort()
    if not library.run("gaps", call.problem, library.GAPS.pack(len(edges), *at(rising, count))):
        return None
    return count[..., order.argsort()]
