"""Operands of a call: checked, and laid out as the library reads them.

Everything but the addresses depends on shapes, strides and dtypes alone: `Geometry` is the packed problem with
addresses of 0, checked and kept for the geometries seen last. Every call checks what no shape tells: the memory.
Of values the library needs none checked: bounds are cut to the keys there are, a target out of range is no key.

Legend: Q query rows, K keys, D features, V value features.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from partita._checks import broadcast, expands
from partita.engine.axes import offsets
from partita.engine.backends.disjoint import one_term
from partita.engine.backends.native import library
from partita.engine.request import Request
from partita.engine.terms import Term
from partita.exactness import in_exact_rows

__all__ = ["CODES", "CPU", "NAMES", "Call", "Geometry", "at", "block", "check_memory", "extent", "geometry_of"]

CPU = torch.device("cpu")  # named where a tensor is made from nothing: a default device is not followed
CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_LARGEST = 2**31 - 1  # row intervals and segment ids are int32
_KEPT = 4096  # batch entries of a geometry that is kept: its tables hold some 200 kB
NAMES = (
    "query", "key", "value", "scale", "bias", "target", "start", "stop", "query_segment", "key_segment", "mask",
    "skip",
)  # fmt: skip
_SEES_ALL = Term()
_write_address = struct.Struct("q").pack_into

# shape, strides and dtype of an operand
Known = Optional[tuple[Sequence[int], Sequence[int], torch.dtype]]  # noqa: UP045  (an alias, read at run time)


# ---- memory ---------------------------------------------------------------------------------------------------------


def at(*tensors: Tensor | None) -> list[int]:
    """Addresses of tensors whose memory was checked, or made here; 0 for None."""
    found = [0] * len(tensors)
    for i, t in enumerate(tensors):  # a loop: a comprehension is one more frame of every call
        if t is not None:
            found[i] = t.data_ptr()
    return found


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one reached, both included; 0 of an empty tensor."""
    return 0 if 0 in shape else 1 + sum([(n - 1) * step for n, step in zip(shape, strides, strict=True)])


def check_memory(tensor: Tensor, name: str, reach: int | None = None) -> Tensor:
    """The same numbers, safe to read by address: on the CPU, strided, bits of views resolved, all of it in memory.

    A storage may be smaller than its tensor: FSDP and others free it (`untyped_storage().resize_(0)`) in between.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(f"the native backend takes strided CPU tensors; {name} is {tensor.layout} on {tensor.device}")
    if tensor.is_neg():  # none is complex, but it may be the imaginary part of a conjugate
        tensor, reach = tensor.resolve_neg(), None
    if reach is None:
        reach = tensor.numel() if tensor.is_contiguous() else extent(tensor.shape, tensor.stride())
    if reach and (tensor.storage_offset() + reach) * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise RuntimeError(
            f"{name} {tuple(tensor.shape)} reaches past the end of its storage, which holds "
            f"{tensor.untyped_storage().nbytes()} bytes: the storage was freed or shrunk. Gather the parameter, or "
            f"resize the storage back, before the call."
        )
    return tensor


def block(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An operand that is read as one contiguous block; a copy where it is not one."""
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"{name} must be {dtype} {shape}; got {tensor.dtype} {tuple(tensor.shape)}")
    return check_memory(tensor, name).contiguous()


# ---- the problem ----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """An operand of a geometry: which it is, where its address goes, and how far it reaches."""

    which: int
    at: int  # the byte of the packed problem
    reach: int  # elements
    copied: bool  # its last dimension is not contiguous
    name: str


class Geometry(NamedTuple):
    """What calls on operands of the same shapes, strides and dtypes share."""

    problem: bytes  # with every address 0
    places: tuple[Place, ...]
    rows: tuple[int, ...]  # (*b, Q)
    shared: tuple[int, ...]  # batch dimensions of key and value, whose gradients are summed over the others
    group: int  # address of a table: which of those an entry of the batch uses
    as_query: bool  # the moment is laid out in memory as the query is
    moment: int  # address of a table: where its entries begin
    moment_row: int
    tables: tuple[Tensor, ...]  # whose addresses are here and in the problem


class Call(NamedTuple):
    """One call's packed problem, and what must stay alive until it returns."""

    problem: bytes
    geometry: Geometry
    alive: list[Tensor]

    @staticmethod
    def of(r: Request, *, valued: bool = True, aimed: bool = True) -> Call:
        """The operands of a request, checked; `valued`, `aimed`: with its value and its target."""
        given = _operands(r, valued, aimed)
        known = tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in given])
        as_query = r.as_query and r.query.dtype == r.scale.dtype
        geometry = geometry_of(known, r.softcap or 0.0, as_query, torch.get_num_threads(), in_exact_rows())
        problem, alive = bytearray(geometry.problem), []
        for which, place, reach, copied, name in geometry.places:
            tensor: Tensor = given[which]  # type: ignore[assignment]
            tensor = check_memory(tensor.contiguous() if copied else tensor, name, reach)
            _write_address(problem, place, tensor.data_ptr())
            alive.append(tensor)
        return Call(bytes(problem), geometry, alive)


