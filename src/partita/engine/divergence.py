"""The divergence of two distributions over the same keys, per row, and its derivative; see `divergences`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita._checks import broadcast
from partita.engine import backends, operators
from partita.engine.autograd import Context, computed_ahead, serving_alone, traceable
from partita.engine.backends import Backend, tiled
from partita.engine.divergences import Record, written_out
from partita.engine.request import Bare, Request
from partita.engine.second import differentiable
from partita.precision import no_autocast

__all__ = ["Divergence", "DivergencePlan", "divergence", "weighted_divergence"]

Tensors = Sequence["Tensor | None"]


class DivergencePlan(NamedTuple):
    """What of a pair is no tensor: both requests, the kind, the backend, and where the second's tensors begin."""

    p: Bare
    q: Bare
    kind: str
    beta: float
    backend: Backend | str | None  # its name where the pass is traced
    cut: int

    def requests(self, tensors: Tensors) -> tuple[Request, Request]:
        return self.p.over(tensors[: self.cut]), self.q.over(tensors[self.cut :])

    def run(self, name: str, eager: Callable[..., Any], tensors: Tensors, *more: Any) -> Any:
        """The operator of that name on both requests, or `eager`, which takes the same."""
        p, q = self.requests(tensors)
        if not isinstance(self.backend, str):
            return eager(p, q, self.backend, self.kind, self.beta, *more)
        given = *operators.arguments(p, self.backend), *operators.arguments(q, self.backend)
        return getattr(torch.ops.partita, name)(*given, self.kind, self.beta, *more)

    def places(self, tensors: Tensors) -> list[int]:
        """Which of the tensors have a gradient."""
        others = self.q.places(len(tensors) - self.cut)
        return [*self.p.places(self.cut), *[self.cut + i for i in others]]


def divergence(p: Request, q: Request, kind: str, beta: float) -> Tensor:  # (*b, Q)
    """The divergence of every row of two requests with the same number of batch dimensions, rows and keys."""
    p, q = traceable(p), traceable(q)
    one, other = p.tensors(), q.tensors()
    tensors = (*one, *other)
    context = Context.of(tensors)
    callables = p.pairs is not None or q.pairs is not None
    backend = operators.named(p, q) if context.traced and not callables else backends.choose(p, "", q)
    plan = DivergencePlan(p.bare(), q.bare(), kind, beta, backend, len(one))
    if context.needs_grad or context.traced:
        out: Tensor = operators.applied(Divergence, (plan,), tensors)[0]
    else:
        out = Divergence.forward(plan, *tensors)[0]
    return p.ungroup(out)


def weighted_divergence(p: Request, q: Request, kind: str, beta: float, weight: Tensor) -> Tensor:  # ()
    """sum_i weight_i divergence_i; the weights have no gradient."""
    operands = (p.query, p.key, p.scale, p.bias, q.query, q.key, q.scale, q.bias)
    backend = serving_alone(operands, p, q)
    if backend is None or backend.divergences is None:
        return (weight * divergence(p, q, kind, beta)).sum()
    run = backend.divergences

    def kernel(*needs: Sequence[bool]) -> Any:
        found = run(p, q, kind, beta, weight, needs)  # type: ignore[arg-type]
        return found and (found[0].divergence(kind), *found[1:])

    return computed_ahead([p, q], weight, kernel, lambda p, q: divergence(p, q, kind, beta))


def _record(p: Request, q: Request, backend: Backend | None, kind: str, beta: float) -> Tensor:  # (*b, Q, 6)
    """The record of every row, without a graph."""
    with no_autocast(p.query), torch.no_grad():
        entry = backend or backends.choose(p, "", q)
        found = entry.divergences and entry.divergences(p, q, kind, beta, None, ((), ()))
        return torch.stack(found[0] if found else tiled.divergence(p, q, kind, beta, whole=entry.whole), -1)


def _gradients(
    p: Request, q: Request, backend: Backend | None, kind: str, beta: float, record: Tensor, g: Tensor,
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients that are needed, each in the dtype of its operand; those of a score's own come after the others."""
    operands = p.operands(), q.operands()
    wanted = needs[: len(operands[0])], needs[len(operands[0]) :]
    with no_autocast(p.query), torch.no_grad():
        entry = backend or backends.choose(p, "", q)
        found = entry.divergences and entry.divergences(p, q, kind, beta, g, wanted)
        if not found:
            rows = Record(*record.unbind(-1))
            found = rows, *tiled.divergence_backward(p, q, kind, beta, rows, g, wanted, whole=entry.whole)
    return [
        grads[name].to(t.dtype)
        for grads, side, asked in zip(found[1:], operands, wanted, strict=True)
        for (name, t), needed in zip(side.items(), asked, strict=True)
        if needed and t is not None
    ]


def _like(p: Request, q: Request, *_: Any) -> Tensor:
    return p.scale.new_empty((*broadcast(p.batch, q.batch), p.n_query, 6))


_MORE = "str kind, float beta"
operators.define("divergence", _MORE, "Tensor", _record, _like, ("p_", "q_"), vmap=True)
operators.define(
    "divergence_backward", f"{_MORE}, Tensor record, Tensor g, bool[] needs", "Tensor[]", _gradients,
    operators.like_gradients,
    ("p_", "q_"), vmap=True,
)  # fmt: skip


class Divergence(torch.autograd.Function):
    """The divergence of every row; a second derivative writes both score matrices out."""

    generate_vmap_rule = True

    @staticmethod
    @operators.known_signature
    def forward(plan: DivergencePlan, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        record = plan.run("divergence", _record, tensors)
        return Record(*record.unbind(-1)).divergence(plan.kind), record

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.plan, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        plan, (record, *tensors) = ctx.plan, ctx.saved_tensors
        places = plan.places(tensors)
        needs = [tensors[i] is not None and ctx.needs_input_grad[1 + i] for i in places]

        def first(g: Tensor, record: Tensor, *tensors: Tensor | None) -> list[Tensor]:
            made: list[Tensor] = plan.run("divergence_backward", _gradients, tensors, record, g, needs)
            return made

        def again(*tensors: Tensor | None) -> Tensor:
            p, q = plan.requests(tensors)
            return written_out(tiled.scores_whole(p), tiled.scores_whole(q), plan.kind, plan.beta)

        there = {i for i, needed in zip(places, needs, strict=True) if needed}
        wanted = [i in there for i in range(len(tensors))]
        found = iter(differentiable(first, again, wanted, g, [record], tensors))
        return (None, *[next(found) if needed else None for needed in wanted])
