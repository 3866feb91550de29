"""Checked operands of a native call, packed the way the library reads them.

Any strides are served as they lie if the last dimension is contiguous; batch dimensions become a table of offsets that
repeats where an operand broadcasts. Legend: Q query rows, K keys, D features, V value features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from partita.engine.axes import offsets
from partita.engine.backends.native import layout

__all__ = ["CODES", "CPU", "NOTHING", "Call", "Term", "address", "extent", "pointer", "prepare", "sound"]

CPU = torch.device("cpu")  # named wherever a tensor is made: a default device is not ours to follow
CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
NOTHING = (0, 0, 0, 0)
_LARGEST = 2**31 - 1  # row intervals and segment ids are int32


class Term(Protocol):
    """One term of a support: row intervals, segment ids, a mask, and whether key i is hidden from row i."""

    @property
    def start(self) -> Tensor | None: ...  # (*b, Q) int32

    @property
    def stop(self) -> Tensor | None: ...  # (*b, Q) int32

    @property
    def query_segment(self) -> Tensor | None: ...  # (*b, Q) int32

    @property
    def key_segment(self) -> Tensor | None: ...  # (*b, K) int32

    @property
    def mask(self) -> Tensor | None: ...  # (*b, Q or 1, K or 1) bool

    @property
    def hole(self) -> bool: ...


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one reached, both included; 0 of an empty tensor."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def sound(tensor: Tensor, name: str) -> Tensor:
    """The same numbers, safe to read by address: on the CPU, strided, bits of views resolved, all of it in memory.

    A storage may be smaller than a tensor says: FSDP and others free it (`untyped_storage().resize_(0)`) in between.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(f"the native backend takes strided CPU tensors; {name} is {tensor.layout} on {tensor.device}")
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    reached = tensor.numel() if tensor.is_contiguous() else extent(tensor.shape, tensor.stride())
    if reached:
        there = tensor.untyped_storage().nbytes()
        if (tensor.storage_offset() + reached) * tensor.element_size() > there or not tensor.data_ptr():
            raise RuntimeError(
                f"{name} {tuple(tensor.shape)} reaches past the end of its storage, which holds {there} bytes: "
                f"the storage was freed or shrunk. Gather the parameter, or resize the storage back, before the call."
            )
    return tensor


def address(tensor: Tensor | None, name: str) -> int:
    """Where a tensor that was not made here starts, checked; 0 for None."""
    if tensor is None:
        return 0
    if sound(tensor, name) is not tensor:
        raise ValueError(f"{name} is a view with its negative or conjugate bit set; use {name}.resolve_neg()")
    return tensor.data_ptr()


def pointer(tensor: Tensor | None) -> int:
    """Where a tensor made here starts; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


class Call:
    """One call's checked operands, and what must stay alive until it returns."""

    def __init__(self, query: Tensor, others: Sequence[tuple[Tensor | None, int]], n_key: int) -> None:
        self.alive: list[Tensor] = []
        dims = query.dim() - 2
        batch = list(query.shape[:-2])
        for tensor, inner in others:
            if tensor is None:
                continue
            if tensor.dim() - inner != dims:
                raise ValueError(f"every operand needs {dims} batch dimensions; got shape {tuple(tensor.shape)}")
            for i in range(dims):
                size = tensor.shape[i]
                if size != batch[i]:
                    if batch[i] == 1:
                        batch[i] = size
                    elif size != 1:
                        raise ValueError(f"batch dimensions do not broadcast: {tuple(tensor.shape)} against {batch}")
        self.batch = tuple(batch)
        self.n_query, self.n_key = query.shape[-2], n_key

    def operand(
        self, tensor: Tensor | None, inner: tuple[int, ...], dtype: torch.dtype, name: str
    ) -> tuple[int, int, int, int]:
        """Pointer, offset table, row and column stride of an operand whose last dims are `inner` (or 1)."""
        if tensor is None:
            return NOTHING
        dims = len(self.batch)
        shape = tuple(tensor.shape)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}; got {tensor.dtype}")
        if shape[dims:] != inner and not _stretches(shape[dims:], inner, name):
            raise ValueError(f"{name} must end in {inner}; got shape {shape}")
        tensor = sound(tensor, name)
        strides = tensor.stride()
        if (len(inner) == 2 or name == "key_segment") and shape[-1] > 1 and strides[-1] != 1:
            tensor = tensor.contiguous()
            strides = tensor.stride()
        if len(inner) == 2:
            row, col = (0 if shape[-2] == 1 else strides[-2]), (0 if shape[-1] == 1 and inner[-1] != 1 else 1)
        else:
            row, col = (0 if shape[-1] == 1 or name == "key_segment" else strides[-1]), 1
        table = offsets(self.batch, shape[:dims], strides[:dims])
        self.alive += (tensor, table)
        return tensor.data_ptr(), table.data_ptr(), row, col


