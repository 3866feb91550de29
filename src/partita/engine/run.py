"""One differentiable pass over a request, by the shortest way that nobody can tell from the long one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from partita.engine import registry
from partita.engine.derivatives import Forward
from partita.engine.ops import Plan, reduce
from partita.engine.request import Request
from partita.engine.state import State, Stats
from partita.engine.terms import pack
from partita.engine.tiled import Sums
from partita.precision import no_autocast

__all__ = ["nobody_differentiates", "nobody_looks", "run"]

_ORDINARY = (Tensor, torch.nn.Parameter)


def nobody_differentiates(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nobody differentiates or transforms this pass, so that the operator can be called without ceremony."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors[:5]):
        return False
    if torch.compiler.is_compiling():
        return True
    # in forward mode too the Function is asked: it has no such derivative and says so, where the operator would lose it
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def nobody_looks(tensors: Sequence[Tensor | None]) -> bool:
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
    plain = nobody_differentiates(tensors)
    if plain and nobody_looks(tensors) and not request.query.is_meta:
        with no_autocast(request.query), torch.no_grad():
            sums = registry.choose(request, name).forward(replace(request, last=True))
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
        out = reduce(*tensors, support, *plan.options(), plan.mean)
    else:
        out = Forward.apply(plan, *tensors, *support)  # type: ignore[no-untyped-call]
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
