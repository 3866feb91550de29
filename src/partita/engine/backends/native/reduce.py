"""The C++ library behind the native backend, called with checked pointers.

    peak, mass, first, spread, moment, count, target_score, rank  =  reduce(...)
    grad_query, grad_key, grad_value, grad_scale, grad_bias       =  reduce_backward(...)

Legend: B batch entries, Q query rows, K keys, D features, V value features. Operands are canonical: equally many batch
dimensions, of size 1 where they broadcast. Any strides are served as they lie if the last dimension is contiguous.
Nothing here is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partita.engine.axes import offsets
from partita.engine.backends.native import layout, library
from partita.engine.backends.native.operands import CPU, NOTHING, Call, Term, address, pointer, prepare, sound
from partita.engine.sums import Sums

__all__ = ["ColumnSums", "Gradients", "reduce", "reduce_backward"]


class ColumnSums(NamedTuple):
    """Sums over rows for each key, relative to the key's peak; in backward, the upstream gradient after `peak`."""

    peak: Tensor  # (K,) float64
    mass: Tensor  # (K,)


def _checked(columns: ColumnSums | None, call: Call, acc: torch.dtype) -> tuple[Tensor | None, ...]:
    if columns is None:
        return None, None
    if math.prod(call.batch) != 1:
        raise ValueError(f"column sums need a single batch entry; got batch {call.batch}")
    for x, dtype in zip(columns, (torch.float64, acc), strict=True):
        if x.dtype != dtype or tuple(x.shape) != (call.n_key,) or not x.is_contiguous() or not x.is_cpu:
            raise ValueError(f"column sums must be contiguous {dtype} ({call.n_key},); got {x.dtype}, {tuple(x.shape)}")
        address(x, "column sums")
    return tuple(columns)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=CPU)


def _empty_as(query: Tensor, shape: tuple[int, ...], dtype: torch.dtype, as_query: bool) -> Tensor:
    """An empty tensor; where it can, with the query's order of dimensions in memory."""
    if as_query and query.dtype == dtype and tuple(query.shape) == shape:
        like = torch.empty_like(query)
        if like.stride(-1) == 1:
            return like
    return _empty(shape, dtype)


def reduce(
    query: Tensor,  # (*b, Q, D)
    key: Tensor,  # (*b, K, D)
    value: Tensor | None,  # (*b, K, V)
    scale: Tensor,  # (*b, Q or 1), accumulation dtype
    bias: Tensor | None,  # (*b, Q or 1, K or 1)
    target: Tensor | None,  # (*b, Q) int64
    terms: Sequence[Term],
    softcap: float | None,
    *,
    moments: bool,
    rank: bool,
    mean: bool = False,
    as_query: bool = False,
    last: bool = False,
    columns: ColumnSums | None = None,
    extremes: bool = False,
) -> Sums | None:
    """Row sums over the visible keys; None where a result is not finite.

    `mean` divides the moment by the mass, in the same pass; `as_query` lets it lie in memory as the query does; `last`
    says that no backward pass follows, which would need scores with the very same roundings.
    `extremes` adds the smallest score and the keys of both ends.
    With `columns`, the sums of every key over the rows that see it are written there, from the same products.

    A NaN or infinity in a key or value that some row may not see can end up in that row (0 * NaN), so a result that is
    not finite proves nothing: the caller then asks a backend that looks at every key.
    """
    call, problem, acc = prepare(query, key, value, scale, bias, target, terms, softcap)
    rows = (*call.batch, call.n_query)
    peak, mass, count = _empty(rows, torch.float64), _empty(rows, acc), _empty(rows, acc)
    first = _empty(rows, acc) if moments else None
    spread = _empty(rows, acc) if moments else None
    stats = _empty((5, *rows), acc) if moments else None
    moment = None if value is None else _empty_as(query, (*rows, value.shape[-1]), acc, as_query)
    score = _empty(rows, acc) if target is not None else None
    ranks = _empty(rows, torch.int64) if rank and target is not None else None
    table, moment_row = None, 0
    if moment is not None:
        strides = moment.stride()
        table, moment_row = offsets(call.batch, call.batch, strides[:-2]), strides[-2]
    outputs = (peak, mass, first, spread, moment, score, count, ranks, *_checked(columns, call, acc), stats)
    least = _empty(rows, acc) if extremes else None
    places = _empty((2, *rows), torch.int64) if extremes else None
    ends = (None, None, None) if places is None else (least, places[0], places[1])
    packed = layout.SUMS.pack(*map(pointer, outputs), mean, last, pointer(table), moment_row, *map(pointer, ends))
    if not library.run("forward", problem, packed):
        return None
    moment, average = (None, moment) if mean else (moment, None)
    return Sums(peak, mass, count, first, spread, stats, moment, average, score, ranks, least, places)


class Gradients(NamedTuple):
    """Gradients with the shapes of their operands; None where not needed."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    scale: Tensor | None  # accumulation dtype
    bias: Tensor | None  # accumulation dtype


def _broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def _fold(full: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Summed over the batch dimensions in which `like` has size 1."""
    return None if full is None else full.sum_to_size(like.shape).to(dtype)