_FLEXIBLE = frozenset({"scale", "bias", "mask"})


def _stretches(given: tuple[int, ...], wanted: tuple[int, ...], name: str) -> bool:
    return name in _FLEXIBLE and all(s in (1, n) for s, n in zip(given, wanted, strict=True))


def _interval(bound: Tensor | None, n_key: int) -> Tensor | None:
    """A row interval's bound in int32; one given in a wider dtype is cut to the keys there are, not wrapped."""
    if bound is None or bound.dtype == torch.int32 or bound.is_floating_point() or bound.dtype == torch.bool:
        return bound  # what is no integer is refused with the other operands
    return bound.clamp(0, n_key).to(torch.int32)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    terms: Sequence[Term],
    softcap: float | None,
) -> tuple[Call, bytes, torch.dtype]:
    if len(terms) > 1:
        raise ValueError(f"the native backend serves at most one term; got {len(terms)}")
    if query.dtype not in CODES:
        raise TypeError(f"the native backend serves {', '.join(map(str, CODES))}; got {query.dtype}")
    if query.dim() < 2 or key.dim() < 2:
        raise ValueError("query and key need at least two dimensions")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap must be positive and finite; got {softcap}")
    Q, D = query.shape[-2:]
    K = key.shape[-2]
    V = value.shape[-1] if value is not None else 0
    if max(Q, K) > _LARGEST:
        raise ValueError(f"the native backend serves up to {_LARGEST} rows and keys; got {Q} and {K}")
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    term = terms[0] if terms else None
    start, stop, query_segment, key_segment, mask, hole = (
        (_interval(term.start, K), _interval(term.stop, K), term.query_segment, term.key_segment, term.mask, term.hole)
        if term is not None
        else (None, None, None, None, None, False)
    )
    if (query_segment is None) != (key_segment is None):
        raise ValueError("query_segment and key_segment come together")
    if bias is not None and bias.dtype not in CODES:
        raise TypeError(f"bias must be a floating tensor; got {bias.dtype}")
    call = Call(
        query,
        (
            (query, 2), (key, 2), (value, 2), (scale, 1), (bias, 2), (target, 1), (start, 1), (stop, 1),
            (query_segment, 1), (key_segment, 1), (mask, 2),
        ),
        K,
    )  # fmt: skip
    at = call.operand
    problem = layout.PROBLEM.pack(
        math.prod(call.batch), Q, K, D, V,
        CODES[query.dtype], 0 if bias is None else CODES[bias.dtype], torch.get_num_threads(), hole,
        softcap or 0.0,
        *at(query, (Q, D), query.dtype, "query"),
        *at(key, (K, D), query.dtype, "key"),
        *at(value, (K, V), query.dtype, "value"),
        *at(scale, (Q,), acc, "scale"),
        *(NOTHING if bias is None else at(bias, (Q, K), bias.dtype, "bias")),
        *at(target, (Q,), torch.int64, "target"),
        *at(start, (Q,), torch.int32, "start"),
        *at(stop, (Q,), torch.int32, "stop"),
        *at(query_segment, (Q,), torch.int32, "query_segment"),
        *at(key_segment, (K,), torch.int32, "key_segment"),
        *at(mask, (Q, K), torch.bool, "mask"),
    )  # fmt: skip
    return call, problem, acc
