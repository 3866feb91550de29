"""Whole losses on the native library: a classifier's cross entropy in three products, a symmetric contrast in four.

    sum_i weight_i nll_i       nll_i = log Z_i - s_i,target       s_ij = scale_i <query_i, key_j> + bias_j

Where the weights of the rows are known beforehand (a scalar loss), a chunk of logits is turned into its own gradient
before the next one is made: nothing of size Q * K is held, and no logit is computed twice. Where bfloat16 numbers are
multiplied in pairs, a chunk of their logits is float32, its gradient is rounded to bfloat16 for the products with keys
and queries, and those are summed in float32.
Legend: Q rows, K keys (classes), D features. Nothing here is differentiable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from partita.engine.backends.native import library, passes
from partita.engine.backends.native.call import CODES, at, check_memory
from partita.engine.request import Request
from partita.engine.sums import SumGrads, Sums
from partita.exactness import in_exact_rows

__all__ = ["both_ways", "both_ways_backward", "product", "weighted_nll", "workspace", "write_logits"]

_CHUNK_BYTES = 56 << 20  # of logits at a time: larger is faster, but with the gradients it is the memory of the loss


# ---- memory for a chunk --------------------------------------------------------------------------------------------

KEPT = 64 << 20
_LINE = 64  # bytes of a cache line
_spare: list[Tensor] = []  # empty or one; `pop` and `append` are atomic, so no two calls share it


@contextmanager
def workspace(rows: int, columns: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """An uninitialised (rows, columns) matrix for the time of a call; its rows are an odd number of cache lines long.

    With a power of two as stride, all of a column would fall on the same few cache sets. Memory taken from the system
    each time would be cleared and mapped page by page, 4 % of a cross entropy over a large vocabulary: one of at most
    KEPT bytes stays with the process for the next call.

    >>> with workspace(2, 3, torch.float32) as matrix:
    ...     matrix.shape, matrix.stride()
    (torch.Size([2, 3]), (16, 1))
    """
    line = _LINE // dtype.itemsize
    step = line * ((columns + line - 1) // line | 1)
    size = rows * step * dtype.itemsize
    memory: Tensor | None = None
    with suppress(IndexError):
        memory = _spare.pop()
    if memory is None or memory.numel() < size:
        with torch.inference_mode(False):  # what is made in that mode can be written in no other
            memory = torch.empty(-(-size // _LINE) * _LINE, dtype=torch.uint8, device="cpu")
    try:
        yield memory.view(dtype).as_strided((rows, columns), (step, 1))
    finally:
        if not _spare and memory.numel() <= KEPT:
            _spare.append(memory)


# ---- a classifier --------------------------------------------------------------------------------------------------


def write_logits(query: Tensor, key: Tensor, logits: Tensor) -> None:  # (n, D), (K, D), (n, K)
    """logits = query @ key.T, in place, for operands whose memory was checked."""
    (n, K), D = logits.shape, query.shape[1]
    if not n or not K or not D or key.stride(1) != 1 or not query.is_contiguous():
        torch.mm(query, key.t(), out=logits)
        return
    classifier_product("logits", query, key, logits, D)


def classifier_product(name: str, query: Tensor, key: Tensor, logits: Tensor, dim: int) -> None:
    """One of the three products of a classifier, whose result is in the place of its operand: see native/logits.cpp."""
    n, K = logits.shape
    dtype = query.dtype if name != "input_gradient" else key.dtype
    shape = (n, K, dim, key.stride(0), logits.stride(0), CODES[dtype], torch.get_num_threads())
    library.run(name, library.LOGITS.pack(*shape, *at(query, key, logits)))


def product(query: Tensor, key: Tensor, out: Tensor) -> bool:  # (n, D), (K, D), (n, K) float32 or float64, contiguous
    """out = query @ key.T; False without the library."""
    if library.why_not() is not None:
        return False
    query, key = check_memory(query, "query").contiguous(), check_memory(key, "key").contiguous()
    write_logits(query, key, out)
    return True


def weighted_nll(
    r: Request,
    weight: Tensor,  # of each row, or one for all
    needs: Sequence[bool],
    *,
    chunk_bytes: int = _CHUNK_BYTES,
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """nll of every row of a classifier, and the gradients of their weighted sum, made going forward.

    None where that has no kernel, or where a result is not finite.
    """
    acc, target = r.scale.dtype, r.target
    pairs = r.query.dtype != acc
    by_pair = r.bias is not None and r.bias.shape[-2] != 1
    if target is None or target.dim() != 1 or r.query.dim() != 2 or r.terms or r.softcap is not None or by_pair:
        return None
    plain = r.scale.numel() == 1 and float(r.scale) == 1.0
    if pairs and not (plain and _in_pairs(r) and r.query.numel() and r.n_key and r.key.stride(1) == 1):
        return None
    (n, D), K, new = r.query.shape, r.n_key, r.scale.new_empty
    ours = pairs or in_exact_rows()  # the products, whose bits in torch depend on how many rows there are
    need_query, need_key, _, need_scale, need_bias = needs
    query, key = check_memory(r.query, "query").contiguous(), check_memory(r.key, "key")
    key = key.contiguous() if ours and key.stride(1) != 1 else key
    bias = None if r.bias is None else check_memory(r.bias, "bias")[0].to(acc).expand(K).contiguous()
    target = check_memory(target, "target").contiguous()
    weight = check_memory(weight, "weight").to(acc).expand(n).contiguous()
    sums = new(n), new(n), new(n)
    grad_query = new((n, D)) if need_query or need_scale else None
    grad_key = (new((K, D)).zero_() if ours else new((K, D))) if need_key else None
    grad_bias = new(K).zero_() if need_bias and bias is not None else None
    by_row = None if plain else r.scale.expand(n)[:, None]
    chunks = max(1, -(-n * K * acc.itemsize // chunk_bytes))
    with workspace(-(-n // chunks), K, acc) as matrix:
        for k in range(chunks):
            cut = slice(n * k // chunks, n * (k + 1) // chunks)
            given: tuple[Tensor, ...] = (query, target, weight, *sums)
            logits = matrix
            if chunks > 1:
                given, logits = tuple([t[cut] for t in given]), matrix[: cut.stop - cut.start]
            x = given[0] if by_row is None else given[0] * by_row[cut]
            write_logits(x, key, logits)
            shape = (len(x), K, logits.stride(0), CODES[acc], torch.get_num_threads(), any(needs) and 1 + pairs, 0)
            packed = library.SOFTMAX_ROWS.pack(*shape, *at(logits, bias, *given[1:]))
            # the sums are filled, and the gradient of the weighted sum takes the place of the logits
            if len(x) and not library.run("softmax_rows", packed):
                return None
            if ours and x.numel() and K:
                if grad_query is not None:
                    classifier_product("input_gradient", grad_query[cut], key, logits, D)
                if grad_key is not None:
                    classifier_product("weight_gradient", x, grad_key, logits, D)
                if grad_bias is not None:
                    grad_bias += (logits.view(r.query.dtype)[:, :K] if pairs else logits).sum(0, dtype=acc)
                continue
            if grad_query is not None:
                torch.mm(logits, key, out=grad_query if chunks == 1 else grad_query[cut])
            if grad_key is not None:
                torch.mm(logits.t(), x, out=grad_key) if k == 0 else grad_key.addmm_(logits.t(), x)
            if grad_bias is not None:
                grad_bias += logits.sum(0)
    grads: dict[str, Tensor] = {}
    if need_scale and grad_query is not None:
        grads["scale"] = torch.sum(grad_query * query, 1).sum_to_size(r.scale.shape)
    if need_query and grad_query is not None:
        grads["query"] = (grad_query if by_row is None else grad_query.mul_(by_row)).to(r.query.dtype)
    if grad_key is not None:
        grads["key"] = grad_key.to(r.key.dtype)
    if grad_bias is not None and r.bias is not None:
        grads["bias"] = grad_bias[None].sum_to_size(r.bias.shape).to(r.bias.dtype)
    peak, mass, score = sums
    return mass.log().add_(peak.sub_(score)), grads


def _in_pairs(r: Request) -> bool:
    """Whether operands are bfloat16 numbers, and the processor multiplies those in pairs."""
    found = library.load()
    return r.query.dtype == torch.bfloat16 and found is not None and found.pairs


# ---- a symmetric contrast ------------------------------------------------------------------------------------------


def both_ways(r: Request) -> tuple[Sums, Sums] | None:
    """Sums of every row over keys and of every key over rows, from one product, and the scores of the diagonal."""
    if (r.query.dtype != r.scale.dtype and not _in_pairs(r)) or r.query.dim() != 2:
        return None
    some = r.n_query > 0 and r.n_key > 0
    peak, mass = r.scale.new_empty(r.n_key, dtype=torch.float64), r.scale.new_empty(r.n_key)
    if not some:
        peak.fill_(float("-inf"))
        mass.zero_()
    rows = passes.forward(replace(r, statistics=False), passes.ColumnSums(peak, mass) if some else None)
    return None if rows is None else (rows, Sums(peak, mass, rows.count, target_score=rows.target_score))


def both_ways_backward(
    r: Request, sums: Sequence[Tensor], g: Sequence[Tensor], needs: Sequence[bool]
) -> dict[str, Tensor] | None:
    """Gradients of both nlls: the scores once more, then one product for each side."""
    peak, mass, column_peak, column_mass = sums
    down, across = g
    upstream = passes.ColumnSums(column_peak, across / column_mass)
    return passes.backward(r, peak, SumGrads(down / mass, None, None, None, -(down + across)), needs, upstream)
