"""Dispatch: detects autograd, functorch and tracers, then calls the fastest path that gives the same result.

execute(request)        the row sums; differentiable
attention(...)          plain attention, without a request of its own where nothing is recorded
weighted_nll(request)   a scalar, its gradients computed in the forward pass where a backend can
both_ways(request)      nll of the diagonal by rows and by columns of one product, where a backend can
row_statistics(...)     those of plain attention that needs no gradient, and the scores of key 0, where a backend can
forward, backward       one pass and its gradients without autograd, for code that brings its own (the ring)
scores                  the scores themselves, all at once

Sums of columns, divergences and scans of the scores have files of their own: received, divergence, scans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita.engine import autograd, backends, small
from partita.engine.autograd import (
    Back,
    Context,
    FastPath,
    backward,
    computed_ahead,
    forward,
    serving_alone,
    traceable,
    traced,
)  # fmt: skip
from partita.engine.backends import tiled
from partita.engine.operators import named
from partita.engine.request import Request, build
from partita.engine.state import Stats
from partita.engine.sums import OPERANDS, Sums
from partita.precision import autocasts
from partita.support import causal as causal_support

__all__ = [
    "attention", "backward", "both_ways", "execute", "forward", "row_statistics", "scores", "ungrouped", "weighted_nll",
]  # fmt: skip

_CAUSAL = causal_support()


def execute(request: Request) -> Sums:
    """One differentiable pass over a request."""
    r = traceable(request)
    tensors = r.tensors()
    context = Context.of(tensors)
    if not context.traced or r.pairs is not None:
        entry = backends.choose(r)
        sums = autograd.reduce(r, entry, tensors) if context.needs_grad else forward(replace(r, last=True), entry)
    else:
        sums = traced(r, named(r), node=not torch.compiler.is_compiling())
    return sums if r.groups == 1 else ungrouped(sums, r)


def ungrouped(sums: Sums, request: Request) -> Sums:
    """The rows of grouped queries with their heads in one dimension again."""
    if request.groups == 1:
        return sums
    flat: dict[str, Any] = {
        name: request.ungroup(x, int(name in ("moment", "mean")))
        for name, x in sums._asdict().items()
        if x is not None and name != "node"
    }
    return sums._replace(**flat)


# ---- kernels of a backend's own -------------------------------------------------------------------------------------


def attention(
    query: Tensor,  # (*b, heads, Q, D)
    key: Tensor,  # (*b, heads or fewer, K, D)
    value: Tensor,  # (*b, as key, K, V)
    scale: float | Callable[[int, int], float | None] | None,  # None: 1/sqrt(D); or what makes it of K and D
    causal: bool,
    grouped: bool,
    statistics: bool,
) -> tuple[Tensor, Stats | None] | None:
    """E[value_j] of each row, in memory as the query is, and the rows' statistics; None for the general path.

    For a short sequence a request and its checks cost as much as the pass. Here only what is usual is looked for;
    anything else goes the general path, which serves it or raises. What autograd records has its request, and no more.
    """
    if torch.compiler.is_compiling() or not (type(query) is type(key) is type(value) is Tensor) or query.dim() < 3:
        return None
    context = Context.of((query, key, value))
    if context.traced or autocasts(query.device.type) or (context.needs_grad and statistics):
        return None
    if key.dim() < 3 or (not grouped and query.shape[-3] != key.shape[-3]):
        return None
    if callable(scale):
        sharp = scale(key.shape[-2], query.shape[-1]) if query.shape[-1] else None
    else:
        sharp = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    if sharp is None:
        return None
    if context.needs_grad:

        def again(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            r = build(query, key, value, scale=sharp, support=_CAUSAL if causal else None, grouped=grouped,
                      statistics=False, mean=True)  # fmt: skip
            mean = autograd.reduce(r, backends.choose(r)).mean
            assert mean is not None
            return r.ungroup(mean, 1).to(value.dtype)

        out = small.attention(query, key, value, sharp, causal, again)
        return again(query, key, value) if out is None else out, None
    for entry in backends.candidates():
        if entry.attention is not None:
            found = entry.attention(query, key, value, sharp, causal, statistics)
            if found is not None:
                return found
    return None


def weighted_nll(request: Request, weight: Tensor) -> Tensor:  # ()
    """sum_i weight_i nll_i of a request with a target."""
    r = request
    flat = r.query.dim() == 2 and not weight.requires_grad
    backend = serving_alone((r.query, r.key, r.scale, r.bias), r) if flat else None
    if backend is None or backend.weighted_nll is None:
        return (weight * execute(r).nll()).sum()
    kernel, bare, tensors = backend.weighted_nll, r.bare(), r.tensors()

    def make(needs: Sequence[bool]) -> tuple[Tensor, Back] | None:
        found = kernel(r, weight, needs[1 : 1 + len(OPERANDS)])
        return None if found is None else computed_ahead((weight * found[0]).sum(), (tensors, found[1]))

    def again(weight: Tensor, *given: Tensor | None) -> Tensor:
        return (weight * execute(bare.over(given)).nll()).sum()

    out: Tensor = FastPath.apply(make, again, weight, *tensors)  # type: ignore[no-untyped-call]
    return out


def both_ways(request: Request) -> tuple[Tensor, Tensor]:  # (n,), (n,)
    """-log p(i|i) of key i among the keys for query i, and of query i among the queries for key i.

    By a kernel that has both from the same tile, 4 products in all, where nothing but the scale is added to them.
    """
    r = request
    operands = (r.query, r.key, r.scale)
    plain = r.query.dim() == 2 and r.query.shape[0] > 0 and r.scale.numel() == 1 and r.bias is None and r.pairs is None
    backend = serving_alone(operands, r) if plain and not r.terms and r.softcap is None else None
    if backend is None or backend.both_ways is None:
        return _diagonal(r)
    kernel, target = backend.both_ways, _own(r.query)
    quiet = replace(r, query=r.query.detach(), key=r.key.detach(), scale=r.scale.detach(), target=target)
    bare = quiet.bare()

    def make(_: Sequence[bool]) -> tuple[tuple[Tensor, Tensor], Back] | None:
        found = kernel.forward(quiet)
        if found is None:
            return None
        one, other = found
        sums = (one.peak, one.mass, other.peak, other.mass)

        def back(given: Any, needs: Sequence[bool], g: Any) -> list[Tensor | None] | None:
            again = bare.over((given[0], given[1], None, given[2], None, target))
            grads = kernel.backward(again, sums, g, (needs[0], needs[1], False, needs[2], False))
            return None if grads is None else [grads.get(name) for name in ("query", "key", "scale")]

        return (one.nll(), other.nll()), back

    def again(query: Tensor, key: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return _diagonal(Request(query, key, None, scale, None, None, (), None))

    rows, columns = FastPath.apply(make, again, *operands)  # type: ignore[no-untyped-call]
    return rows, columns


def _own(rows: Tensor) -> Tensor:  # (*b, n)
    return torch.arange(rows.shape[-2], device=rows.device).expand(rows.shape[:-1])


def _diagonal(r: Request) -> tuple[Tensor, Tensor]:
    """Two ordinary passes."""
    asked = replace(r, target=_own(r.query), statistics=False)
    other = replace(
        asked, query=r.key, key=r.query, bias=None if r.bias is None else r.bias.mT, target=_own(r.key),
        pairs=None if r.pairs is None else r.pairs.exchanged(),
    )  # fmt: skip
    return execute(asked).nll(), execute(other).nll()


def row_statistics(
    query: Tensor,  # (batch, heads, Q, D)
    key: Tensor,  # (batch, heads or a divisor, K, D)
    scale: float,
    causal: bool,
) -> Tensor | None:  # (7, batch, heads, Q)
    """Statistics of plain attention in the order of `Stats`, then the score of key 0; None where a pass is needed."""
    if torch.compiler.is_compiling() or type(query) is not Tensor or type(key) is not Tensor:
        return None
    if any(Context.of((query, key))) or autocasts(query.device.type):
        return None
    for entry in backends.candidates():
        if entry.row_statistics is not None and (found := entry.row_statistics(query, key, scale, causal)) is not None:
            return found
    return None


def scores(request: Request) -> Tensor:  # (*b, Q, K)
    """All scores at once, differentiable: the one dense thing here; parameters of a score get theirs from torch."""
    return tiled.scores_whole(request)
