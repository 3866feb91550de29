"""Backend: the C++ library, on CPU tensors.

Says which requests it serves, hands over their operands, and gives the tiled backend what came out not finite: a nan in
a masked place may have leaked there (0 * nan), and only the careful backend can tell.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from partita._terms import Term
from partita.engine import native, tiled
from partita.engine.request import Request
from partita.engine.state import State
from partita.engine.tile import Upstream
from partita.engine.tiled import Sums

__all__ = ["backward", "forward", "why_not"]

_OPERANDS = ("query", "key", "value", "scale", "bias")


def why_not(request: Request) -> str | None:
    """None, or why the native library cannot serve this request."""
    if request.query.device.type != "cpu":
        return f"it serves CPU tensors, these are on {request.query.device}"
    if len(request.terms) > 1:
        return "the support is a union (|), which only the tiled backend walks"
    if request.cap_bias and request.softcap is not None and request.bias is not None:
        return "it adds a bias after the softcap, not before"
    return native.why_not()


def _terms(request: Request) -> tuple[Term, ...]:
    return tuple(term if term.query_segment is None else replace(term, **_small_ids(term)) for term in request.terms)


def _small_ids(term: Term) -> dict[str, Tensor]:
    """Segment ids as int32; large ones are relabelled by their rank."""
    query, key = term.query_segment, term.key_segment
    assert query is not None
    assert key is not None
    limit = torch.iinfo(torch.int32)
    for ids in (query, key):
        if ids.numel() and (int(ids.min()) < limit.min or int(ids.max()) > limit.max):
            labels = torch.unique(torch.cat([query.reshape(-1), key.reshape(-1)]))
            query, key = torch.searchsorted(labels, query), torch.searchsorted(labels, key)
            break
    return {"query_segment": query.to(torch.int32), "key_segment": key.to(torch.int32)}


def forward(request: Request) -> Sums:
    found = native.reduce(
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
    )
    if found is None:
        return tiled.forward(request)
    first = spread = found.mass
    if found.first is not None and found.second is not None:
        first, mass = found.first, torch.where(found.mass == 0, 1, found.mass).double()
        spread = (found.second.double() - found.first.double() ** 2 / mass).clamp(min=0.0).to(found.mass.dtype)
    state = State(found.peak, found.mass, first, spread, found[5].to(found.mass.dtype), found.moment)
    return Sums(state, found.target_score, found.rank)


def backward(request: Request, peak: Tensor, g: Upstream, needs: tuple[bool, ...]) -> dict[str, Tensor]:
    query, key, value, scale, bias = needs
    found = native.reduce_backward(
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
