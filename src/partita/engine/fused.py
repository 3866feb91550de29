"""Autograd of the kernels that need fewer products than a pass and its backward.

    WeightedNll   sum_i weight_i nll_i: the weights are known beforehand, gradients are made going forward; 3 products
    BothWaysNll   nll of the diagonal by rows and by columns of one score matrix, both from the same tile; 4 products
    WeightedDivergence   sum_i weight_i of the divergences of two distributions, gradients made going forward

Where a kernel gives up (something is not finite) and for second derivatives `again`, the ordinary pass, is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partita.engine.backends.protocol import Backend, Divergences
from partita.engine.request import Request

__all__ = ["BothWaysNll", "WeightedDivergence", "WeightedNll", "recomputed"]


class WeightedNll(torch.autograd.Function):
    """A scalar whose gradients exist before they are asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        again: Callable[..., Tensor],
        request: Request,
        weight: Tensor,
        *operands: Tensor | None,  # query, key, scale, bias of the request
    ) -> Tensor:
        assert backend.weighted_nll is not None
        need_query, need_key, need_scale, need_bias = ctx.needs_input_grad[4:]
        found = backend.weighted_nll(request, weight, (need_query, need_key, False, need_scale, need_bias))
        ctx.save_for_backward(weight, request.target, *operands)
        ctx.again = again
        ctx.ahead = None
        if found is None:
            return again(*operands, request.target, weight).detach()
        nll, grads = found
        ctx.ahead = [grads.get(name) for name in ("query", "key", "scale", "bias")]
        return (weight * nll).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, target, *operands = ctx.saved_tensors
        if ctx.ahead is not None and not torch.is_grad_enabled():
            # given away, not copied: the gradient of a vocabulary is the largest tensor here. A second backward
            # through a retained graph recomputes.
            ahead, ctx.ahead = ctx.ahead, None
            return (None, None, None, None, *(None if x is None else _times(x, g) for x in ahead))
        return (None, None, None, None, *recomputed(ctx.again, operands, (target, weight), (g,)))


def _times(x: Tensor, g: Tensor) -> Tensor:
    """x * g in place; a scalar loss that is differentiated itself has g = 1, which saves a pass over memory."""
    return x if float(g) == 1.0 else x.mul_(g)


class WeightedDivergence(torch.autograd.Function):
    """A scalar of two distributions whose gradients exist before they are asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Divergences,
        again: Callable[..., Tensor],
        p: Request,
        q: Request,
        kind: str,
        beta: float,
        weight: Tensor,
        *operands: Tensor | None,  # query, key, scale, bias of both
    ) -> Tensor:
        assert kernels.weighted is not None
        need = ctx.needs_input_grad[7:]
        wanted = tuple((a, b, False, c, d) for a, b, c, d in (need[:4], need[4:]))
        found = kernels.weighted(p, q, kind, beta, weight, (wanted[0], wanted[1]))
        ctx.save_for_backward(*operands)
        ctx.again = again
        ctx.ahead = None
        if found is None:
            return again(*operands).detach()
        record, *grads = found
        names = ("query", "key", "scale", "bias")
        ctx.ahead = [side.get(name) for side in grads for name in names]
        return (weight * record.divergence(kind)).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        none = (None,) * 7
        if ctx.ahead is not None and not torch.is_grad_enabled():
            ahead, ctx.ahead = ctx.ahead, None  # given away: a second backward recomputes
            return (*none, *(None if x is None else _times(x, g) for x in ahead))
        return (*none, *recomputed(ctx.again, ctx.saved_tensors, (), (g,)))


class BothWaysNll(torch.autograd.Function):
    """Both kinds of sums from one product; both gradients from one more look at the tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        again: Callable[..., tuple[Tensor, Tensor]],
        request: Request,
        query: Tensor,
        key: Tensor,
        scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert backend.both_ways is not None
        found = backend.both_ways.forward(request)
        ctx.save_for_backward(query, key, scale)
        ctx.backend, ctx.again, ctx.seen = backend, again, None
        if found is None:
            rows, columns = again(query, key, scale)
            return rows.detach(), columns.detach()
        one, other = found
        ctx.seen = request, (one.peak, one.mass, other.peak, other.mass)
        return one.nll(), other.nll()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        found = None
        if ctx.seen is not None and not torch.is_grad_enabled():
            need_query, need_key, need_scale = ctx.needs_input_grad[3:]
            request, sums = ctx.seen
            needs = (need_query, need_key, False, need_scale, False)
            found = ctx.backend.both_ways.backward(request, sums, g, needs)
        if found is None:
            return (None, None, None, *recomputed(ctx.again, ctx.saved_tensors, (), g))
        return (None, None, None, *(found.get(name) for name in ("query", "key", "scale")))


def recomputed(
    function: Callable[..., Any], operands: Any, others: tuple[Tensor, ...], g: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients of the operands through the ordinary pass."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [t if t is None or create else t.detach().requires_grad_(t.requires_grad) for t in operands]
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(function(*leaves, *others), wanted, g, create_graph=create))
    return [next(found) if t is not None and t.requires_grad else None for t in leaves]
