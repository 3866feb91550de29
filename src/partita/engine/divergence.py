"""The divergence of two distributions over the same keys, per row, and its derivative; formulas are in `divergences`.

divergence(p, q)       of every row; differentiable, a torch operator where it is traced
weighted_divergence    a scalar of those, its gradients computed in the forward pass where a backend can
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from partita._checks import broadcast
from partita.engine import backends, operators
from partita.engine.autograd import Context, FastPath, computed_ahead, serving_alone, traceable
from partita.engine.backends import Backend, tiled
from partita.engine.callable_score import parameter_names
from partita.engine.divergences import Record, written_out
from partita.engine.request import Bare, Request
from partita.engine.second import differentiable
from partita.engine.sums import OPERANDS
from partita.precision import no_autocast

__all__ = ["Divergence", "DivergencePlan", "divergence", "weighted_divergence"]

_PAIR = ", ".join(
    f"{kind} {side}_{name}"
    for side in "pq"
    for kind, name in (part.split(" ") for part in f"{operators.OPERANDS}, {operators.FLAGS}".split(", "))
)
library.define("partita::divergence", f"({_PAIR}, str kind, float beta) -> Tensor")
_GIVEN = "Tensor record, Tensor g, bool[] needs"
library.define("partita::divergence_backward", f"({_PAIR}, str kind, float beta, {_GIVEN}) -> Tensor[]")

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

    def arguments(self, tensors: Tensors) -> tuple[Any, ...]:
        """As the operators take them."""
        assert isinstance(self.backend, str)
        p, q = (operators.arguments(r, self.backend) for r in self.requests(tensors))
        return (*p, *q, self.kind, self.beta)

    @staticmethod
    def read(given: Sequence[Any]) -> tuple[DivergencePlan, tuple[Tensor | None, ...], Sequence[Any]]:
        p, tensors, backend, rest = operators.read(given)
        q, others, _, (kind, beta, *more) = operators.read(rest)
        return DivergencePlan(p, q, kind, beta, operators.entry(backend), len(tensors)), (*tensors, *others), more

    def places(self, tensors: Tensors) -> tuple[list[int], list[int]]:
        """Where the operands of both stand among the tensors, a score's own parameters included."""
        found, first = [], 0
        for bare, end in ((self.p, self.cut), (self.q, len(tensors))):
            own = len(bare.pairs.names) if bare.pairs is not None else 0
            found.append([*range(first, first + len(OPERANDS)), *range(end - own, end)])
            first = self.cut
        return found[0], found[1]


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
    kernel, tensors, others = backend.divergences, p.tensors(), q.tensors()
    (one, other), cut = (p.bare(), q.bare()), 1 + len(tensors)

    def make(needs: Sequence[bool]) -> Any:
        wanted = needs[1 : 1 + len(OPERANDS)], needs[cut : cut + len(OPERANDS)]
        found = kernel(p, q, kind, beta, weight, wanted)
        if found is None:
            return None
        record, *grads = found
        return computed_ahead((weight * record.divergence(kind)).sum(), *zip((tensors, others), grads, strict=True))

    def again(weight: Tensor, *given: Tensor | None) -> Tensor:
        return (weight * divergence(one.over(given[: cut - 1]), other.over(given[cut - 1 :]), kind, beta)).sum()

    total: Tensor = FastPath.apply(make, again, weight, *tensors, *others)  # type: ignore[no-untyped-call]
    return total


def _kernel(plan: DivergencePlan, p: Request, q: Request, g: Tensor | None, needs: Any) -> tuple[Backend, Any]:
    """The backend, and what a kernel of its own gives."""
    entry = backends.choose(p, "", q) if plan.backend is None else plan.backend
    assert not isinstance(entry, str)
    return entry, entry.divergences and entry.divergences(p, q, plan.kind, plan.beta, g, needs)


def forward(plan: DivergencePlan, p: Request, q: Request) -> Tensor:  # (6, *b, Q)
    """The record of every row, without a graph."""
    with no_autocast(p.query), torch.no_grad():
        entry, found = _kernel(plan, p, q, None, ((), ()))
        return torch.stack(found[0] if found else tiled.divergence(p, q, plan.kind, plan.beta, whole=entry.whole))


