"""Whole losses on the native library: a classifier's cross entropy in three products, a symmetric contrast in four.

    sum_i weight_i nll_i       nll_i = log Z_i - s_i,target       s_ij = scale_i <query_i, key_j> + bias_j

Where the weights of the rows are known beforehand (a scalar loss), a chunk of logits is turned into its own gradient
before the next one is made: nothing of size Q * K is held, and no logit is computed twice.
Legend: Q rows, K keys (classes), D features. Nothing here is differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.engine.backends.native import layout, library
from partita.engine.backends.native.operands import CODES, CPU, address, pointer, sound
from partita.engine.backends.native.reduce import ColumnSums, Gradients, reduce, reduce_backward
from partita.engine.backends.native.workspace import workspace
from partita.engine.sums import Sums

__all__ = ["NllGradients", "NllSums", "both_ways", "both_ways_backward", "weighted_nll"]

_CHUNK_BYTES = 56 << 20  # of logits at a time: larger is faster, but with the gradients it is the memory of the loss


class NllSums(NamedTuple):
    """Softmax sums of each row, relative to its peak."""

    peak: Tensor  # (Q,)
    mass: Tensor  # (Q,)
    target_score: Tensor  # (Q,), -inf where the target is out of range


class NllGradients(NamedTuple):
    """Gradients of sum_i weight_i nll_i; None where not needed."""

    query: Tensor | None  # (Q, D)
    key: Tensor | None  # (K, D)
    bias: Tensor | None  # (K,)
    scale: Tensor | None  # (Q,)


def _fits(name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], *, apart: bool = False) -> None:
    """Contiguous numbers of that dtype and shape on the CPU; `apart`: rows may have space between them."""
    if x is None:
        return
    lies = x.is_contiguous() or (apart and x.stride(1) == 1 and x.stride(0) >= x.shape[1])
    if x.dtype != dtype or tuple(x.shape) != shape or x.device.type != "cpu" or not lies:
        raise ValueError(f"{name} must be contiguous {dtype} {shape} on the CPU; got {x.dtype} {tuple(x.shape)}")
    address(x, name)


def softmax_rows(
    logits: Tensor,  # (n, K), float32 or float64; overwritten
    bias: Tensor | None,  # (K,)
    target: Tensor,  # (n,) int64; out of range where there is none
    sums: NllSums,  # (n,) each, overwritten
    weight: Tensor,  # (n,)
    *,
    gradient: bool,
) -> bool:
    """Fill `sums`, and put the gradient of sum_i weight_i nll_i in place of the logits; False: not finite."""
    n, K = logits.shape
    acc = logits.dtype
    if acc not in (torch.float32, torch.float64):
        raise TypeError(f"logits must be float32 or float64; got {acc}")
    _fits("logits", logits, acc, (n, K), apart=True)
    _fits("bias", bias, acc, (K,))
    _fits("target", target, torch.int64, (n,))
    _fits("weight", weight, acc, (n,))
    for name, x in zip(sums._fields, sums, strict=True):
        _fits(name, x, acc, (n,))
    if n == 0:
        return True
    packed = layout.SOFTMAX_ROWS.pack(
        n, K, logits.stride(0), CODES[acc], torch.get_num_threads(), gradient, 0,
        *map(pointer, (logits, bias, target, weight, *sums)),
    )  # fmt: skip
    return library.run("softmax_rows", packed)


def logits_of(query: Tensor, key: Tensor, logits: Tensor) -> None:  # (n, D), (K, D), (n, K)
    """logits = query @ key.T, in place."""
    n, K, D, acc = *logits.shape, query.shape[1], logits.dtype
    if not n or not K or not D or key.stride(1) != 1:
        torch.mm(query, key.t(), out=logits)
        return
    _fits("query", query, acc, (n, D))
    if key.dtype != acc or tuple(key.shape) != (K, D):
        raise ValueError(f"key must be {acc} {(K, D)}; got {key.dtype} {tuple(key.shape)}")
    _fits("logits", logits, acc, (n, K), apart=True)
    lies_as = (key.stride(0), logits.stride(0), CODES[acc], torch.get_num_threads())
    library.run("logits", layout.LOGITS.pack(n, K, D, *lies_as, pointer(query), address(key, "key"), pointer(logits)))


def weighted_nll(
    query: Tensor,  # (Q, D), float32 or float64
    key: Tensor,  # (K, D)
    bias: Tensor | None,  # (K,)
    scale: Tensor,  # (Q or 1,)
    target: Tensor,  # (Q,) int64; out of range where there is none
    weight: Tensor,  # (Q,)
    needs: tuple[bool, bool, bool, bool],  # query, key, bias, scale
    *,
    chunk_bytes: int = _CHUNK_BYTES,
) -> tuple[NllSums, NllGradients] | None:
    """Sums of every row and the gradients of sum_i weight_i nll_i, made going forward; None where one is not finite."""
    n_query, D = query.shape
    K = key.shape[0]
    acc = query.dtype
    if key.shape[1] != D or key.dtype != acc:
        raise ValueError(f"key must be {acc} (K, {D}); got {key.dtype}, {tuple(key.shape)}")
    need_query, need_key, need_bias, need_scale = needs
    query, key = sound(query, "query").contiguous(), sound(key, "key")
    bias = None if bias is None else sound(bias, "bias").contiguous()
    target, weight = sound(target, "target").contiguous(), sound(weight, "weight").contiguous()

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=acc, device=CPU)

    sums = NllSums(empty(n_query), empty(n_query), empty(n_query))
    grad_query = empty(n_query, D) if need_query or need_scale else None
    grad_key = empty(K, D) if need_key else None
    grad_bias = torch.zeros(K, dtype=acc, device=CPU) if need_bias and bias is not None else None
    grad_scale = empty(n_query) if need_scale else None
    by_row = scale.expand(n_query)[:, None]
    plain = scale.numel() == 1 and float(scale) == 1.0
    chunks = max(1, -(-n_query * K * query.element_size() // chunk_bytes))
    with workspace(-(-n_query // chunks), K, acc) as matrix:
        for k in range(chunks):
            a, b = n_query * k // chunks, n_query * (k + 1) // chunks
            logits, scaled = matrix[: b - a], query[a:b] if plain else query[a:b] * by_row[a:b]
            logits_of(scaled, key, logits)
            part = NllSums(*(x[a:b] for x in sums))
            if not softmax_rows(logits, bias, target[a:b], part, weight[a:b], gradient=any(needs)):
                return None
            if grad_query is not None:
                torch.mm(logits, key, out=grad_query[a:b])
            if grad_key is not None:
                torch.mm(logits.t(), scaled, out=grad_key) if k == 0 else grad_key.addmm_(logits.t(), scaled)
            if grad_bias is not None:
                grad_bias += logits.sum(0)
    if grad_scale is not None and grad_query is not None:
        torch.sum(grad_query * query, 1, out=grad_scale)
    if grad_query is not None and not plain:
        grad_query *= by_row
    return sums, NllGradients(grad_query if need_query else None, grad_key, grad_bias, grad_scale)


def both_ways(
    query: Tensor,  # (Q, D)
    key: Tensor,  # (K, D)
    scale: Tensor,  # (Q or 1,), accumulation dtype
    target: Tensor | None,  # (Q,) int64
) -> tuple[Sums, ColumnSums] | None:
    """Sums of every row over keys and of every key over rows, from one product; None where one is not finite."""
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    n = key.shape[0]
    columns = ColumnSums(torch.empty(n, dtype=torch.float64, device=CPU), torch.empty(n, dtype=acc, device=CPU))
    some = query.shape[0] > 0 and n > 0
    if not some:
        columns.peak.fill_(float("-inf"))
        columns.mass.zero_()
    given = columns if some else None
    sums = reduce(query, key, None, scale, None, target, (), None, moments=False, rank=False, columns=given)
    return None if sums is None else (sums, columns)


def both_ways_backward(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    target: Tensor | None,
    peak: Tensor,  # (Q,), as `both_ways` gave it
    rows: tuple[Tensor | None, Tensor | None],  # upstream of the row masses and of the targets' scores
    columns: ColumnSums,  # the column peaks, and upstream of the column masses
    needs: tuple[bool, bool, bool],  # query, key, scale
) -> Gradients | None:
    """Gradients of both kinds of sums in one pass: the scores once more, then one product for each side."""
    g_mass, g_target = rows
    wanted = (needs[0], needs[1], False, needs[2], False)
    upstream = (g_mass, None, None, None, g_target)
    return reduce_backward(query, key, None, scale, None, target, (), None, peak, *upstream, wanted, columns)
