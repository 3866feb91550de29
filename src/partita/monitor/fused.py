"""Attention that reports its row statistics in the pass it makes anyway, in place of a second pass beside it.

Only where the native backend serves plain float32 on a processor: forward by partita (the same numbers within
rounding, in torch's memory layout), backward by torch's own kernel from the saved log Z. Everything else keeps the
user's kernel, and its statistics are computed beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from partita import Gibbs, Stats, backend, explain, support

FIELDS = Stats._fields


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, ...]:
        out, stats = _pass(query, key, value, causal, scale)
        ctx.causal, ctx.scale = causal, scale
        ctx.save_for_backward(query, key, value, out, stats.log_partition)
        ctx.mark_non_differentiable(*stats)
        ctx.set_materialize_grads(False)
        return (out, *stats)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        query, key, value, out, log_z = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = kernel(grad, query, key, value, out, log_z, 0.0, ctx.causal, scale=ctx.scale)
        return (*found, None, None)


def _pass(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Stats]:
    sharp = query.shape[-1] ** -0.5 if scale is None else scale
    seen = support.causal() if causal else None
    mean, state = Gibbs(query, key, scale=sharp, support=seen).mean(value)
    # torch's kernel keeps the query's order of dimensions in memory: code after it may rely on that when it calls view
    like = torch.empty_like(query)
    return mean if mean.stride() == like.stride() else like.copy_(mean), state.stats()


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Stats]:
    """Equal to F.scaled_dot_product_attention within rounding, and the statistics of its rows."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out, *stats = _Seen.apply(query, key, value, causal, scale)  # type: ignore[no-untyped-call]
        return out, Stats(*stats)
    with torch.no_grad():
        return _pass(query, key, value, causal, scale)


def can_serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Plain attention that torch would give to its flash kernel for processors."""
    plain = attn_mask is None and dropout_p == 0.0 and not enable_gqa
    if not plain or query.dim() != 4 or query.shape[:2] != key.shape[:2] or query.shape[-1] != value.shape[-1]:
        return False
    if any(t.device.type != "cpu" or t.dtype != torch.float32 or type(t) not in PLAIN for t in (query, key, value)):
        return False
    if is_causal and query.shape[2] != key.shape[2]:
        return False
    if query.shape[2] < 64:  # nothing to win, and small models keep their exact bits
        return False
    flash = torch.backends.cuda.flash_sdp_enabled() and not torch.is_autocast_enabled("cpu")
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    return flash and not inside and not torch.is_inference_mode_enabled() and _native(query.shape[-1])


PLAIN = (Tensor, torch.nn.Parameter)


def _native(dim: int) -> bool:
    return backend() in ("auto", "native") and _serves(dim)


@functools.cache
def _serves(dim: int) -> bool:
    one = torch.zeros(1, dim)
    return str(explain(Gibbs(one, one))).startswith("native serves")