def _backward(plan: DivergencePlan, tensors: Tensors, record: Tensor, g: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    """The gradients that are needed, each in the dtype of its operand."""
    (p, q), places = plan.requests(tensors), plan.places(tensors)
    wanted = needs[: len(places[0])], needs[len(places[0]) :]
    with no_autocast(p.query), torch.no_grad():
        entry, found = _kernel(plan, p, q, g, wanted)
        if not found:
            rows = Record(*record.unbind())
            found = rows, *tiled.divergence_backward(p, q, plan.kind, plan.beta, rows, g, wanted, whole=entry.whole)
    made = []
    for grads, at, need in zip(found[1:], places, wanted, strict=True):
        names = (*OPERANDS, *parameter_names(len(at) - len(OPERANDS)))
        for name, i, asked in zip(names, at, need, strict=True):
            tensor = tensors[i]
            if asked and tensor is not None:
                made.append(grads[name].to(tensor.dtype))
    return made


@library.impl("partita::divergence", "CompositeExplicitAutograd")
def _(*given: Any) -> Tensor:
    plan, tensors, _ = DivergencePlan.read(given)
    return forward(plan, *plan.requests(tensors))


@library.register_fake("partita::divergence")  # type: ignore[untyped-decorator]
def _(*given: Any) -> Tensor:
    plan, tensors, _ = DivergencePlan.read(given)
    p, q = plan.requests(tensors)
    return p.scale.new_empty((6, *broadcast(p.batch, q.batch), p.n_query))


@library.impl("partita::divergence_backward", "CompositeExplicitAutograd")
def _(*given: Any) -> list[Tensor]:
    plan, tensors, (record, g, needs) = DivergencePlan.read(given)
    return _backward(plan, tensors, record, g, needs)


@library.register_fake("partita::divergence_backward")  # type: ignore[untyped-decorator]
def _(*given: Any) -> list[Tensor]:
    plan, tensors, (*_, needs) = DivergencePlan.read(given)
    operands = [tensors[i] for side in plan.places(tensors) for i in side]
    return [torch.empty_like(t) for t, needed in zip(operands, needs, strict=True) if needed and t is not None]


def _mapped_forward(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Tensor, int]:
    return torch.ops.partita.divergence(*operators.mapped(info, in_dims, given)), 1


def _mapped_backward(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[list[Tensor], list[int]]:
    moved = operators.mapped(info, in_dims, given)
    moved[-3] = moved[-3].movedim(0, 1)  # the record's fields come before the rows
    found = torch.ops.partita.divergence_backward(*moved)
    return found, [0] * len(found)


library.register_vmap("partita::divergence", _mapped_forward)
library.register_vmap("partita::divergence_backward", _mapped_backward)


class Divergence(torch.autograd.Function):
    """The divergence of every row; a second derivative writes both score matrices out."""

    generate_vmap_rule = True

    @staticmethod
    @operators.known_signature
    def forward(plan: DivergencePlan, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        if isinstance(plan.backend, str):
            record = torch.ops.partita.divergence(*plan.arguments(tensors))
        else:
            record = forward(plan, *plan.requests(tensors))
        return Record(*record.unbind()).divergence(plan.kind), record

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.plan, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        plan, (record, *tensors) = ctx.plan, ctx.saved_tensors
        at = [i for side in plan.places(tensors) for i in side]
        needs = [tensors[i] is not None and ctx.needs_input_grad[1 + i] for i in at]

        def first(g: Tensor, record: Tensor, *tensors: Tensor | None) -> Sequence[Tensor]:
            if isinstance(plan.backend, str):
                made: list[Tensor] = torch.ops.partita.divergence_backward(*plan.arguments(tensors), record, g, needs)
                return made
            return _backward(plan, tensors, record, g, needs)

        def again(*tensors: Tensor | None) -> Tensor:
            p, q = plan.requests(tensors)
            return written_out(tiled.scores_whole(p), tiled.scores_whole(q), plan.kind, plan.beta)

        there = dict(zip(at, needs, strict=True))
        wanted = [there.get(i, False) for i in range(len(tensors))]
        found = differentiable(first, again, wanted, g, [record], tensors)
        out: list[Tensor | None] = [None] * (1 + len(tensors))
        rest = iter(found)
        for i, needed in enumerate(wanted):
            out[1 + i] = next(rest) if needed else None
        return tuple(out)
