"""The divergence of two distributions as torch operators, and its derivative; the formulas are in `divergences`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library

from partita._checks import broadcast
from partita.engine import backends
from partita.engine.autograd import Plan, known_signature
from partita.engine.divergences import Record
from partita.engine.request import Request
from partita.engine.sums import OPERANDS
from partita.precision import no_autocast

__all__ = ["Divergence", "Question"]

_SIDE = (
    "Tensor {0}_query, Tensor {0}_key, Tensor {0}_scale, Tensor? {0}_bias, Tensor[] {0}_support, int[] {0}_layout, "
    "float? {0}_softcap, bool {0}_cap_bias"
)
_PAIR = f"{_SIDE.format('p')}, {_SIDE.format('q')}, str kind, float beta, str backend"
_PER_SIDE = 8
library.define("partita::divergence", f"({_PAIR}) -> Tensor")
library.define("partita::divergence_backward", f"({_PAIR}, Tensor record, Tensor g, bool[] needs) -> Tensor[]")

Tensors = Sequence["Tensor | None"]


@dataclass(frozen=True)
class Question:
    """What of a pair is no tensor: both plans, the kind, and where the tensors of the second begin."""

    plans: tuple[Plan, Plan]
    kind: str
    beta: float
    cut: int

    @staticmethod
    def of(p: Request, q: Request, kind: str, beta: float, backend: str) -> tuple[Question, tuple[Tensor | None, ...]]:
        (plan, tensors), (other, others) = (Plan.of(r, backend) for r in (p, q))
        return Question((plan, other), kind, beta, len(tensors)), (*tensors, *others)

    def split(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        return tensors[: self.cut], tensors[self.cut :]

    def requests(self, tensors: Tensors) -> tuple[Request, Request]:
        one, other = self.split(tensors)
        return self.plans[0].request(one), self.plans[1].request(other)

    def arguments(self, tensors: Tensors) -> tuple[Any, ...]:
        """As the operators take them."""
        sides = []
        for plan, (query, key, _, scale, bias, _, *support) in zip(self.plans, self.split(tensors), strict=True):
            sides += [query, key, scale, bias, support, plan.layout, plan.softcap, plan.cap_bias]
        return (*sides, self.kind, self.beta, self.plans[0].backend)

    @staticmethod
    def read(arguments: Sequence[Any]) -> tuple[Question, tuple[Tensor | None, ...]]:
        kind, beta, backend = arguments[2 * _PER_SIDE : 2 * _PER_SIDE + 3]
        plans, tensors = [], []
        for side in (arguments[:_PER_SIDE], arguments[_PER_SIDE : 2 * _PER_SIDE]):
            query, key, scale, bias, support, layout, softcap, cap_bias = side
            plans.append(
                Plan(list(layout), softcap, cap_bias, rank=False, statistics=False, mean=False, backend=backend)
            )
            tensors.append((query, key, None, scale, bias, None, *support))
        return Question((plans[0], plans[1]), kind, beta, len(tensors[0])), (*tensors[0], *tensors[1])


def _forward(ask: Question, requests: tuple[Request, Request]) -> Tensor:  # (6, *b, Q)
    p, q = requests
    with no_autocast(p.query), torch.no_grad():
        kernels = backends.choose(p, ask.plans[0].backend, q).divergences
        return torch.stack(kernels.forward(p, q, ask.kind, ask.beta))


def _backward(ask: Question, tensors: Tensors, record: Tensor, g: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    """The gradients that are needed, each in the dtype of its operand."""
    p, q = ask.requests(tensors)
    half = len(OPERANDS)
    wanted = (tuple(needs[:half]), tuple(needs[half:]))
    with no_autocast(p.query), torch.no_grad():
        kernels = backends.choose(p, ask.plans[0].backend, q).divergences
        found = kernels.backward(p, q, ask.kind, ask.beta, Record(*record.unbind()), g, wanted)
    return [
        found[side][name].to(t.dtype)
        for side, given in enumerate(ask.split(tensors))
        for name, t, needed in zip(OPERANDS, given[:half], wanted[side], strict=True)
        if needed and t is not None
    ]


@library.impl("partita::divergence", "CompositeExplicitAutograd")
def _(*arguments: Any) -> Tensor:
    ask, tensors = Question.read(arguments)
    return _forward(ask, ask.requests(tensors))


@library.register_fake("partita::divergence")  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> Tensor:
    ask, tensors = Question.read(arguments)
    p, q = ask.requests(tensors)
    return p.scale.new_empty((6, *broadcast(p.batch, q.batch), p.n_query))


@library.impl("partita::divergence_backward", "CompositeExplicitAutograd")
def _(*arguments: Any) -> list[Tensor]:
    ask, tensors = Question.read(arguments)
    return _backward(ask, tensors, *arguments[2 * _PER_SIDE + 3 :])


@library.register_fake("partita::divergence_backward")  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> list[Tensor]:
    ask, tensors = Question.read(arguments)
    given = [t for side in ask.split(tensors) for t in side[: len(OPERANDS)]]
    return [torch.empty_like(t) for t, needed in zip(given, arguments[-1], strict=True) if needed and t is not None]


class Divergence(torch.autograd.Function):
    """The divergence of every row; has a first derivative."""

    @staticmethod
    @known_signature
    def forward(
        ask: Question, requests: tuple[Request, Request] | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if requests is not None:
            record = _forward(ask, requests)
        else:
            record = torch.ops.partita.divergence(*ask.arguments(tensors))
        return Record(*record.unbind()).divergence(ask.kind), record

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.ask, requests, *tensors = inputs
        ctx.seen = requests is None
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        record, *tensors = ctx.saved_tensors
        half, ask = len(OPERANDS), ctx.ask
        places = [*range(half), *range(ask.cut, ask.cut + half)]
        needs = [tensors[i] is not None and ctx.needs_input_grad[2 + i] for i in places]
        if ctx.seen or torch.compiler.is_compiling():
            found = torch.ops.partita.divergence_backward(*ask.arguments(tensors), record, g, needs)
        else:
            found = _backward(ask, tensors, record, g, needs)
        out: list[Tensor | None] = [None] * (2 + len(tensors))
        rest = iter(found)
        for place, needed in zip(places, needs, strict=True):
            out[2 + place] = next(rest) if needed else None
        return tuple(out)
