"""The pass and its gradients as two opaque torch operators.

`partita::reduce` and `partita::reduce_backward` hide the backend, so that torch.compile sees one node and vmap one more
batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library

from partita.engine import registry
from partita.engine.request import Request
from partita.engine.terms import unpack
from partita.engine.tile import Upstream
from partita.precision import no_autocast

__all__ = ["OPERANDS", "Plan", "reduce", "reduce_backward", "request_of", "whole_upstream"]

OPERANDS = ("query", "key", "value", "scale", "bias")


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
        self.needs = needs or [False] * len(OPERANDS)  # which operands want a gradient

    def options(self) -> tuple[list[int], float | None, bool, bool, bool, str]:
        return self.layout, self.softcap, self.cap_bias, self.rank, self.statistics, self.backend

    def asking(self, needs: list[bool]) -> Plan:
        """The same plan, for a backward pass that must give these gradients."""
        layout, softcap, cap_bias, rank, statistics, backend = self.options()
        return Plan(layout, softcap, cap_bias, rank, statistics, backend, self.mean, needs)


def request_of(
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


@library.custom_op("partita::reduce", mutates_args=())
def reduce(
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
    request = request_of(tensors, layout, softcap, cap_bias, rank, statistics, mean)
    with no_autocast(query):
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


@reduce.register_fake
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
    request = request_of(
        (query, key, value, scale, bias, target, *support), layout, softcap, cap_bias, rank, statistics
    )
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


@library.custom_op("partita::reduce_backward", mutates_args=())
def reduce_backward(
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
    request = request_of(tensors, layout, softcap, cap_bias, False, statistics)
    g = whole_upstream(request, (g_mass, g_first, g_second, g_moment, g_target))
    with no_autocast(query):
        total = _backend(request, backend).backward(request, peak, g, tuple(needs))
    return [
        total[name].to(t.dtype)
        for name, t in zip(OPERANDS, tensors[:5], strict=True)
        if name in total and t is not None
    ]


@reduce_backward.register_fake
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


def whole_upstream(request: Request, given: Sequence[Tensor | None]) -> Upstream:
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