def _operands(r: Request, valued: bool, aimed: bool) -> tuple[Tensor | None, ...]:
    """The tensors of a request in the order of `NAMES`; a union is written out, large ids are relabelled."""
    term = one_term(r) if len(r.terms) > 1 else r.terms[0] if r.terms else None
    start, stop, query, key, mask, skip = _SEES_ALL if term is None else term
    if query is None or key is None:
        query = key = None
    else:
        if not (_small(query) and _small(key)):
            labels = torch.unique(torch.cat([query.reshape(-1), key.reshape(-1)]))
            query, key = torch.searchsorted(labels, query), torch.searchsorted(labels, key)
        query, key = query.to(torch.int32), key.to(torch.int32)
    if start is not None and start.dtype == torch.int64:  # cut to the keys there are, not wrapped
        start = start.clamp(0, r.n_key).to(torch.int32)
    if stop is not None and stop.dtype == torch.int64:
        stop = stop.clamp(0, r.n_key).to(torch.int32)
    value, target = (r.value if valued else None), (r.target if aimed else None)
    return (r.query, r.key, value, r.scale, r.bias, target, start, stop, query, key, mask, skip)


def _small(ids: Tensor) -> bool:
    limit = torch.iinfo(torch.int32)
    return not ids.numel() or bool(((ids >= limit.min) & (ids <= limit.max)).all())


def geometry_of(known: Sequence[Known], softcap: float, as_query: bool, threads: int, exact: bool) -> Geometry:
    """The packed problem of operands with these shapes, strides and dtypes, or what is wrong with them."""
    lead = known[0][0][:-2]  # type: ignore[index]
    make = _kept_geometry if math.prod(lead) <= _KEPT else _geometry
    return make(known, softcap, as_query, threads, exact)


def _geometry(known: Sequence[Known], softcap: float, as_query: bool, threads: int, exact: bool) -> Geometry:
    (q, query_strides, dtype), (k, _, _), value, bias = known[0], known[1], known[2], known[4]  # type: ignore[misc]
    if dtype not in CODES or (bias is not None and bias[2] not in CODES):
        raise TypeError(f"the native backend serves {', '.join(map(str, CODES))}; got {dtype} and a bias of {bias}")
    (Q, D), K, V = q[-2:], k[-2], 0 if value is None else value[0][-1]
    if max(Q, K) > _LARGEST:
        raise ValueError(f"the native backend serves up to {_LARGEST} rows and keys; got {Q} and {K}")
    acc, index, dims = torch.float64 if dtype == torch.float64 else torch.float32, torch.int32, len(q) - 2
    wanted = (dtype, dtype, dtype, acc, bias and bias[2], torch.int64, index, index, index, index, torch.bool, index)
    tails = ((Q, D), (K, D), (K, V), (Q,), (Q, K), (Q,), (Q,), (Q,), (Q,), (K,), (Q, K), (Q,))
    batch = (1,) * dims
    for name, each, tail, kind in zip(NAMES, known, tails, wanted, strict=True):
        if each is not None:
            own = tuple(each[0][dims:])
            fits = own == tail or (name in ("scale", "bias", "mask") and len(own) == len(tail) and expands(own, tail))
            if each[2] != kind or not fits:
                raise ValueError(f"{name} must be {kind} and end in {tail}; got {each[2]} {tuple(each[0])}")
            batch = broadcast(batch, each[0][:dims])
    places: list[Place] = []
    tables: list[Tensor] = []
    numbers: list[int] = []
    for which, (name, each, tail) in enumerate(zip(NAMES, known, tails, strict=True)):
        if each is None:
            numbers += [0, 0, 0, 0]
            continue
        shape, strides, _ = each
        # the last dimension of a matrix, and of keys' ids, is read as contiguous
        copied = (len(tail) == 2 or name == "key_segment") and shape[-1] > 1 and strides[-1] != 1
        strides = _strides(shape) if copied else strides
        row, col = (0 if shape[dims] == 1 or name == "key_segment" else strides[dims]), 1
        if len(tail) == 2 and shape[-1] == 1 != tail[-1]:
            col = 0
        tables.append(offsets(batch, tuple(shape[:dims]), tuple(strides[:dims])))
        numbers += [0, tables[-1].data_ptr(), row, col]
        places.append(Place(which, library.PROBLEM.offsets[f"{name}.data"], extent(shape, strides), copied, name))
    sizes = (math.prod(batch), Q, K, D, V, CODES[dtype], 0 if bias is None else CODES[bias[2]])
    problem = library.PROBLEM.pack(*sizes, threads, exact, softcap, *numbers)
    shared = tuple(k[:dims]) if value is None else broadcast(k[:dims], value[0][:dims])
    moment, strides = 0, (0, 0)
    if value is not None:
        like, strides = _placed(q, query_strides, (*batch, Q, V)) if as_query else None, _strides((*batch, Q, V))
        as_query, strides = like is not None, like or strides
        tables.append(offsets(batch, batch, strides[:-2]))
        moment = tables[-1].data_ptr()
    tables.append(offsets(batch, shared, _strides(shared)))
    group = tables[-1].data_ptr()
    return Geometry(problem, tuple(places), (*batch, Q), shared, group, as_query, moment, strides[-2], tuple(tables))


_kept_geometry = functools.lru_cache(maxsize=256)(_geometry)


def _placed(query: Sequence[int], strides: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of a result that is laid out as the query is; None where it cannot be."""
    if tuple(query) != shape:
        return None
    like = torch.empty_like(torch.empty_strided(query, strides, device="meta"))
    return like.stride() if like.stride(-1) == 1 else None


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return torch.empty(shape, dtype=torch.uint8, device="meta").stride()
