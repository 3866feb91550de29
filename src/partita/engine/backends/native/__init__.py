"""Backend: the C++ library, on CPU tensors.

Says which requests it serves, hands over their operands, and gives the tiled backend what came out not finite: a nan in
a masked place may have leaked there (0 * nan), and only the careful backend can tell.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from partita._checks import broadcast
from partita.engine import tiled
from partita.engine.backends.native import library, reduce
from partita.engine.backends.native.losses import both_ways, both_ways_backward, weighted_nll
from partita.engine.backends.native.plain_attention import attention
from partita.engine.request import Request
from partita.engine.state import State, Stats
from partita.engine.terms import Term, window_mask
from partita.engine.tile import Upstream
from partita.engine.tiled import Sums

__all__ = ["attention", "backward", "both_ways", "both_ways_backward", "forward", "weighted_nll", "why_not"]

_LARGEST_MASK = 1 << 25  # bytes; a union of supports up to this size is written out
_OPERANDS = ("query", "key", "value", "scale", "bias")


def why_not(request: Request) -> str | None:
    """None, or why the native library cannot serve this request."""
    if request.query.device.type != "cpu":
        return f"it serves CPU tensors, these are on {request.query.device}"
    if len(request.terms) > 1 and _union_bytes(request) > _LARGEST_MASK:
        return "the support is a large union (|): only the tiled backend serves it without writing the mask out"
    if request.cap_bias and request.softcap is not None and request.bias is not None:
        return "it adds a bias after the softcap, not before"
    return library.why_not()


def _union_bytes(request: Request) -> int:
    """The size of the mask that says what any of the terms shows."""
    rows = [t for term in request.terms for t in (term.start, term.stop, term.query_segment, term.key_segment)]
    shapes = [t.shape[:-1] for t in rows if t is not None]
    shapes += [term.mask.shape[:-2] for term in request.terms if term.mask is not None]
    return math.prod(broadcast(*shapes)) * request.n_query * request.n_key


def _terms(request: Request) -> tuple[Term, ...]:
    """What the library knows: at most one term, with segment ids in int32; large ids are relabelled by their rank."""
    if len(request.terms) > 1:
        whole = slice(0, request.n_query), slice(0, request.n_key)
        shown = window_mask(request.terms, *whole, request.query.device)
        if shown is None:
            return ()
        lead = [1] * (request.query.dim() - shown.dim())
        return (Term(mask=shown.view(*lead, *shown.shape)),)
    terms = []
    for term in request.terms:
        query, key = term.query_segment, term.key_segment
        if query is not None and key is not None:
            if not (_small(query) and _small(key)):
                labels = torch.unique(torch.cat([query.reshape(-1), key.reshape(-1)]))
                query, key = torch.searchsorted(labels, query), torch.searchsorted(labels, key)
            term = replace(term, query_segment=query.to(torch.int32), key_segment=key.to(torch.int32))
        terms.append(term)
    return tuple(terms)


def _small(ids: Tensor) -> bool:
    limit = torch.iinfo(torch.int32)
    return not ids.numel() or (int(ids.min()) >= limit.min and int(ids.max()) <= limit.max)


def forward(request: Request) -> Sums:
    found = reduce.reduce(
        request.query,
        request.key,
        request.value,
        request.scale,
        request.bias,
        request.target,
        _terms(request),
        request.softcap,
        moments=request.statistics,
        rank=request.rank,
        mean=request.mean,
        as_query=request.as_query,
        last=request.last,
    )
    if found is None:
        return tiled.forward(request)
    first = found.mass if found.first is None else found.first
    spread = found.mass if found.spread is None else found.spread
    moment = None if request.mean else found.moment
    state = State(found.peak, found.mass, first, spread, found[5], moment, _stats_of(found))
    return Sums(state, found.target_score, found.rank, found.moment if request.mean else None)


def _stats_of(found: reduce.Sums) -> Stats | None:
    if found.stats is None:
        return None
    log_partition, entropy, mean, variance, top = found.stats.unbind()
    return Stats(log_partition, entropy, mean, variance, top, found[5])


def backward(request: Request, peak: Tensor, g: Upstream, needs: tuple[bool, ...]) -> dict[str, Tensor]:
    query, key, value, scale, bias = needs
    found = reduce.reduce_backward(
        request.query,
        request.key,
        request.value,
        request.scale,
        request.bias,
        request.target,
        _terms(request),
        request.softcap,
        peak,
        g.mass,
        g.first,
        g.second,
        g.moment,
        g.target,
        (query, key, value, scale, bias),
    )
    if found is None:
        return tiled.backward(request, peak, g, needs)
    pairs = zip(_OPERANDS, found, strict=True)
    return {name: grad for name, grad in pairs if grad is not None}
