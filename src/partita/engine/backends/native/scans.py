"""What is read off the scores while they go by, on the native library; nothing of Q * K is held.

    column_sums   attention received per key
    top           the best scores of every row, and their keys
    gaps          keys counted that are near the largest score of their row; the scores go by twice

Legend: Q query rows, K keys. Nothing here is differentiable.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from partita.engine.axes import offsets
from partita.engine.backends.disjoint import split_request, too_large
from partita.engine.backends.native import library
from partita.engine.backends.native.call import CPU, Call, at, block
from partita.engine.request import Request

__all__ = ["column_sums", "gaps", "top"]

_LARGEST = 64  # of a row's best that are kept in order while its keys go by


def column_sums(request: Request, peak: Tensor, weight: Tensor, shared: bool) -> Tensor | None:
    """sum_i weight_i exp(s_ij - peak_i) of every key; disjoint terms add up."""
    peak = peak.double().expand(*request.batch, request.n_query)
    total: Tensor | None = None
    for r in split_request(request) or (request,):
        found = _received(r, peak, weight, shared)
        if found is None:
            return None
        total = found if total is None else total + found
    return total


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
    if k > _LARGEST or too_large(replace(r, rank=True)):  # as for ranks: parts do not add up
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
