"""How many keys compete with the best one: the gap-counting function of each row, at a few edges.

    N_i(edge) = #{ j visible : max_k s_ik - s_ij <= edge }

The scores are made twice, once for the largest and once to count, by the same operations in the same order: so the
largest is within 0 of itself whatever was rounded, which the peak of another pass would not promise. No gradient. Where
somebody traces it is one node, `partita::gaps`; the edges' values are then checked when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from partita._checks import check_edges
from partita.engine import autograd, backends
from partita.engine.autograd import OPERANDS_SCHEMA, PLAN_SCHEMA, Plan
from partita.engine.backends import tiled
from partita.engine.request import Request
from partita.errors import DtypeError
from partita.precision import finest

__all__ = ["gaps"]


@torch.no_grad()
def gaps(request: Request, edges: Sequence[float] | Tensor, *, kernels: bool) -> Tensor:  # (*b, Q, E) int64
    """Visible keys within each edge of the row's largest score; 0 on an empty row, and where a visible score is nan."""
    edges = _vector(edges, request.query.device)
    if torch.compiler.is_compiling():
        plan, tensors = Plan.of(request, "")
        found: Tensor = torch.ops.partita.gaps(*tensors[:6], tensors[6:], *plan.options(), edges)
        return found
    return _gaps(request, edges, kernels)


def _vector(edges: Sequence[float] | Tensor, device: torch.device) -> Tensor:
    if isinstance(edges, Tensor):
        made = edges.to(device)
    else:
        try:
            made = torch.tensor(list(edges), dtype=finest(device), device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DtypeError(f"edges must be a sequence of numbers or a 1-D tensor; got {edges!r}.") from error
    check_edges(made)
    return made


def _gaps(request: Request, edges: Tensor, kernels: bool = True) -> Tensor:
    edges = edges.to(request.dtype)
    kernel = backends.choose(request).gaps if kernels else None
    known = None if kernel is None else kernel(request, edges)
    if known is not None:
        return known
    if not len(edges):
        return torch.zeros((*request.batch, request.n_query, 0), dtype=torch.int64, device=request.query.device)
    twice = zip(tiled.score_tiles(request), tiled.score_tiles(request), strict=True)
    return torch.cat([_count(request, rows, first, again, edges) for (rows, first), (_, again) in twice], -2)


def _count(request: Request, rows: slice, first: tiled.Tiles, again: tiled.Tiles, edges: Tensor) -> Tensor:
    shape = (*request.batch, rows.stop - rows.start)
    peak = request.scale.new_full((*shape, 1), -torch.inf)
    for _, s in first:
        peak = torch.maximum(peak, s.amax(-1, keepdim=True))  # nan stays
    count = torch.zeros((*shape, len(edges)), dtype=torch.int64, device=request.query.device)
    for _, s in again:
        gap = torch.where(s == peak, 0.0, peak - s)  # +inf has no distance from itself, and is the largest all the same
        gap = torch.where(s.isneginf(), torch.nan, gap)
        # one edge at a time: all of them would be as many tiles
        count = count + torch.stack([(gap <= edge).sum(-1) for edge in edges], -1)
    return count


library.define("partita::gaps", f"({OPERANDS_SCHEMA}, {PLAN_SCHEMA}, Tensor edges) -> Tensor")


@library.impl("partita::gaps", "CompositeExplicitAutograd")
def _(*arguments: Any) -> Tensor:
    plan, tensors, (edges,) = autograd.read(arguments)
    check_edges(edges)
    return _gaps(plan.request(tensors), edges)


@library.register_fake("partita::gaps")  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> Tensor:
    plan, tensors, (edges,) = autograd.read(arguments)
    r = plan.request(tensors)
    return r.query.new_empty((*r.batch, r.n_query, edges.shape[0]), dtype=torch.int64)
