"""The pass as two torch operators, and its first and second derivatives, for autograd and torch.func alike.

    Pass        row sums, statistics and mean value; derivatives at constant peak
    Gradients   the gradients of a pass; itself differentiable once, tile by tile

The operators `partita::reduce` and `partita::reduce_backward` hide the backend, so that torch.compile sees one node and
a profiler one name; where nobody looks they are left out. While tracing the first is called as it is: it brings its own
derivative, by the same formulas. Checks of values, which a tracer cannot make, are made when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, library

from partita.engine import backends
from partita.engine.backends import tiled
from partita.engine.request import Request, check_values
from partita.engine.state import Stats, raw_gradients
from partita.engine.sums import OPERANDS, Sums, Upstream
from partita.engine.terms import pack, unpack
from partita.precision import no_autocast

__all__ = [
    "OPERANDS_SCHEMA", "PLAN_SCHEMA", "Gradients", "Pass", "Plan", "assemble", "backward", "flat", "forward",
    "gradients", "keep", "known_signature", "raw_upstream", "read", "reduce", "results",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

_ROWS = 6  # peak, then the gradients of mass, first, second, moment, target: what follows the operands in `Gradients`
_ABSENT = 0  # the size of an output that was not asked for: an operator has no optional results


def forward(request: Request, backend: str = "") -> Sums:
    """The pass by a backend, without a graph."""
    with no_autocast(request.query), torch.no_grad():
        sums = backends.choose(request, backend).forward(request)
        if request.extremes and sums.places is None:  # a backend may leave the ends of a row to the tiles
            ends = tiled.forward(replace(request, value=None, target=None, rank=False, statistics=False, mean=False))
            sums = sums._replace(least=ends.least, places=ends.places)
        return sums.without_variance() if request.level == 1 else sums


def backward(
    request: Request, peak: Tensor, upstream: Upstream, needs: Sequence[bool], backend: str = ""
) -> dict[str, Tensor]:
    """Gradients of the operands that need one, by their names, in the accumulation dtype; without a graph."""
    with no_autocast(request.query), torch.no_grad():
        return backends.choose(request, backend).backward(request, peak, upstream, needs)


@dataclass(frozen=True)
class Plan:
    """What of a request is no tensor, and so does not change under transformations."""

    layout: list[int]  # of the support's terms
    softcap: float | None
    cap_bias: bool
    rank: bool
    statistics: bool
    mean: bool
    backend: str  # "": chosen when the pass runs, since it is not known while tracing
    extremes: bool = False
    variance: bool = True

    @staticmethod
    def of(request: Request, backend: str) -> tuple[Plan, tuple[Tensor | None, ...]]:
        """The plan, and all tensors of the request."""
        support, layout = pack(request.terms)
        r = request
        plan = Plan(layout, r.softcap, r.cap_bias, r.rank, r.statistics, r.mean, backend, r.extremes, r.variance)
        return plan, (r.query, r.key, r.value, r.scale, r.bias, r.target, *support)

    def options(self) -> tuple[list[int], float | None, bool, bool, bool, bool, str, bool, bool]:
        flags = (self.cap_bias, self.rank, self.statistics, self.mean)
        return self.layout, self.softcap, *flags, self.backend, self.extremes, self.variance

    def request(self, tensors: Sequence[Tensor | None]) -> Request:
        """The request these tensors belong to."""
        query, key, value, scale, bias, target, *support = tensors
        terms = unpack([t for t in support if t is not None], self.layout)
        assert query is not None
        assert key is not None
        assert scale is not None
        return Request(
            query, key, value, scale, bias, target, terms, self.softcap, self.cap_bias,
            rank=self.rank, statistics=self.statistics, variance=self.variance, mean=self.mean,
            extremes=self.extremes,
        )  # fmt: skip


# ---- operators ------------------------------------------------------------------------------------------------------


def results(sums: Sums) -> tuple[Tensor | None, ...]:
    """The fields of the sums, for a function with a derivative."""
    # in float64: a backend that works in other units must find the very peak again that its sums are relative to
    return sums.peak.double(), *sums[1:12]


def flat(sums: Sums) -> tuple[Tensor, ...]:
    """The same for an operator: an absent one is empty, and each lies in memory as its shape says."""
    whole = ("rank", "places")
    return tuple(
        sums.mass.new_empty(_ABSENT, dtype=torch.int64 if name in whole else None) if x is None else x.contiguous()
        for name, x in zip(Sums._fields, results(sums), strict=False)
    )


def assemble(out: Sequence[Tensor | None], request: Request, node: Any = None) -> Sums:
    """The same record again."""
    peak, mass, count, first, spread, statistics, moment, mean, score, rank, least, places = out
    assert peak is not None
    assert mass is not None
    assert count is not None
    there = request.statistics
    valued, aimed = request.value is not None, request.target is not None
    return Sums(
        peak,
        mass,
        count,
        first if there else None,
        spread if request.level > 1 else None,
        statistics if there else None,
        moment if valued and not request.mean else None,
        mean if valued and request.mean else None,
        score if aimed else None,
        rank if aimed and request.rank else None,
        least if request.extremes else None,
        places if request.extremes else None,
        node,
    )


OPERANDS_SCHEMA = (
    "Tensor query, Tensor key, Tensor? value, Tensor scale, Tensor? bias, Tensor? target, Tensor[] support"
)
PLAN_SCHEMA = (
    "int[] layout, float? softcap, bool cap_bias, bool rank, bool statistics, bool mean, str backend, bool extremes, "
    "bool variance"
)
_GIVEN = "Tensor peak, Tensor mass, Tensor? first, Tensor? second, Tensor? moment, Tensor? g_target"

library.define("partita::reduce", f"({OPERANDS_SCHEMA}, {PLAN_SCHEMA}) -> ({', '.join(['Tensor'] * 12)})")
library.define("partita::reduce_backward", f"({OPERANDS_SCHEMA}, {PLAN_SCHEMA}, {_GIVEN}, bool[] needs) -> Tensor[]")


def read(arguments: Sequence[Any]) -> tuple[Plan, tuple[Tensor | None, ...], Sequence[Any]]:
    """The plan, the tensors of the request, and what follows them in an operator's arguments."""
    operands, support, plan, rest = arguments[:6], arguments[6], arguments[7:16], arguments[16:]
    layout, *options = plan
    return Plan(list(layout), *options), (*operands, *support), rest


