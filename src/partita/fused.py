"""Reads that a backend can serve in fewer products than one pass and its backward.

    sum_i weight_i nll_i     the weights are known beforehand: gradients are made while going forward, three products
    nll of the diagonal      by rows and by columns of one score matrix: both sums from the same tile, four products

Where the native library cannot serve, and for second derivatives, the ordinary pass does; the numbers are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita import engine
from partita.engine.backends import native
from partita.engine.backends.native import library
from partita.engine.backends.native.reduce import ColumnSums
from partita.gibbs import Gibbs, surprise

__all__ = ["diagonal_nll", "total_nll"]


def _native(*tensors: Tensor | None) -> bool:
    """Whether the library may be called on these directly, for somebody who wants a gradient."""
    given = [t for t in tensors if t is not None]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if engine.current() not in ("auto", "native") or library.load() is None:
        return False
    fits = all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64) for t in given)
    return fits and torch.is_grad_enabled() and any(t.requires_grad for t in given)


def total_nll(gibbs: Gibbs, target: Tensor, weight: Tensor) -> Tensor:  # ()
    """sum_i weight_i * -log p(target_i|i)."""
    ready = gibbs._ready()
    flat = ready.query.dim() == ready.key.dim() == 2 and not ready.terms and ready.softcap is None
    flat = flat and (ready.bias is None or ready.bias.shape[-2] == 1) and not weight.requires_grad
    if flat and target.dim() == 1 and _native(ready.query, ready.key, ready.scale, ready.bias):
        engine.extend(ready, target=target)  # the checks
        bias = None if ready.bias is None else ready.bias[0].to(ready.dtype).expand(ready.n_key)
        operands = (ready.query, ready.key, bias, ready.scale, target, weight.expand(ready.n_query))
        total: Tensor = _Total.apply(*operands)  # type: ignore[no-untyped-call]
        return total
    return (weight * surprise(gibbs._pass(target=target, statistics=False))).sum()


def _total(query: Tensor, key: Tensor, bias: Tensor | None, scale: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    rows = Gibbs(query, key, scale=scale, bias=None if bias is None else bias[None])
    return (weight * surprise(rows._pass(target=target, statistics=False))).sum()


class _Total(torch.autograd.Function):
    """A scalar whose gradients exist before they are asked for; asked to be differentiated again, it recomputes."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, bias: Tensor | None, scale: Tensor, target: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(query, key, bias, scale, target, weight)
        need = ctx.needs_input_grad
        index = target.long().contiguous()
        row_bias = None if bias is None else bias.contiguous()
        needs = (need[0], need[1], need[2], need[3])
        found = native.weighted_nll(query, key, row_bias, scale, index, weight.contiguous(), needs)
        if found is None:  # something is not finite: the careful backend decides what
            ctx.ahead = None
            return _total(query, key, bias, scale, target, weight)
        sums, grads = found
        by_row = None if grads.scale is None else grads.scale.sum_to_size(scale.shape)
        ctx.ahead = (grads.query, grads.key, grads.bias, by_row)
        return (weight * (sums.mass.log() + (sums.peak - sums.target_score))).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ahead is not None and not torch.is_grad_enabled():
            # given away, not copied: the gradient of a vocabulary is the largest tensor here. A second backward
            # through a retained graph recomputes.
            ahead, ctx.ahead = ctx.ahead, None
            return (*(None if x is None else _times(x, g) for x in ahead), None, None)
        return (*_again(_total, ctx.saved_tensors, 4, g), None, None)


def _times(x: Tensor, g: Tensor) -> Tensor:
    """x * g in place; a scalar loss that is differentiated itself has g = 1, which saves a pass over memory."""
    return x if float(g) == 1.0 else x.mul_(g)


def _again(function: Any, tensors: tuple[Tensor | None, ...], n: int, *g: Tensor) -> list[Tensor | None]:
    """Gradients of the first n tensors through the ordinary pass."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [t if t is None or create else t.detach().requires_grad_(t.requires_grad) for t in tensors[:n]]
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(function(*leaves, *tensors[n:]), wanted, g, create_graph=create))
    return [next(found) if t is not None and t.requires_grad else None for t in leaves]


def diagonal_nll(query: Tensor, key: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:  # (n,), (n,)
    """-log p(i|i) of key i among the keys for query i, and of query i among the queries for key i."""
    ready = Gibbs(query, key, scale=scale)._ready()
    plain = ready.query.dim() == 2 and ready.n_query == ready.n_key > 0 and ready.scale.numel() == 1
    if plain and _native(ready.query, ready.key, ready.scale):
        rows, columns = _Diagonal.apply(ready.query, ready.key, ready.scale)  # type: ignore[no-untyped-call]
        return rows, columns
    return _diagonal(query, key, scale)


def _diagonal(query: Tensor, key: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    own = torch.arange(query.shape[-2], device=query.device)
    rows = Gibbs(query, key, scale=scale)._pass(target=own, statistics=False)
    columns = Gibbs(key, query, scale=scale)._pass(target=own, statistics=False)
    return surprise(rows), surprise(columns)


class _Diagonal(torch.autograd.Function):
    """Both kinds of sums from one product; both gradients from one more look at the tiles."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.arange(query.shape[0])
        found = native.both_ways(query, key, scale, own)
        ctx.save_for_backward(query, key, scale)
        if found is None:
            ctx.peaks = None
            return _diagonal(query, key, scale)
        rows, columns = found
        ctx.peaks = (rows.peak, rows.mass, columns.peak, columns.mass)
        score = rows.target_score
        assert score is not None
        return (
            rows.mass.log() + (rows.peak.to(score.dtype) - score),
            columns.mass.log() + (columns.peak.to(score.dtype) - score),
        )

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        query, key, scale = ctx.saved_tensors
        found = None
        if ctx.peaks is not None and not torch.is_grad_enabled():
            peak, mass, column_peak, column_mass = ctx.peaks
            down, across = g
            own = torch.arange(query.shape[0])
            upstream = ColumnSums(column_peak, across / column_mass)
            rows = (down / mass, -(down + across))
            needs = tuple(ctx.needs_input_grad)
            found = native.both_ways_backward(query, key, scale, own, peak, rows, upstream, needs)
        if found is None:
            return tuple(_again(_diagonal, ctx.saved_tensors, 3, *g))
        return found.query, found.key, found.scale