def reduce_backward(
    query: Tensor,  # (*b, Q, D)
    key: Tensor,  # (*b, K, D)
    value: Tensor | None,  # (*b, K, V)
    scale: Tensor,  # (*b, Q or 1)
    bias: Tensor | None,  # (*b, Q or 1, K or 1)
    target: Tensor | None,  # (*b, Q) int64
    terms: Sequence[Term],
    softcap: float | None,
    peak: Tensor,  # (*b, Q), as `reduce` gave it
    g_mass: Tensor | None,  # (*b, Q), like the next ones
    g_first: Tensor | None,
    g_second: Tensor | None,
    g_moment: Tensor | None,  # (*b, Q, V)
    g_target: Tensor | None,
    needs: tuple[bool, bool, bool, bool, bool],  # query, key, value, scale, bias
    columns: ColumnSums | None = None,  # the peaks `reduce` gave, and upstream gradients of the column sums
) -> Gradients | None:
    """Gradients of the sums of `reduce`, at the same operands; None where a result is not finite, as there."""
    if g_moment is not None and (value is None or columns is not None):
        raise ValueError("g_moment needs a value, and no columns")
    if columns is not None and (g_first is not None or g_second is not None):
        raise ValueError("with columns, only the masses and the target's scores have upstream gradients")
    value_like, value = value, None if g_moment is None else value
    if target is None:
        g_target = None
    call, problem, acc = prepare(query, key, value, scale, bias, target, terms, softcap)
    batch, Q, K, D = call.batch, call.n_query, call.n_key, query.shape[-1]
    V = value.shape[-1] if value is not None else 0
    rows, dims = (*batch, Q), len(batch)
    if value is None and value_like is not None and tuple(peak.shape) != rows:
        # batch entries that only the value has, while nobody differentiates it: copies, whose gradients add up
        peak = peak[tuple(slice(0, n) for n in rows)]
        sums = (None if g is None else g.sum_to_size(rows) for g in (g_mass, g_first, g_second, g_target))
        g_mass, g_first, g_second, g_target = sums

    def given(g: Tensor | None, shape: tuple[int, ...], name: str) -> Tensor | None:
        if g is None:
            return None
        dtype = torch.float64 if name == "peak" else acc
        if g.dtype != dtype or tuple(g.shape) != shape or g.device.type != "cpu":
            raise ValueError(f"{name} must be {dtype} {shape} on the CPU; got {g.dtype}, {tuple(g.shape)}, {g.device}")
        return sound(g, name).contiguous()

    upstream = [
        given(g, rows if g is not g_moment else (*rows, V), name)
        for name, g in (("peak", peak), ("g_mass", g_mass), ("g_first", g_first), ("g_second", g_second),
                        ("g_moment", g_moment), ("g_target", g_target))
    ]  # fmt: skip
    shared = key.shape[:-2] if value is None else _broadcast(key.shape[:-2], value.shape[:-2])
    group = offsets(batch, tuple(shared), _strides(shared))
    need_query, need_key, need_value, need_scale, need_bias = needs
    if not math.prod(rows) or not K:  # nothing to see; and an empty tensor has no address
        zeros = [
            torch.zeros(x.shape, dtype=x.dtype if i < 3 else acc, device=CPU) if need and x is not None else None
            for i, (x, need) in enumerate(zip((query, key, value_like, scale, bias), needs, strict=True))
        ]
        return Gradients(*zeros)
    query_grad = _empty((*rows, D), acc) if need_query else None
    scale_grad = _empty(rows, acc) if need_scale else None
    key_grad = _empty((*shared, K, D), acc) if need_key else None
    value_grad = _empty((*shared, K, V), acc) if need_value and value is not None else None
    by_row = by_col = dense = None
    where = NOTHING
    repeats = False
    if need_bias and bias is not None:
        if bias.shape[-1] == 1:
            by_row = _empty(rows, acc)
        elif bias.shape[-2] == 1:
            by_col = torch.zeros((*batch, K), dtype=acc, device=CPU)
        else:
            dense = torch.zeros(bias.shape, dtype=acc, device=CPU)
            table = offsets(batch, tuple(bias.shape[:dims]), dense.stride()[:dims])
            call.alive.append(table)
            where = dense.data_ptr(), table.data_ptr(), K, 1
            repeats = math.prod(bias.shape[:dims]) < math.prod(batch)
    packed = layout.GRADIENTS.pack(
        pointer(group), math.prod(shared),
        *map(pointer, upstream),
        *map(pointer, (query_grad, scale_grad, key_grad, value_grad, by_row, by_col)),
        *where, repeats,
        *map(pointer, _checked(columns, call, acc)),
    )  # fmt: skip
    if not library.run("backward", problem, packed):
        return None
    if need_value and value is None and value_like is not None:
        value_grad = torch.zeros((), dtype=value_like.dtype, device=CPU).expand(value_like.shape)
    bias_grad = None
    if need_bias and bias is not None:
        full = by_row[..., None] if by_row is not None else by_col[..., None, :] if by_col is not None else dense
        bias_grad = _fold(full, bias, acc)
    return Gradients(
        _fold(query_grad, query, query.dtype),
        _fold(key_grad, key, key.dtype),
        _fold(value_grad, value_like, value_like.dtype) if value_like is not None else None,
        _fold(scale_grad, scale, acc),
        bias_grad,
    )