@library.impl("partita::reduce", "CompositeExplicitAutograd")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    plan, tensors, _ = read(arguments)
    request = plan.request(tensors)
    check_values(request)
    return flat(forward(request, plan.backend))


@library.register_fake("partita::reduce")  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> tuple[Tensor, ...]:
    plan, tensors, _ = read(arguments)
    r = plan.request(tensors)
    rows = (*r.batch, r.n_query)
    values = (*rows, 0 if r.value is None else r.value.shape[-1])
    valued, aimed = r.value is not None, r.target is not None

    def empty(there: bool, shape: tuple[int, ...] = rows, dtype: torch.dtype = r.dtype) -> Tensor:
        return r.query.new_empty(shape if there else (_ABSENT,), dtype=dtype)

    return (
        empty(True, dtype=torch.float64),
        empty(True),
        empty(True),
        empty(r.statistics),
        empty(r.level > 1),
        empty(r.statistics, (5, *rows)),
        empty(valued and not r.mean, values),
        empty(valued and r.mean, values),
        empty(aimed),
        empty(aimed and r.rank, dtype=torch.int64),
        empty(r.extremes),
        empty(r.extremes, (2, *rows), torch.int64),
    )


@library.impl("partita::reduce_backward", "CompositeExplicitAutograd")
def _(*arguments: Any) -> list[Tensor]:
    plan, tensors, (*rows, needs) = read(arguments)
    return _wanted(plan, tensors, rows, needs)


@library.register_fake("partita::reduce_backward")  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> list[Tensor]:
    _, tensors, (*_, needs) = read(arguments)
    return [t.new_empty(t.shape) for t, needed in zip(tensors[:5], needs, strict=True) if needed and t is not None]


