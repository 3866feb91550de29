"""Backend: the C++ library, on CPU tensors.

Says which requests it serves, hands over their operands, and gives the tiled backend what came out not finite: a nan in
a masked place may have leaked there (0 * nan), and only the careful backend can tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.engine.backends import tiled
from partita.engine.backends.native import library, losses, reduce
from partita.engine.backends.native.divergence import weighted_divergence
from partita.engine.backends.native.plain_attention import attention
from partita.engine.backends.native.scans import column_sums, gaps, top
from partita.engine.backends.native.statistics import accumulate, accumulate_attention
from partita.engine.backends.native.support import terms
from partita.engine.backends.one_term import too_large
from partita.engine.backends.parts import backward_parts, forward_parts, parts
from partita.engine.backends.protocol import Backend, BothWays, Divergences, Gradients, Needs
from partita.engine.backends.tiled import pair
from partita.engine.divergences import Record
from partita.engine.request import Request
from partita.engine.sums import Sums, Upstream
from partita.engine.terms import Term

__all__ = ["BACKEND", "backward", "forward", "why_not"]


def why_not(request: Request) -> str | None:
    """None, or why the native library cannot serve this request."""
    if request.query.device.type != "cpu":
        return f"it serves CPU tensors, these are on {request.query.device}"
    if request.cap_bias and request.softcap is not None and request.bias is not None:
        return "it adds a bias after the softcap, not before"
    return too_large(request) or library.why_not()


def _operands(
    r: Request,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, tuple[Term, ...], float | None]:
    """What both directions hand over, in the library's order."""
    return r.query, r.key, r.value, r.scale, r.bias, r.target, terms(r), r.softcap


def forward(request: Request) -> Sums:
    found = parts(request) if len(request.terms) > 1 else None
    sums = _forward(request) if found is None else forward_parts(request, found, _forward)
    return tiled.forward(request) if sums is None else sums


def _forward(r: Request) -> Sums | None:
    return reduce.reduce(
        *_operands(r),
        moments=r.statistics,
        rank=r.rank,
        mean=r.mean,
        as_query=r.as_query,
        last=r.last,
        extremes=r.extremes,
    )


def backward(request: Request, peak: Tensor, g: Upstream, needs: Sequence[bool]) -> dict[str, Tensor]:
    query, key, value, scale, bias = needs
    upstream, wanted = (g.mass, g.first, g.second, g.moment, g.target), (query, key, value, scale, bias)

    def one(part: Request) -> dict[str, Tensor] | None:
        made = reduce.reduce_backward(*_operands(part), peak, *upstream, wanted)
        return None if made is None else {name: x for name, x in made._asdict().items() if x is not None}

    found = parts(request) if len(request.terms) > 1 else None
    grads = one(request) if found is None else backward_parts(found, one)
    return tiled.backward(request, peak, g, needs) if grads is None else grads


# ---- kernels of its own ---------------------------------------------------------------------------------------------


def weighted_nll(request: Request, weight: Tensor, needs: Sequence[bool]) -> tuple[Tensor, dict[str, Tensor]] | None:
    """nll of every row of a classifier, and the gradients of their weighted sum; None where that has no kernel."""
    r = request
    flat = r.query.dim() == 2 and not r.terms and r.softcap is None and r.target is not None and r.target.dim() == 1
    if (
        not flat
        or r.query.dtype not in (torch.float32, torch.float64)
        or (r.bias is not None and r.bias.shape[-2] != 1)
    ):
        return None
    need_query, need_key, _, need_scale, need_bias = needs
    assert r.target is not None
    bias = None if r.bias is None else r.bias[0].to(r.dtype).expand(r.n_key).contiguous()
    rows = weight.expand(r.n_query).contiguous()
    wanted = (need_query, need_key, need_bias, need_scale)
    found = losses.weighted_nll(r.query, r.key, bias, r.scale, r.target.contiguous(), rows, wanted)
    if found is None:
        return None
    sums, made = found
    grads = {name: grad for name, grad in made._asdict().items() if grad is not None}
    if made.scale is not None:
        grads["scale"] = made.scale.sum_to_size(r.scale.shape)
    if made.bias is not None and r.bias is not None:
        grads["bias"] = made.bias[None].sum_to_size(r.bias.shape).to(r.bias.dtype)
    return sums.mass.log() + (sums.peak - sums.target_score), grads


def both_ways(request: Request) -> tuple[Sums, Sums] | None:
    """Row and column sums of one product, and the scores of the diagonal."""
    if request.query.dtype not in (torch.float32, torch.float64):
        return None
    found = losses.both_ways(request.query, request.key, request.scale, request.target)
    if found is None:
        return None
    rows, columns = found
    return rows, Sums(columns.peak, columns.mass, rows[2], target_score=rows.target_score)


def both_ways_backward(
    request: Request, sums: Sequence[Tensor], g: Sequence[Tensor], needs: Sequence[bool]
) -> dict[str, Tensor] | None:
    """Gradients of both nlls: the scores once more, then one product for each side."""
    peak, mass, column_peak, column_mass = sums
    down, across = g
    upstream = reduce.ColumnSums(column_peak, across / column_mass)
    rows = (down / mass, -(down + across))
    wanted = (needs[0], needs[1], needs[3])
    found = losses.both_ways_backward(
        request.query, request.key, request.scale, request.target, peak, rows, upstream, wanted
    )
    return None if found is None else {name: x for name, x in found._asdict().items() if x is not None}


def divergence(p: Request, q: Request, kind: str, beta: float) -> Record:
    found = weighted_divergence(p, q, kind, beta, None, ((), ()))
    return pair.divergence(p, q, kind, beta) if found is None else found[0]


def divergence_backward(
    p: Request, q: Request, kind: str, beta: float, record: Record, g: Tensor, needs: tuple[Needs, Needs]
) -> tuple[Gradients, Gradients]:
    found = weighted_divergence(p, q, kind, beta, g, needs)
    return pair.divergence_backward(p, q, kind, beta, record, g, needs) if found is None else found[1:]


BACKEND = Backend(
    "native",
    "but another was asked for",
    why_not,
    forward,
    backward,
    attention,
    weighted_nll,
    BothWays(both_ways, both_ways_backward),
    column_sums=column_sums,
    top=top,
    gaps=gaps,
    divergences=Divergences(divergence, divergence_backward, weighted_divergence),
    accumulate=accumulate,
    accumulate_attention=accumulate_attention,
)
