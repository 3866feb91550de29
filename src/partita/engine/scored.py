"""Autograd of passes whose score is a function of tiles: its parameters are operands too.

    ScoredPass         the sums of a pass
    ScoredReceived     what each key receives
    ScoredDivergence   between two distributions, either of which may have such a score

First derivatives go tile by tile. For a second one the scores are written out, as they are for whoever traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita.engine import autograd, backends
from partita.engine.divergences import Record
from partita.engine.fused import recomputed
from partita.engine.pairs import parameter_names
from partita.engine.received import columns
from partita.engine.request import Request
from partita.engine.state import divided
from partita.engine.sums import OPERANDS, Upstream
from partita.precision import no_autocast

__all__ = ["ScoredDivergence", "ScoredPass", "ScoredReceived", "own_operands", "with_operands"]

Operands = Sequence["Tensor | None"]


def own_operands(request: Request) -> tuple[Tensor | None, ...]:
    """What such a pass is differentiated by: the usual operands, then the parameters of the score."""
    r = request
    return (r.query, r.key, r.value, r.scale, r.bias, *(() if r.pairs is None else r.pairs.parameters))


def with_operands(request: Request, operands: Operands) -> Request:
    """The same request of other tensors."""
    query, key, value, scale, bias, *own = operands
    assert query is not None
    assert key is not None
    assert scale is not None
    pairs = request.pairs
    if pairs is not None:
        pairs = replace(pairs, parameters=tuple(p for p in own if p is not None))
    return replace(request, query=query, key=key, value=value, scale=scale, bias=bias, pairs=pairs)


def _in_order(total: dict[str, Tensor], operands: Operands) -> list[Tensor | None]:
    """Gradients in the order of the operands, each in its dtype."""
    names = (*OPERANDS, *parameter_names(len(operands) - len(OPERANDS)))
    return [
        total[name].to(t.dtype) if name in total and t is not None else None
        for name, t in zip(names, operands, strict=True)
    ]


class ScoredPass(torch.autograd.Function):
    """All results of a pass."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, again: Callable[..., Any], *operands: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        out = autograd.results(autograd.forward(request))
        ctx.request, ctx.again = replace(request, **_no_tensors(request)), again
        autograd.keep(ctx, operands, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *operands, peak, mass, first, spread, mean = ctx.saved_tensors
        if torch.is_grad_enabled():
            kept = [(i, g) for i, g in enumerate(grads) if g is not None]

            def chosen(*given: Tensor | None) -> tuple[Any, ...]:
                out = ctx.again(*given)
                return tuple(out[i] for i, _ in kept)

            return (None, None, *recomputed(chosen, operands, (), tuple(g for _, g in kept)))
        request = with_operands(ctx.request, operands)
        rows = autograd.raw_upstream(request.level, request.mean, (mass, first, spread, mean), grads)
        if rows is None:
            return (None, None, *(None for _ in operands))
        g_mass, g_first, g_second, moment, target = rows
        assert g_mass is not None
        moment, target = None if request.value is None else moment, None if request.target is None else target
        g = Upstream.over((*request.batch, request.n_query), g_mass, g_first, g_second, moment, target)
        total = autograd.backward(request, peak, g, ctx.needs_input_grad[2:])
        return (None, None, *_in_order(total, operands))


def _no_tensors(request: Request) -> dict[str, Any]:
    """Operands are saved by autograd, which notices what is written to in place; a request must not hold them too."""
    empty = request.query.new_empty(0, 0).detach()
    return {"query": empty, "key": empty, "value": None, "scale": empty, "bias": None}


class ScoredReceived(torch.autograd.Function):
    """What each key receives: sum_j g_j received_j = sum_i weight_i E_i[g], so its gradient is that of a mean value."""

    @staticmethod
    def forward(
        ctx: Any,
        request: Request,
        mean: Callable[..., Tensor],  # (g, weight, *operands) -> sum_i weight_i E_i[g]
        shared: bool,
        peak: Tensor,
        mass: Tensor,
        weight: Tensor,
        *operands: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(weight, *operands)
        ctx.mean = mean
        return columns(request, "", peak, divided(weight, mass), shared)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, *operands = ctx.saved_tensors
        found = recomputed(lambda *given: ctx.mean(g, *given), (weight, *operands), (), (torch.ones_like(g.sum()),))
        return (None, None, None, None, None, *found)


class ScoredDivergence(torch.autograd.Function):
    """The divergence of every row; has a first derivative."""

    @staticmethod
    def forward(ctx: Any, p: Request, q: Request, kind: str, beta: float, cut: int, *operands: Tensor | None) -> Tensor:
        with no_autocast(p.query), torch.no_grad():
            record = backends.choose(p, "", q).divergences.forward(p, q, kind, beta)
        ctx.save_for_backward(*operands, *record)
        ctx.asked = tuple(replace(r, **_no_tensors(r)) for r in (p, q)), kind, beta, cut
        return record.divergence(kind)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (one, other), kind, beta, cut = ctx.asked
        many = len(Record._fields)
        operands, record = ctx.saved_tensors[:-many], Record(*ctx.saved_tensors[-many:])
        p, q = with_operands(one, operands[:cut]), with_operands(other, operands[cut:])
        needs = ctx.needs_input_grad[5:]
        with no_autocast(p.query), torch.no_grad():
            kernels = backends.choose(p, "", q).divergences
            found = kernels.backward(p, q, kind, beta, record, g, (needs[:cut], needs[cut:]))
        grads = [_in_order(total, part) for total, part in zip(found, (operands[:cut], operands[cut:]), strict=True)]
        return (None, None, None, None, None, *grads[0], *grads[1])
