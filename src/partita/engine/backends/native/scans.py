"""What is read off the scores while they go by, on the native library; nothing of Q * K is held.

    column_sums   what each key receives from the rows
    top           the best scores of every row, and their keys
    gaps          keys counted that are near the largest score of their row; the scores go by twice

Legend: Q query rows, K keys, D features. Nothing here is differentiable.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from partita.engine.axes import offsets
from partita.engine.backends.native import layout, library
from partita.engine.backends.native.operands import CPU, Call, pointer, prepare, sound
from partita.engine.backends.native.support import terms
from partita.engine.backends.one_term import too_large
from partita.engine.backends.parts import parts
from partita.engine.backends.tiled import columns
from partita.engine.request import Request

__all__ = ["column_sums", "gaps", "top"]

_LARGEST = 64  # of a row's best that are kept in order while its keys go by


def _prepare(r: Request) -> tuple[Call, bytes, torch.dtype]:
    """What scores are made of: the request without a value and a target."""
    return prepare(r.query, r.key, None, r.scale, r.bias, None, terms(r), r.softcap)


def column_sums(request: Request, peak: Tensor, weight: Tensor, shared: bool) -> Tensor:
    """What every key receives; terms that are apart add up."""
    peak = peak.double().expand(*request.batch, request.n_query)
    total: Tensor | None = None
    for r in (parts(request) if len(request.terms) > 1 else None) or (request,):
        found = _received(r, peak, weight, shared)
        if found is None:
            return columns.column_sums(request, peak, weight, shared)
        total = found if total is None else total + found
    assert total is not None
    return total


def _received(
    r: Request,
    peak: Tensor,  # (*b, Q) float64, as `reduce` gave it
    weight: Tensor,  # (*b, Q), accumulation dtype
    shared: bool,  # the entries of the last batch dimension add up
) -> Tensor | None:  # (*b, K)
    """sum_i weight_i exp(s_ij - peak_i) of every key; None where one is not finite."""
    call, problem, acc = _prepare(r)
    rows = (*call.batch, call.n_query)
    for name, x, dtype in (("peak", peak, torch.float64), ("weight", weight, acc)):
        if x.dtype != dtype or tuple(x.shape) != rows or x.device.type != "cpu":
            raise ValueError(f"{name} must be {dtype} {rows} on the CPU; got {x.dtype}, {tuple(x.shape)}, {x.device}")
    peak, weight = sound(peak, "peak").contiguous(), sound(weight, "weight").contiguous()
    slots = (*call.batch[:-1], 1) if shared else call.batch
    sums = torch.empty((*slots, call.n_key), dtype=acc, device=CPU)
    if not math.prod(rows) or not call.n_key:
        return sums.zero_()
    steps = torch.empty(slots, dtype=torch.float32, device="meta").stride()
    slot = offsets(call.batch, slots, steps)
    packed = layout.COLUMNS.pack(*map(pointer, (peak, weight, slot)), math.prod(slots), pointer(sums))
    return sums if library.run("received", problem, packed) else None


def top(r: Request, k: int) -> tuple[Tensor, Tensor] | None:  # (*b, Q, k) each
    """Falling scores and their keys, -inf and -1 past the visible ones; None: no kernel, or not all are finite."""
    if k > _LARGEST or too_large(replace(r, rank=True)):  # as where ranks are asked: parts do not add up
        return None
    call, problem, acc = _prepare(r)
    shape = (*call.batch, call.n_query, k)
    score = torch.empty(shape, dtype=acc, device=CPU)
    index = torch.empty(shape, dtype=torch.int64, device=CPU)
    if not math.prod(shape) or not call.n_key:
        return score.fill_(-math.inf), index.fill_(-1)
    fine = library.run("top", problem, layout.TOP.pack(k, pointer(score), pointer(index)))
    return (score, index) if fine else None


def gaps(
    r: Request,
    edges: Tensor,  # (E), accumulation dtype, not negative, in any order
) -> Tensor | None:  # (*b, Q, E) int64
    """How many keys score within each edge of their row's largest score; None as for `top`."""
    if too_large(replace(r, rank=True)):  # parts have largest scores of their own
        return None
    call, problem, acc = _prepare(r)
    count = torch.zeros((*call.batch, call.n_query, len(edges)), dtype=torch.int64, device=CPU)
    if not math.prod(count.shape) or not call.n_key:
        return count
    rising, order = edges.to(acc).sort()
    if not library.run("gaps", problem, layout.GAPS.pack(len(edges), pointer(rising), pointer(count))):
        return None
    return count[..., order.argsort()]
