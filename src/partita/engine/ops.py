"""The pass as two opaque torch operators, and their derivatives.

`partita::reduce` and `partita::reduce_backward` hide the backend, so that torch.compile sees one node and vmap one more
batch dimension. The autograd.Functions around them give first and second derivatives to autograd and torch.func alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from partita._terms import pack, unpack
from partita.engine import registry, tiled
from partita.engine.request import Request
from partita.engine.state import State, Stats, autocasts
from partita.engine.tile import Upstream
from partita.engine.tiled import Sums

__all__ = ["run"]

_ROWS = 6  # peak, then the gradients of mass, first, second, moment, target: what follows the operands in `_Backward`
_OPERANDS = ("query", "key", "value", "scale", "bias")
_ORDINARY = (Tensor, torch.nn.Parameter)


class Plan:
    """What does not change under transformations: layout of the support, options, backend."""

    def __init__(
        self,
        layout: list[int],
        softcap: float | None,
        cap_bias: bool,
        rank: bool,
        statistics: bool,
        backend: str,
        mean: bool = False,
        needs: list[bool] | None = None,
    ):
        self.layout = layout
        self.softcap = softcap
        self.cap_bias = cap_bias
        self.rank = rank
        self.statistics = statistics
        self.backend = backend
        self.mean = mean
        self.needs = needs or [False] * len(_OPERANDS)  # which operands want a gradient

    def options(self) -> tuple[list[int], float | None, bool, bool, bool, str]:
        return self.layout, self.softcap, self.cap_bias, self.rank, self.statistics, self.backend

    def asking(self, needs: list[bool]) -> Plan:
        """The same plan, for a backward pass that must give these gradients."""
        layout, softcap, cap_bias, rank, statistics, backend = self.options()
        return Plan(layout, softcap, cap_bias, rank, statistics, backend, self.mean, needs)


def _request(
    tensors: Sequence[Tensor | None],
    layout: Sequence[int],
    softcap: float | None,
    cap_bias: bool,
    rank: bool,
    statistics: bool,
    mean: bool = False,
) -> Request:
    query, key, value, scale, bias, target, *support = tensors
    terms = unpack([t for t in support if t is not None], layout)
    assert query is not None
    assert key is not None
    assert scale is not None
    return Request(
        query, key, value, scale, bias, target, terms, softcap, cap_bias, rank=rank, statistics=statistics, mean=mean
    )


def _backend(request: Request, name: str) -> registry.Backend:
    # an empty name: the choice was not known while tracing, so it is made when the graph runs
    return registry.choose(request, name or registry.current())


def _no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast has lowered the operands when the request was built; the sums are not its business."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if autocasts(kind) else contextlib.nullcontext()


@torch.library.custom_op("partita::reduce", mutates_args=())
def _reduce(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    support: Sequence[Tensor],
    layout: Sequence[int],
    softcap: float | None,
    cap_bias: bool,
    rank: bool,
    statistics: bool,
    backend: str,
    mean: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (query, key, value, scale, bias, target, *support)
    request = _request(tensors, layout, softcap, cap_bias, rank, statistics, mean)
    with _no_autocast(query):
        state, target_score, ranks, average = _backend(request, backend).forward(request)
    moment = average if mean else state.moment
    absent = state.peak.new_empty(0)
    return (
        # in float64: a backend that works in other units must find the very peak again that its sums are relative to
        state.peak.double() if state.peak.dtype != torch.float64 else state.peak,
        state.mass,
        state.first.contiguous() if statistics else absent.clone(),
        state.spread.contiguous() if statistics else absent.clone(),
        state.count.contiguous(),
        absent.clone() if moment is None else moment,
        absent.clone() if target_score is None else target_score,
        absent.clone().long() if ranks is None else ranks,
    )


@_reduce.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    support: Sequence[Tensor],
    layout: Sequence[int],
    softcap: float | None,
    cap_bias: bool,
    rank: bool,
    statistics: bool,
    backend: str,
    mean: bool = False,
) -> tuple[Tensor, ...]:
    request = _request((query, key, value, scale, bias, target, *support), layout, softcap, cap_bias, rank, statistics)
    rows = (*request.batch, request.n_query)

    def row(there: bool = True, dtype: torch.dtype = request.dtype) -> Tensor:
        return query.new_empty(rows if there else (0,), dtype=dtype)

    moment = row(False) if value is None else query.new_empty((*rows, value.shape[-1]), dtype=request.dtype)
    there = target is not None
    ranks = row(there and rank, torch.int64)
    return (
        row(dtype=torch.float64),
        row(),
        row(statistics),
        row(statistics),
        row(),
        moment,
        row(there),
        ranks,
    )


@torch.library.custom_op("partita::reduce_backward", mutates_args=())
def _reduce_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    support: Sequence[Tensor],
    peak: Tensor,
    g_mass: Tensor,
    g_first: Tensor | None,
    g_second: Tensor | None,
    g_moment: Tensor | None,
    g_target: Tensor | None,
    layout: Sequence[int],
    softcap: float | None,
    cap_bias: bool,
    rank: bool,
    statistics: bool,
    backend: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    tensors = (query, key, value, scale, bias, target, *support)
    request = _request(tensors, layout, softcap, cap_bias, False, statistics)
    g = _whole_upstream(request, (g_mass, g_first, g_second, g_moment, g_target))
    with _no_autocast(query):
        total = _backend(request, backend).backward(request, peak, g, tuple(needs))
    return [
        total[name].to(t.dtype)
        for name, t in zip(_OPERANDS, tensors[:5], strict=True)
        if name in total and t is not None
    ]


@_reduce_backward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    support: Sequence[Tensor],
    peak: Tensor,
    g_mass: Tensor,
    g_first: Tensor | None,
    g_second: Tensor | None,
    g_moment: Tensor | None,
    g_target: Tensor | None,
    layout: Sequence[int],
    softcap: float | None,
    cap_bias: bool,
    rank: bool,
    statistics: bool,
    backend: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    given = (query, key, value, scale, bias)
    return [t.new_empty(t.shape) for t, needed in zip(given, needs, strict=True) if needed and t is not None]


def _whole_upstream(request: Request, given: Sequence[Tensor | None]) -> Upstream:
    """Upstream gradients spread over the rows, zeros for those nobody asked for."""
    mass, first, second, moment, target = given
    assert mass is not None
    zero = torch.zeros_like(mass)
    rows = (*request.batch, request.n_query)
    return Upstream(
        mass.expand(rows),
        (zero if first is None else first).expand(rows),
        (zero if second is None else second).expand(rows),
        None if moment is None or request.value is None else moment.expand(*rows, moment.shape[-1]),
        None if target is None else target.expand(rows),
    )


class _Forward(torch.autograd.Function):
    """The row sums of a request; derivatives at constant peak."""

    @staticmethod
    def forward(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        query, key, value, scale, bias, target, *support = tensors
        out: tuple[Tensor, ...] = _reduce(query, key, value, scale, bias, target, support, *plan.options(), plan.mean)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plan, *tensors = inputs
        ctx.plan = plan
        ctx.mark_non_differentiable(output[0], output[4], output[7])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[:3], output[5] if plan.mean else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, peak, total, linear, average = ctx.saved_tensors
        _, mass, first, spread, _, moment, target, _ = grads
        plan = ctx.plan
        none: list[Tensor | None] = [None] * (len(tensors) + 1)
        if mass is None and first is None and spread is None and moment is None and target is None:
            return tuple(none)
        mass = torch.zeros_like(total) if mass is None else mass
        if plan.mean and moment is not None:
            # mean = moment / mass; on an empty row both are 0 and stay so
            inverse = 1 / torch.where(total == 0, torch.ones_like(total), total)
            mass = mass - torch.linalg.vecdot(moment, average) * inverse
            moment = moment * inverse[..., None]
        first, second = (first, spread) if plan.statistics else (None, None)
        if second is not None:
            # spread = sum e c^2 - first^2 / mass: its gradient is that of the three raw moments
            mean = linear / torch.where(total == 0, torch.ones_like(total), total)
            mass = mass + mean * mean * second
            first = -2 * mean * second if first is None else first - 2 * mean * second
        moment = None if tensors[2] is None else moment
        target = None if tensors[5] is None else target
        needs = [t is not None and ctx.needs_input_grad[1 + i] for i, t in enumerate(tensors[:5])]
        asked = plan.asking(needs)
        given = (*tensors, peak, mass, first, second, moment, target)
        # a compiled graph has no second derivative, so while tracing the operator itself will do
        found = _gradients(asked, *given) if torch.compiler.is_compiling() else _Backward.apply(asked, *given)  # type: ignore[no-untyped-call]
        rest = iter(found)
        for i, needed in enumerate(needs):
            none[1 + i] = next(rest) if needed else None
        return tuple(none)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], plan: Plan, *tensors: Tensor | None) -> tuple[Any, Any]:
        moved = [_batched(t, d) for t, d in zip(tensors, in_dims[1:], strict=True)]
        out = _Forward.apply(plan, *moved)  # type: ignore[no-untyped-call]
        return out, tuple(None if t.dim() == 1 and t.shape[0] == 0 else 0 for t in out)


def _batched(tensor: Tensor | None, dim: int | None, size: int | None = None) -> Tensor | None:
    """The mapped dimension first; a tensor without one broadcasts, or is spread to `size`."""
    if tensor is None:
        return None
    if dim is not None:
        return tensor.movedim(dim, 0)
    return tensor.unsqueeze(0) if size is None else tensor.unsqueeze(0).expand(size, *tensor.shape)


def _gradients(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    query, key, value, scale, bias, target, *support = tensors[:-_ROWS]
    peak, mass, first, second, moment, g_target = tensors[-_ROWS:]
    out = _reduce_backward(
        query, key, value, scale, bias, target, support, peak, mass, first, second, moment, g_target,
        *plan.options(), plan.needs,
    )  # fmt: skip
    return tuple(out)


class _Backward(torch.autograd.Function):
    """Gradients of the operands that need one; itself differentiable once."""

    @staticmethod
    def forward(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _gradients(plan, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        plan = ctx.plan
        request = _request(tensors[:-_ROWS], plan.layout, plan.softcap, plan.cap_bias, False, plan.statistics)
        peak, *given = tensors[-_ROWS:]
        g = _whole_upstream(request, given)
        names = [name for name, needed in zip(_OPERANDS, plan.needs, strict=True) if needed]
        dtype = request.dtype
        wanted = {name: grad.to(dtype) for name, grad in zip(names, above, strict=True)}
        operands, rows = tiled.second_order(request, peak, g, wanted)
        out: list[Tensor | None] = [None] * len(tensors)
        for i, name in enumerate(_OPERANDS):
            if name in operands and tensors[i] is not None:
                out[i] = operands[name].to(tensors[i].dtype)
        for i, name in enumerate(("mass", "first", "second", "moment", "target")):
            if given[i] is not None and name in rows:
                out[len(tensors) - _ROWS + 1 + i] = rows[name].sum_to_size(given[i].shape)
        return (None, *out)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], plan: Plan, *tensors: Tensor | None) -> tuple[Any, Any]:
        size = info.batch_size
        moved = [_batched(t, d, size) for t, d in zip(tensors, in_dims[1:], strict=True)]
        out = _Backward.apply(plan, *moved)  # type: ignore[no-untyped-call]
        return out, tuple(0 for _ in out)


def _plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nobody differentiates or transforms this pass, so that the operator can be called without ceremony."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors[:5]):
        return False
    if torch.compiler.is_compiling():
        return True
    # in forward mode too the Function is asked: it has no such derivative and says so, where the operator would lose it
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def _unseen(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nothing looks at the operators either (a tracer, a mode, a profiler, a subclass): half a call's cost."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
        and all(t is None or type(t) in _ORDINARY for t in tensors)
    )


def run(request: Request) -> Sums:
    """One differentiable pass over a request."""
    name = "" if torch.compiler.is_compiling() else registry.current()
    tensors: tuple[Tensor | None, ...]
    tensors = (request.query, request.key, request.value, request.scale, request.bias, request.target)
    plain = _plain(tensors)
    if plain and _unseen(tensors):
        with _no_autocast(request.query), torch.no_grad():
            sums = registry.choose(request, name).forward(request)
        s = sums.state
        if s.peak.dtype != request.dtype:
            peak = s.peak.to(request.dtype) if s.known is None else s.known.max_score
            sums = sums._replace(state=State(peak, s.mass, s.first, s.spread, s.count, s.moment, s.known))
        return sums if request.groups == 1 else _ungrouped(sums, request)
    if name not in ("", "auto"):
        registry.choose(request, name)  # a backend named by the user that cannot serve says so now
    support, layout = pack(request.terms)
    plan = Plan(layout, request.softcap, request.cap_bias, request.rank, request.statistics, name, request.mean)
    if plain:
        out = _reduce(*tensors, support, *plan.options(), plan.mean)
    else:
        out = _Forward.apply(plan, *tensors, *support)  # type: ignore[no-untyped-call]
    peak, mass, first, spread, count, moment, target, rank = out
    if not request.statistics:
        first = spread = torch.zeros_like(mass)
    given = None if request.value is None else moment
    sums = Sums(
        State(peak.to(request.dtype), mass, first, spread, count, None if request.mean else given),
        None if request.target is None else target,
        rank if request.rank and request.target is not None else None,
        given if request.mean else None,
    )
    return sums if request.groups == 1 else _ungrouped(sums, request)


def _ungrouped(sums: Sums, request: Request) -> Sums:
    """The rows of grouped queries with their heads in one dimension again."""

    def flat(rows: Tensor | None, tail: int = 0) -> Any:
        return None if rows is None else request.ungroup(rows, tail)

    s = sums.state
    known = None if s.known is None else Stats(*map(flat, s.known))
    rows = flat(s.peak), flat(s.mass), flat(s.first), flat(s.spread), flat(s.count)
    state = State(*rows, flat(s.moment, 1), known)
    return Sums(state, flat(sums.target_score), flat(sums.rank), flat(sums.mean, 1))
