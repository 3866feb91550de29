"""Plain attention without a graph, straight to the native kernel.

For a short sequence the request, its checks and the memory of a distribution cost as much as the pass. Here only what
is usual is looked for, and whatever else is given goes the long way, which serves it or says what is wrong with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from partita.engine import registry
from partita.engine.backends import native
from partita.engine.run import nobody_differentiates, nobody_looks
from partita.engine.state import Stats, autocasts

__all__ = ["attend"]


def attend(
    query: Tensor,  # (*b, heads, Q, D)
    key: Tensor,  # (*b, heads or fewer, K, D)
    value: Tensor,  # (*b, as key, K, V)
    scale: float | None,
    causal: bool,
    grouped: bool,
    statistics: bool,
) -> tuple[Tensor, Stats | None] | None:
    """E[value_j] of each row, lying in memory as the query does, and the rows' statistics; None for the long way."""
    if torch.compiler.is_compiling():
        return None
    tensors = (query, key, value)
    if not (nobody_looks(tensors) and _usual(query, key, value) and nobody_differentiates(tensors)):
        return None
    if registry.current() not in ("auto", "native") or autocasts("cpu"):
        return None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[-3] // key.shape[-3]
    if not math.isfinite(scale) or (groups > 1 and not grouped):
        return None
    return native.attention(query, key, value, scale, causal, statistics)


def _usual(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Float CPU tensors with a head dimension, equal batch dimensions, and heads that key heads divide."""
    dims, dtype = query.dim(), query.dtype
    if dims < 3 or key.dim() != dims or value.dim() != dims or dtype not in (torch.float32, torch.float64):
        return False
    if key.dtype != dtype or value.dtype != dtype or not (query.is_cpu and key.is_cpu and value.is_cpu):
        return False
    (*lead, heads, n_query, dim), (*key_lead, key_heads, n_key, key_dim) = query.shape, key.shape
    return (
        lead == key_lead
        and value.shape[:-1] == key.shape[:-1]
        and key_dim == dim
        and min(key_heads, n_query, n_key, dim, value.shape[-1], *lead) > 0
        and heads % key_heads == 0
    )
