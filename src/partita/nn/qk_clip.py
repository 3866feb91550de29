"""QK-clip: smaller query and key weights for heads with too large scores (MuonClip)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.engine import Stats
from partita.errors import ShapeError, ValueRangeError
from partita.nn.attention import MultiheadAttention

__all__ = ["holds", "qk_clip_", "why_unfit"]


def holds(module: nn.Module, name: str) -> bool:
    """Whether a module has such a weight, without reading a property: under spectral_norm that has side effects."""
    for place in (module._parameters, module.__dict__):
        if name in place:
            return place[name] is not None
    return getattr(type(module), name, None) is not None


def why_unfit(module: nn.Module, name: str, size: int = 0) -> str | None:
    """Why a weight of a module cannot be multiplied in place; None for its own trainable parameter of `size` rows.

    It may be another module's (the base layer under a low-rank update), made from other parameters (a parametrisation),
    frozen, or packed.
    """
    given, kind = module._parameters.get(name), f"{type(module).__module__.partition('.')[0]}.{type(module).__name__}"
    if given is None:
        return f"the {name} of a {kind} is no parameter of its own but made from others, or another module's"
    stored = type(given).__name__  # a plain Tensor: a view that FSDP's older class puts in place of a parameter
    if stored not in ("Parameter", "DTensor", "Tensor") or not given.is_floating_point():
        return f"the {name} of a {kind} is stored as a {stored} of {given.dtype}, not as plain numbers"
    if stored != "Tensor" and not given.requires_grad:
        return f"the {name} of a {kind} is frozen (requires_grad is False)"
    if max(given.shape, default=0) < size:
        return f"the {name} of a {kind} has the shape {tuple(given.shape)}, which does not hold {size} rows"
    return None


@torch.no_grad()
def qk_clip_(module: MultiheadAttention, seen: Stats | Tensor, tau: float = 100.0) -> Tensor:  # (heads,)
    """Shrink, in place, the heads whose largest score exceeds tau; returns each head's factor on its scores.

        factor_h = min(1, tau / max score of head h)         W_Q^h, W_K^h <- sqrt(factor_h) * W_Q^h, W_K^h

    seen: the Stats of a pass, or their max_score, (..., heads, n_query); or one number per head, (heads,). With grouped
    queries a key head takes the square root of its group's largest factor and each query head the rest, so heads with
    factor 1 do not change. Biases shrink too; masks and sinks do not. For any model: `partita.control.QKClip`.

    >>> layer = MultiheadAttention(4, 2)
    >>> qk_clip_(layer, torch.tensor([50.0, 400.0]))
    tensor([1.0000, 0.2500])
    """
    if not tau > 0:
        raise ValueRangeError(f"tau must be positive; got {tau!r}.")
    if module.q_norm is not None:
        raise ValueRangeError("qk_clip_ has nothing to clip under qk_norm: the norm undoes the weights' size.")
    if module.bias_k is not None:
        raise ValueRangeError("qk_clip_ cannot share bias_k between heads and its extra key.")
    for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "in_proj_bias"):
        if holds(module, name) and name not in module._parameters:  # a frozen weight is allowed
            raise ValueRangeError(f"qk_clip_ cannot shrink this module: {why_unfit(module, name)}.")
    top = seen.max_score if isinstance(seen, Stats) else seen
    heads, groups = module.num_heads, module.num_heads // module.kv_heads
    if top.dim() >= 2:
        top = top.movedim(-2, 0).flatten(1).amax(1)
    if top.shape != (heads,):
        raise ShapeError(f"seen must have {heads} heads second from the right; got {tuple(top.shape)}.")
    # tensor by tensor: torch computes number / tensor with the reciprocal, and tau / tau would not be 1
    factor = (torch.full_like(top, tau) / top.clamp(min=tau)).nan_to_num(1.0)
    key = factor.unflatten(0, (-1, groups)).amax(1).sqrt()
    query = factor / key.repeat_interleave(groups)
    weights, biases = module.projections()
    for part, share in ((0, query), (1, key)):
        rows = share.repeat_interleave(module.head_dim)
        weights[part].mul_(rows[:, None].to(weights[part]))
        bias = biases[part]
        if bias is not None:
            bias.mul_(rows.to(bias))
    return factor
