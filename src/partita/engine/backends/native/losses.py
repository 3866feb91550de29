"""Whole losses on the native library: a classifier's cross entropy in three products, a symmetric contrast in four.

    loss_i = nll_i (log Z_i - s_i,target) + square_i log^2 Z_i + spread_i H_i   s = scale_i <input_i, weight_c> + bias_c

Where the weights of the rows are known beforehand (a scalar loss), a chunk of logits is turned into its own gradient
before the next one is made: nothing of size N * C is held, and no logit is computed twice.
Legend: N rows, C classes, D features. Nothing here is differentiable.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from partita.engine.backends.native import reduce as native
from partita.engine.backends.native.workspace import room

_ROWS = struct.Struct("3q4i12q")
_LOGITS = struct.Struct("5q2i3q")
_CHUNK_BYTES = 56 << 20  # of logits at a time: larger is faster, but with the gradients it is the memory of the loss


class RowSums(NamedTuple):
    """Softmax sums of each row, relative to its peak."""

    peak: Tensor  # (N,)
    mass: Tensor  # (N,)
    first: Tensor  # (N,)
    second: Tensor  # (N,)
    target_score: Tensor  # (N,), -inf where the target is out of range
    rank: Tensor | None  # (N,) int64


class LossGradients(NamedTuple):
    """Gradients of sum_i loss_i; None where not needed."""

    input: Tensor | None  # (N, D)
    weight: Tensor | None  # (C, D)
    bias: Tensor | None  # (C,)
    scale: Tensor | None  # (N,)


def softmax_rows(
    logits: Tensor,  # (n, C), float32 or float64; overwritten
    bias: Tensor | None,  # (C,)
    target: Tensor,  # (n,) int64; out of range where there is none
    sums: RowSums,  # (n,) each, overwritten
    nll: Tensor | None,  # (n,) weights, like the next two
    square: Tensor | None,
    spread: Tensor | None,
    *,
    gradient: bool,
) -> bool:
    """Fill `sums`, and put the gradient of sum_i loss_i in place of the logits; False where a sum is not finite."""
    n, C = logits.shape
    acc = logits.dtype
    if acc not in (torch.float32, torch.float64):
        raise TypeError(f"logits must be float32 or float64; got {acc}")
    for name, x, dtype, shape in (
        ("logits", logits, acc, (n, C)),
        ("bias", bias, acc, (C,)),
        ("target", target, torch.int64, (n,)),
        ("nll", nll, acc, (n,)),
        ("square", square, acc, (n,)),
        ("spread", spread, acc, (n,)),
        ("rank", sums.rank, torch.int64, (n,)),
        *((name, getattr(sums, name), acc, (n,)) for name in ("peak", "mass", "first", "second", "target_score")),
    ):
        if x is None:
            continue
        lies = x.is_contiguous() or (x is logits and _rows_apart(x))
        if x.dtype != dtype or tuple(x.shape) != shape or x.device.type != "cpu" or not lies:
            raise ValueError(f"{name} must be contiguous {dtype} {shape} on the CPU; got {x.dtype} {tuple(x.shape)}")
    if n == 0:
        return True
    library = native.load()
    if library is None:
        raise RuntimeError(f"no native backend: {native.why_not()}")

    def at(x: Tensor | None) -> int:
        return 0 if x is None else x.data_ptr()

    packed = _ROWS.pack(
        n, C, logits.stride(0), 0 if acc == torch.float32 else 1, torch.get_num_threads(), gradient, 0,
        at(logits), at(bias), at(target), at(nll), at(square), at(spread),
        at(sums.peak), at(sums.mass), at(sums.first), at(sums.second), at(sums.target_score), at(sums.rank),
    )  # fmt: skip
    return bool(library.handle.partita_rows(packed) == 0)


def _rows_apart(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _score(input: Tensor, weight: Tensor, logits: Tensor) -> None:  # (n, D), (C, D), (n, C)
    """logits = input @ weight.T, in place."""
    n, C, D, acc = *logits.shape, input.shape[1], logits.dtype
    library = native.load()
    if library is None or not n or not C or not D or weight.stride(1) != 1:
        torch.mm(input, weight.t(), out=logits)
        return
    for name, x, shape in (("input", input, (n, D)), ("weight", weight, (C, D)), ("logits", logits, (n, C))):
        lies = x is weight or x.is_contiguous() or (x is logits and _rows_apart(x))
        if x.dtype != acc or tuple(x.shape) != shape or x.device.type != "cpu" or not lies:
            raise ValueError(f"{name} must be contiguous {acc} {shape} on the CPU; got {x.dtype} {tuple(x.shape)}")
    at = (x.data_ptr() for x in (input, weight, logits))
    lies_as = (weight.stride(0), logits.stride(0), 0 if acc == torch.float32 else 1, torch.get_num_threads())
    if library.handle.partita_logits(_LOGITS.pack(n, C, D, *lies_as, *at)):
        raise MemoryError("the native backend could not allocate its scratch memory")


def linear_cross_entropy(
    input: Tensor,  # (N, D), float32 or float64
    weight: Tensor,  # (C, D)
    bias: Tensor | None,  # (C,)
    target: Tensor,  # (N,) int64; out of range where there is none
    scale: Tensor,  # (N or 1,)
    nll: Tensor | None,  # (N,) weights of the loss, like the next two; None is 0
    square: Tensor | None,
    spread: Tensor | None,
    *,
    needs: tuple[bool, bool, bool, bool],  # input, weight, bias, scale
    rank: bool = False,
    chunk_bytes: int = _CHUNK_BYTES,
) -> tuple[RowSums, LossGradients] | None:
    """Sums of every row and the gradients of the weighted loss; None where a sum is not finite."""
    N, D = input.shape
    C = weight.shape[0]
    acc = input.dtype
    if weight.shape[1] != D or weight.dtype != acc:
        raise ValueError(f"weight must be {acc} (C, {D}); got {weight.dtype}, {tuple(weight.shape)}")
    need_input, need_weight, need_bias, need_scale = needs
    input = input.contiguous()

    def row() -> Tensor:
        return torch.empty(N, dtype=acc, device="cpu")

    sums = RowSums(row(), row(), row(), row(), row(), torch.empty(N, dtype=torch.int64, device="cpu") if rank else None)
    grad_input = torch.empty(N, D, dtype=acc, device="cpu") if need_input or need_scale else None
    grad_weight = torch.empty(C, D, dtype=acc, device="cpu") if need_weight else None
    grad_bias = torch.zeros(C, dtype=acc, device="cpu") if need_bias and bias is not None else None
    grad_scale = row() if need_scale else None
    by_row = scale.expand(N)[:, None]
    plain = scale.numel() == 1 and float(scale) == 1.0
    chunks = max(1, -(-N * C * input.element_size() // chunk_bytes))
    with room(-(-N // chunks), C, acc) as matrix:
        for k in range(chunks):
            a, b = N * k // chunks, N * (k + 1) // chunks
            logits, scaled = matrix[: b - a], input[a:b] if plain else input[a:b] * by_row[a:b]
            _score(scaled, weight, logits)
            part = RowSums(*(x[a:b] if x is not None else None for x in sums))  # type: ignore[arg-type]
            weights = (x[a:b] if x is not None else None for x in (nll, square, spread))
            if not softmax_rows(logits, bias, target[a:b], part, *weights, gradient=any(needs)):
                return None
            if grad_input is not None:
                torch.mm(logits, weight, out=grad_input[a:b])
            if grad_weight is not None:
                torch.mm(logits.t(), scaled, out=grad_weight) if k == 0 else grad_weight.addmm_(logits.t(), scaled)
            if grad_bias is not None:
                grad_bias += logits.sum(0)
    if grad_scale is not None and grad_input is not None:
        torch.sum(grad_input * input, 1, out=grad_scale)
    if grad_input is not None and not plain:
        grad_input *= by_row
    return sums, LossGradients(grad_input if need_input else None, grad_weight, grad_bias, grad_scale)


def reduce_both(
    query: Tensor,  # (N, D)
    key: Tensor,  # (M, D)
    scale: Tensor,  # (N or 1,), accumulation dtype
    target: Tensor | None,  # (N,) int64
) -> tuple[native.Sums, native.ColumnSums] | None:
    """Sums of every row over keys and of every key over rows, from one product; None where one is not finite."""
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    n = key.shape[0]
    sums_of = (torch.empty(n, dtype=acc, device="cpu") for _ in range(3))
    columns = native.ColumnSums(torch.empty(n, dtype=torch.float64, device="cpu"), *sums_of)
    if not query.shape[0] or not key.shape[0]:
        columns.peak.fill_(float("-inf"))
        for x in columns[1:]:
            x.zero_()  # type: ignore[union-attr]
        given = None
    else:
        given = columns
    ranked = target is not None
    sums = native.reduce(query, key, None, scale, None, target, (), None, moments=True, rank=ranked, columns=given)
    return None if sums is None else (sums, columns)


def reduce_both_backward(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    target: Tensor | None,
    peak: Tensor,  # (N,), as `reduce_both` gave it
    rows: tuple[Tensor | None, ...],  # upstream of mass, first, second, target_score
    columns: native.ColumnSums,  # the column peaks, and upstream of the column sums
    needs: tuple[bool, bool, bool],  # query, key, scale
) -> native.Gradients | None:
    """Gradients of both kinds of sums in one pass: the scores once more, then one product for each side."""
    g_mass, g_first, g_second, g_target = rows
    wanted = (needs[0], needs[1], False, needs[2], False)
    upstream = (g_mass, g_first, g_second, None, g_target)
    return native.reduce_backward(query, key, None, scale, None, target, (), None, peak, *upstream, wanted, columns)