def reduce(plan: Plan, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The pass as an operator, which whoever looks can see."""
    out: tuple[Tensor, ...] = torch.ops.partita.reduce(*tensors[:6], tensors[6:], *plan.options())
    return out


def _wanted(
    plan: Plan, tensors: Sequence[Tensor | None], rows: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients that are needed, each in the dtype of its operand."""
    request = plan.request(tensors)
    peak, mass, first, second, moment, target = rows
    assert peak is not None
    assert mass is not None
    g = Upstream.over((*request.batch, request.n_query), mass, first, second, moment, target)
    total = backward(request, peak, g, tuple(needs), plan.backend)
    return [
        total[name].to(t.dtype).contiguous()
        for name, t in zip(OPERANDS, tensors[:5], strict=True)
        if name in total and t is not None
    ]


# ---- derivatives ----------------------------------------------------------------------------------------------------


def known_signature(forward: F) -> F:
    """For a Function with `setup_context`: torch reads the signature at every call, longer than a short pass takes.

    Written down once, it is found and not made.
    """
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


class Pass(torch.autograd.Function):
    """All results of a pass; without its request as an operator, which whoever looks can see."""

    @staticmethod
    @known_signature
    def forward(plan: Plan, request: Request | None, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return reduce(plan, tensors) if request is None else results(forward(request, plan.backend))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        plan, request, *tensors = inputs
        _remember(ctx, plan, tensors, output)
        ctx.seen = request is None  # operators are looked at

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = _pulled_back(ctx, ctx.needs_input_grad[2:], grads)
        return (None, None, *found, *[None] * (len(ctx.needs_input_grad) - 2 - len(found)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], plan: Plan, request: Request | None, *tensors: Tensor | None
    ) -> tuple[Any, Any]:
        moved = [_batched(t, d) for t, d in zip(tensors, in_dims[2:], strict=True)]
        out = list(Pass.apply(plan, None, *moved))  # type: ignore[no-untyped-call]
        for i in (5, 11):  # statistics and places: the mapped dimension first here too
            out[i] = out[i].movedim(0, 1) if out[i].dim() > 1 else out[i]
        return tuple(out), tuple(None if t.dim() == 1 and t.shape[0] == 0 else 0 for t in out)


def _remember(ctx: Any, plan: Plan, tensors: Sequence[Tensor | None], output: tuple[Tensor | None, ...]) -> None:
    ctx.plan = plan
    keep(ctx, tensors, output)


def keep(ctx: Any, tensors: Sequence[Tensor | None], output: tuple[Tensor | None, ...]) -> None:
    """What the gradients of a pass are made from: its operands, then peak, mass, first, spread and mean value."""
    peak, mass, count, first, spread, _, _, mean, _, *whole = output
    ctx.mark_non_differentiable(*(x for x in (peak, count, *whole) if x is not None))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, peak, mass, first, spread, mean)


def raw_upstream(
    level: int, mean: bool, sums: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...] | None:
    """Gradients of mass, first, second, moment and the target's score from those of a pass's results; None if none.

    sums: mass, first, spread and mean value, as the pass gave them.
    """
    mass, first, spread, mean_value = sums
    _, g_mass, _, g_first, g_spread, g_stats, g_moment, g_mean, g_target, *_ = grads
    if all(g is None for g in (g_mass, g_first, g_spread, g_stats, g_moment, g_mean, g_target)):
        return None
    by_name = {} if g_stats is None else dict(zip(Stats._fields, g_stats.unbind(), strict=False))
    raw = raw_gradients(
        mass,
        first if level > 0 else None,
        spread if level > 1 else None,
        mean_value,
        g_mass=g_mass,
        g_first=g_first if level > 0 else None,
        g_spread=g_spread if level > 1 else None,
        g_mean=g_mean if mean else None,
        g_log_partition=by_name.get("log_partition"),
        g_entropy=by_name.get("entropy"),
        g_mean_score=by_name.get("mean_score"),
        g_variance=by_name.get("score_variance") if level > 1 else None,
    )
    return raw.mass, raw.first, raw.second, raw.moment if mean else g_moment, g_target


def _pulled_back(ctx: Any, needed: Sequence[bool], grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Gradients of query, key, value, scale and bias from those of a pass's results."""
    plan = ctx.plan
    *tensors, peak, mass, first, spread, mean = ctx.saved_tensors
    rows = raw_upstream(1 + plan.variance if plan.statistics else 0, plan.mean, (mass, first, spread, mean), grads)
    if rows is None:
        return [None] * len(OPERANDS)
    *of_rows, moment, g_target = rows
    moment = None if tensors[2] is None else moment
    target = None if tensors[5] is None else g_target
    needs = [t is not None and need for t, need in zip(tensors[:5], needed, strict=False)]
    given = (*tensors, peak, *of_rows, moment, target)
    found = iter(Gradients.apply(plan, needs, ctx.seen, *given))  # type: ignore[no-untyped-call]
    return [next(found) if need else None for need in needs]


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    plan, tensors, _ = read(inputs)
    _remember(ctx, plan, tensors, output)
    ctx.seen = True


def _operator_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """As `Pass.backward`, in the shape of the operator's arguments: a list where they have one."""
    query, key, value, scale, bias, target, support, layout, *options = ctx.needs_input_grad
    found = _pulled_back(ctx, (query, key, value, scale, bias), grads)
    none = [None if not isinstance(x, list) else [None] * len(x) for x in (target, support, layout, *options)]
    return (*found, *none)


library.register_autograd("partita::reduce", _operator_backward, setup_context=_setup_operator)


def _batched(tensor: Tensor | None, dim: int | None, size: int | None = None) -> Tensor | None:
    """The mapped dimension first; a tensor without one broadcasts, or is spread to `size`."""
    if tensor is None:
        return None
    if dim is not None:
        return tensor.movedim(dim, 0)
    return tensor.unsqueeze(0) if size is None else tensor.unsqueeze(0).expand(size, *tensor.shape)


def gradients(plan: Plan, needs: list[bool], seen: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Those that are needed; as an operator where somebody looks."""
    given, rows = tensors[:-_ROWS], tensors[-_ROWS:]
    if not seen:
        return tuple(_wanted(plan, given, rows, needs))
    return tuple(torch.ops.partita.reduce_backward(*given[:6], given[6:], *plan.options(), *rows, needs))


class Gradients(torch.autograd.Function):
    """Gradients of the operands that need one; itself differentiable once."""

    @staticmethod
    @known_signature
    def forward(plan: Plan, needs: list[bool], seen: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return gradients(plan, needs, seen, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, ctx.needs, _, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        request = replace(ctx.plan.request(tensors[:-_ROWS]), rank=False, mean=False)
        peak, *given = tensors[-_ROWS:]
        g = Upstream.over((*request.batch, request.n_query), *given)
        names = [name for name, needed in zip(OPERANDS, ctx.needs, strict=True) if needed]
        wanted = {name: grad.to(request.dtype) for name, grad in zip(names, above, strict=True)}
        operands, rows = tiled.second_order(request, peak, g, wanted)
        out: list[Tensor | None] = [None] * len(tensors)
        for i, name in enumerate(OPERANDS):
            if name in operands and tensors[i] is not None:
                out[i] = operands[name].to(tensors[i].dtype)
        for i, name in enumerate(("mass", "first", "second", "moment", "target")):
            if given[i] is not None and name in rows:
                out[len(tensors) - _ROWS + 1 + i] = rows[name].sum_to_size(given[i].shape)
        return (None, None, None, *out)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], plan: Plan, needs: list[bool], seen: bool, *tensors: Tensor | None
    ) -> tuple[Any, Any]:
        size = info.batch_size
        moved = [_batched(t, d, size) for t, d in zip(tensors, in_dims[3:], strict=True)]
        out = Gradients.apply(plan, needs, True, *moved)  # type: ignore[no-untyped-call]
        return out, tuple(0 for _ in out)
