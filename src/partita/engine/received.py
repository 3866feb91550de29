"""Attention received per key (column sums) as a torch operator, and its derivative.

    received_j = sum_i weight_i p(j|i)

It is the transpose of an expectation: sum_j g_j received_j = sum_i weight_i E_i[g]. So its gradient is that of the mean
value of g, which an ordinary pass gives, and the gradient of a weight is that mean itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from partita.engine import autograd, backends, operators
from partita.engine.autograd import Context, Gradients, traceable
from partita.engine.backends import Backend, tiled
from partita.engine.request import Bare, Request
from partita.engine.state import divided
from partita.precision import no_autocast

__all__ = ["Received", "received"]

library.define(
    "partita::received",
    f"({operators.OPERANDS}, {operators.FLAGS}, Tensor peak, Tensor weight, bool shared) -> Tensor",
)


def received(request: Request, peak: Tensor, mass: Tensor, weight: Tensor) -> Tensor:  # (*b, K)
    """sum_i weight_i p(j|i), for the peak and mass of the rows that a pass gave; groups of queries add up."""
    r, shared = traceable(request), request.groups > 1
    tensors = r.tensors()
    context = Context.of((*tensors, weight))
    backend: Any = operators.named(r) if context.traced and r.pairs is None else backends.choose(r)
    if not context.needs_grad and not context.traced:
        out = _columns(r, backend, peak, divided(weight, mass), shared)
    else:
        out = operators.applied(Received, (r.bare(), backend, shared, peak, mass, weight), tensors)
    return out.squeeze(-2) if shared else out


def _columns(
    request: Request, backend: Backend | None, peak: Tensor, weight: Tensor, shared: bool
) -> Tensor:  # (*b, K)
    """sum_i weight_i exp(s_ij - peak_i) by a backend, without a graph."""
    entry = backends.choose(request) if backend is None else backend
    with no_autocast(request.query), torch.no_grad():
        found = None if entry.column_sums is None else entry.column_sums(request, peak, weight, shared)
        return tiled.column_sums(request, peak, weight, shared, whole=entry.whole) if found is None else found


@library.impl("partita::received", "CompositeExplicitAutograd")
def _(*given: Any) -> Tensor:
    bare, tensors, backend, rest = operators.read(given)
    return _columns(bare.over(tensors), operators.entry(backend), *rest)


@library.register_fake("partita::received")  # type: ignore[untyped-decorator]
def _(*given: Any) -> Tensor:
    bare, tensors, _, (_, _, shared) = operators.read(given)
    request = bare.over(tensors)
    batch = (*request.batch[:-1], 1) if shared else request.batch
    return request.scale.new_empty((*batch, request.n_key))


def _mapped(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Tensor, int]:
    return torch.ops.partita.received(*operators.mapped(info, in_dims, given)), 0


library.register_vmap("partita::received", _mapped)


class Received(torch.autograd.Function):
    """What each key receives; peak and mass are those of the rows, as a pass gave them."""

    generate_vmap_rule = True

    @staticmethod
    @operators.known_signature
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
        out: Tensor = torch.ops.partita.received(*operators.arguments(request, backend), peak, share, shared)
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
        compiling = torch.compiler.is_compiling()  # a compiled graph has no second derivative
        sums = autograd.traced(bare.over(tensors), backend, node=not compiling)
        assert sums.mean is not None
        known, above = (sums.peak, sums.mass, None, None, sums.mean), (None,) * 5 + (weight[..., None], None)
        make = Gradients.forward if compiling else None
        found = autograd.pulled_back(bare, tensors, needed[1:], known, above, backend, make)
        return (None, None, None, None, None, sums.mean[..., 0] if needed[0] else None, *found)
