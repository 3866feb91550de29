"""QK-clip: heads whose scores grew too large get smaller query and key weights (MuonClip)."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.engine import Stats
from partita.errors import ShapeError, ValueRangeError
from partita.nn.attention import MultiheadAttention

__all__ = ["qk_clip_"]


@torch.no_grad()
def qk_clip_(module: MultiheadAttention, seen: Stats | Tensor, tau: float = 100.0) -> Tensor:  # (heads,)
    """Shrink, in place, the heads whose largest score passed tau; gives each head's factor on its scores.

        factor_h = min(1, tau / max score of head h)         W_Q^h, W_K^h <- sqrt(factor_h) * W_Q^h, W_K^h

    seen: the Stats of a pass, or their max_score, (..., heads, n_query); or one number per head, (heads,). With grouped
    queries a key head takes the square root of its group's largest factor, each query head the rest, so that heads with
    factor 1 keep their bits. Biases shrink too, so scores shrink exactly by the factor, whatever the policy; what is
    added to scores (masks, sinks) does not. For any model, while it trains: `partita.control.QKClip`.

    >>> layer = MultiheadAttention(4, 2)
    >>> qk_clip_(layer, torch.tensor([50.0, 400.0]))
    tensor([1.0000, 0.2500])
    """
    if not tau > 0:
        raise ValueRangeError(f"tau must be positive; got {tau!r}.")
    if module.q_norm is not None:
        raise ValueRangeError("qk_clip_ has nothing to clip under qk_norm: the norm undoes the weights' size.")
    if module.bias_k is not None:
        raise ValueRangeError("qk_clip_ does not know how to share bias_k between heads and its extra key.")
    top = seen.max_score if isinstance(seen, Stats) else seen
    heads, groups = module.num_heads, module.num_heads // module.kv_heads
    if top.dim() >= 2:
        top = top.movedim(-2, 0).flatten(1).amax(1)
    if top.shape != (heads,):
        raise ShapeError(f"seen must have {heads} heads second from the right; got {tuple(top.shape)}.")
    # tensor by tensor: torch takes number / tensor as a product with the reciprocal, and tau / tau would not be 1
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
