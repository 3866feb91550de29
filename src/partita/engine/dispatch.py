"""Dispatch: detects autograd, functorch and tracers, then calls the fastest path that gives the same result.

Divergences and scans of the scores have files of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita.engine import autograd, backends, small
from partita.engine.autograd import Back, Context, FastPath, backward, forward, traceable
from partita.engine.backends import Backend, tiled
from partita.engine.operators import applied, arguments, define, known_signature, named
from partita.engine.request import Bare, Request, build
from partita.engine.state import Stats, divided
from partita.engine.sums import Sums
from partita.precision import autocasts, no_autocast
from partita.support import causal as causal_support

__all__ = [
    "Received", "attention", "backward", "both_ways", "execute", "forward", "received", "row_statistics", "scores",
    "ungrouped", "weighted_nll",
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
        sums = autograd.traced(r, named(r))
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
    backend = autograd.serving_alone((r.query, r.key, r.scale, r.bias), r) if flat else None
    if backend is None or backend.weighted_nll is None:
        return (weight * execute(r).nll()).sum()
    kernel = functools.partial(backend.weighted_nll, r, weight)
    return autograd.computed_ahead([r], weight, kernel, lambda r: execute(r).nll())


def both_ways(request: Request) -> tuple[Tensor, Tensor]:  # (n,), (n,)
    """-log p(i|i) of key i among the keys for query i, and of query i among the queries for key i.

    By a kernel that has both from the same tile, 4 products in all, where nothing but the scale is added to them.
    """
    r = request
    operands = (r.query, r.key, r.scale)
    plain = r.query.dim() == 2 and r.query.shape[0] > 0 and r.scale.numel() == 1 and r.bias is None and r.pairs is None
    backend = autograd.serving_alone(operands, r) if plain and not r.terms and r.softcap is None else None
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


# ---- attention received per key -------------------------------------------------------------------------------------


def received(request: Request, peak: Tensor, mass: Tensor, weight: Tensor) -> Tensor:  # (*b, K)
    """sum_i weight_i p(j|i), for the peak and mass of the rows that a pass gave; groups of queries add up."""
    r, shared = traceable(request), request.groups > 1
    tensors = r.tensors()
    context = Context.of((*tensors, weight))
    backend: Any = named(r) if context.traced and r.pairs is None else backends.choose(r)
    if not context.needs_grad and not context.traced:
        out = _columns(r, backend, peak, divided(weight, mass), shared)
    else:
        out = applied(Received, (r.bare(), backend, shared, peak, mass, weight), tensors)
    return out.squeeze(-2) if shared else out


def _columns(
    request: Request, backend: Backend | None, peak: Tensor, weight: Tensor, shared: bool
) -> Tensor:  # (*b, K)
    """sum_i weight_i exp(s_ij - peak_i) by a backend, without a graph."""
    entry = backends.choose(request) if backend is None else backend
    with no_autocast(request.query), torch.no_grad():
        found = None if entry.column_sums is None else entry.column_sums(request, peak, weight, shared)
        return tiled.column_sums(request, peak, weight, shared, whole=entry.whole) if found is None else found


def _like_columns(request: Request, _: Backend | None, peak: Tensor, weight: Tensor, shared: bool) -> Tensor:
    batch = (*request.batch[:-1], 1) if shared else request.batch
    return request.scale.new_empty((*batch, request.n_key))


define("received", "Tensor peak, Tensor weight, bool shared", "Tensor", _columns, _like_columns, vmap=True)


class Received(torch.autograd.Function):
    """What each key receives; peak and mass are those of the rows, as a pass gave them.

    It is the transpose of an expectation: sum_j g_j received_j = sum_i weight_i E_i[g]. So its gradient is that of the
    mean value of g, which an ordinary pass gives, and the gradient of a weight is that mean itself.
    """

    generate_vmap_rule = True

    @staticmethod
    @known_signature
    def forward(
        bare: Bare,
        backend: Backend | str,  # its name where the pass is traced
        shared: bool,
        peak: Tensor,
        mass: Tensor,
        weight: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        share, request = divided(weight, mass), bare.over(tensors)
        if not isinstance(backend, str):
            return _columns(request, backend, peak, share, shared)
        out: Tensor = torch.ops.partita.received(*arguments(request, backend), peak, share, shared)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        bare, ctx.backend, _, _, _, weight, *tensors = inputs
        ctx.bare = bare._replace(statistics=False, mean=True)
        ctx.save_for_backward(weight, *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        bare, backend, (weight, *tensors) = ctx.bare, ctx.backend, ctx.saved_tensors
        tensors[2] = g[..., None].to(tensors[0].dtype)
        needed = list(ctx.needs_input_grad[5:])
        needed[3] = False  # g, in the place of a value, has no gradient of its own here
        if not isinstance(backend, str):

            def mean(weight: Tensor, *given: Tensor | None) -> Tensor:
                seen = autograd.reduce(bare.over(given), backend).mean
                assert seen is not None
                return (weight * seen[..., 0]).sum()

            found = autograd.recomputed(mean, (weight, *tensors), needed, (torch.ones_like(weight.sum()),))
            return (None, None, None, None, None, *found)
        sums = autograd.traced(bare.over(tensors), backend)
        assert sums.mean is not None
        known, above = (sums.peak, sums.mass, None, None, sums.mean), (None,) * 5 + (weight[..., None], None)
        found = autograd.pulled_back(bare, tensors, needed[1:], known, above, backend)
        return (None, None, None, None, None, sums.mean[..., 0] if needed[0] else None, *found)
