"""The other margin as a torch operator, and its derivative.

    received_j = sum_i weight_i p(j|i)

It is the transpose of an expectation: sum_j g_j received_j = sum_i weight_i E_i[g]. So its gradient is that of the mean
value of g, which an ordinary pass gives, and the gradient of a weight is that mean itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, library

from partita.engine import backends
from partita.engine.autograd import Gradients, Pass, Plan, assemble, gradients, known_signature, reduce
from partita.engine.request import Request
from partita.engine.state import divided, raw_gradients
from partita.engine.sums import OPERANDS
from partita.precision import no_autocast

__all__ = ["Received", "columns"]

library.define(
    "partita::received",
    "(Tensor query, Tensor key, Tensor scale, Tensor? bias, Tensor[] support, int[] layout, float? softcap, "
    "bool cap_bias, str backend, Tensor peak, Tensor weight, bool shared) -> Tensor",
)


def columns(request: Request, backend: str, peak: Tensor, weight: Tensor, shared: bool) -> Tensor:  # (*b, K)
    """sum_i weight_i exp(s_ij - peak_i) by a backend, without a graph."""
    with no_autocast(request.query), torch.no_grad():
        return backends.choose(request, backend).column_sums(request, peak, weight, shared)


def _request(arguments: Sequence[Any]) -> Request:
    query, key, scale, bias, support, layout, softcap, cap_bias, backend = arguments[:9]
    plan = Plan(list(layout), softcap, cap_bias, rank=False, statistics=False, mean=False, backend=backend)
    return plan.request((query, key, None, scale, bias, None, *support))


@library.impl("partita::received", "CompositeExplicitAutograd")
def _(*arguments: Any) -> Tensor:
    return columns(_request(arguments), arguments[8], *arguments[9:])


@library.register_fake("partita::received")  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> Tensor:
    request, shared = _request(arguments), arguments[11]
    batch = (*request.batch[:-1], 1) if shared else request.batch
    return request.scale.new_empty((*batch, request.n_key))


class Received(torch.autograd.Function):
    """What each key receives; peak and mass are those of the rows, as a pass gave them."""

    @staticmethod
    @known_signature
    def forward(
        plan: Plan,
        request: Request | None,  # None: operators are looked at
        shared: bool,
        peak: Tensor,
        mass: Tensor,
        weight: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        share = divided(weight, mass)
        if request is not None:
            return columns(request, plan.backend, peak, share, shared)
        query, key, _, scale, bias, _, *support = tensors
        options = (plan.layout, plan.softcap, plan.cap_bias, plan.backend)
        out: Tensor = torch.ops.partita.received(query, key, scale, bias, support, *options, peak, share, shared)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        plan, request, _, _, _, weight, *tensors = inputs
        ctx.plan = replace(plan, statistics=False, mean=True)
        ctx.seen = request is None
        ctx.save_for_backward(weight, *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        plan, (weight, *tensors) = ctx.plan, ctx.saved_tensors
        tensors[2] = g[..., None].to(tensors[0].dtype)
        request = plan.request(tensors)
        compiling = torch.compiler.is_compiling()  # a compiled graph has no second derivative
        if compiling:
            out = reduce(plan, tensors)
        else:
            out = Pass.apply(plan, None if ctx.seen else request, *tensors)  # type: ignore[no-untyped-call]
        sums = assemble(out, request)
        assert sums.mean is not None
        raw = raw_gradients(sums.mass, mean=sums.mean, g_mean=weight[..., None])
        needs = [t is not None and ctx.needs_input_grad[6 + i] for i, t in enumerate(tensors[:5])]
        needs[OPERANDS.index("value")] = False
        found: Any = iter(())
        if any(needs):
            given = (*tensors, sums.peak, raw.mass, None, None, raw.moment, None)
            function = gradients if compiling else Gradients.apply
            found = iter(function(plan, needs, ctx.seen or compiling, *given))
        grads = [next(found) if needed else None for needed in needs]
        of_weight = sums.mean[..., 0] if ctx.needs_input_grad[5] else None
        return (None, None, None, None, None, of_weight, *grads, *(None for _ in tensors[5:]))
