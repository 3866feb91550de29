"""Plain attention in a graph that nobody differentiates, decoding above all: one operator that goes the short way.

    partita::attention(query, key, value, scale, causal, grouped, statistics) -> (out, statistics of rows)

`partita::reduce` serves every question there is, and for one query its request costs more than its pass. Here the graph
asks at run time what a call without a graph asks: a backend's own kernel, and the long way where it has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from partita._checks import finite
from partita.attn.problem import distribution
from partita.engine import Stats
from partita.gibbs import plain_attention
from partita.precision import accumulation_dtype, autocasts

__all__ = ["in_graph"]


def in_graph(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool, grouped: bool, statistics: bool
) -> tuple[Tensor, Stats | None] | None:
    """As `plain_attention`, while a graph is traced; None for the long way, which serves it or says what is wrong."""
    if not _usual(query, key, value, scale, grouped):
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None  # the long way keeps what its gradients are made from
    out, rows = torch.ops.partita.attention(query, key, value, scale, causal, grouped, statistics)
    return out, Stats(*rows.unbind()) if statistics else None


def _usual(query: Tensor, key: Tensor, value: Tensor, scale: float | None, grouped: bool) -> bool:
    """Nothing broadcasts, nothing is converted, nothing is wrong, and the processor has a kernel for it."""
    if query.device.type != "cpu" or autocasts("cpu") or not (query.dim() == key.dim() == value.dim() >= 3):
        return False
    if not (query.dtype == key.dtype == value.dtype and query.is_floating_point()):
        return False
    if scale is not None and not finite(scale):
        return False
    q, k, v = query.shape, key.shape, value.shape
    heads = q[-3] % k[-3] == 0 if grouped and k[-3] > 0 else q[-3] == k[-3]
    return bool(q[:-3] == k[:-3] and heads and q[-1] == k[-1] and k[:-1] == v[:-1])


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool, grouped: bool, statistics: bool
) -> tuple[Tensor, Tensor]:
    found = plain_attention(query, key, value, scale, causal, grouped, statistics)
    out, stats = _long(query, key, value, scale, causal, grouped, statistics) if found is None else found
    return out.contiguous(), out.new_empty(0) if stats is None else torch.stack(stats)


def _long(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool, grouped: bool, statistics: bool
) -> tuple[Tensor, Stats | None]:
    p = distribution(query, key, scale=scale, is_causal=causal, enable_gqa=grouped)
    mean, state = p.mean(value, statistics=statistics)
    return mean.to(value.dtype), state.stats() if statistics else None


library.define(
    "partita::attention",
    "(Tensor query, Tensor key, Tensor value, float? scale, bool causal, bool grouped, bool statistics)"
    " -> (Tensor, Tensor)",
)
library.impl("partita::attention", "CompositeExplicitAutograd", _attention)


@library.register_fake("partita::attention")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, scale: Any, causal: bool, grouped: bool, statistics: bool) -> Any:
    rows, dtype = query.shape[:-1], accumulation_dtype(query.dtype)
    stats = query.new_empty((len(Stats._fields), *rows) if statistics else (0,), dtype=dtype)
    return value.new_empty((*rows, value.shape[-1])), stats


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """For a program that was exported without gradients and is asked for them: the long way, from the start."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        out, stats = _long(*given, *ctx.options)
        results = [out] if stats is None else [out, torch.stack(stats)]
        asked = [(x, g) for x, g in zip(results, grads, strict=False) if g is not None]
        found = torch.autograd.grad([x for x, _ in asked], given, [g for _, g in asked], allow_unused=True)
    return (*found, None, None, None, None)


library.register_autograd("partita::attention", _backward, setup_context=_remember)
