"""How many keys score higher than a level that need not be the score of any of them.

The level becomes the score of one more key, in one more dimension, so that the pass that ranks a target serves:

    query' = (query, level / scale)        keys' = (key_j, 0) and (0, 1)        target = the last key

A copy of the target's key on another rank ties with it and must not count. Its score may differ in the last digits,
since every rank adds up in tiles of its own; so the level is raised by what rounding can do.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from partita.distributed.parts import cut_keys, visibility
from partita.engine.execute import forward
from partita.engine.request import Request

__all__ = ["count_above"]

_FAR = 1e30


@torch.no_grad()
def count_above(request: Request, level: Tensor) -> Tensor:  # (*b, Q) int64
    """Visible keys of the request whose score is above its row's level; nan counts none, -inf all."""
    total = torch.zeros((*request.batch, request.n_query), dtype=torch.int64, device=request.query.device)
    for part in cut_keys(request):  # with one more dimension the keys are copied: a part at a time
        total += _count(part, level)
    return total


def _count(request: Request, level: Tensor) -> Tensor:
    dtype, n = request.dtype, request.n_key
    query, key, scale = request.query.to(dtype), request.key.to(dtype), request.scale
    size = torch.linalg.vector_norm(query, dim=-1) * scale.abs()
    longest = torch.linalg.vector_norm(key, dim=-1).amax(-1, keepdim=True)
    slack = 4 * torch.finfo(dtype).eps * (size * longest + level.abs().nan_to_num(0.0, 0.0, 0.0))
    level = (level + slack.nan_to_num(0.0, 0.0, 0.0)).nan_to_num(_FAR, _FAR, -_FAR)
    cap, bias = request.softcap, request.bias
    shift = torch.zeros_like(level)
    if bias is not None and bias.shape[-1] == 1:  # the same for every key: it goes to the level's side
        shift, bias = bias[..., 0].to(dtype).nan_to_num(nan=0.0, neginf=-_FAR), None
    capped_too = cap is not None and request.cap_bias
    level = level if capped_too else level - shift
    if cap is not None:
        most = 1 - torch.finfo(dtype).eps
        level = cap * torch.atanh((level / cap).clamp(-most, most))
    level = level - shift if capped_too else level
    batch = request.batch
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    last = torch.where(scale == 0, torch.zeros_like(level), level / safe)
    query = torch.cat([query.expand(*batch, *query.shape[-2:]), last.expand(*batch, last.shape[-1])[..., None]], -1)
    longer = torch.zeros(*key.shape[:-2], n + 1, key.shape[-1] + 1, dtype=dtype, device=key.device)
    longer[..., :n, :-1] = key
    longer[..., n, -1] = 1.0
    if bias is not None:
        bias = torch.nn.functional.pad(bias, (0, 1))
    target = torch.full(query.shape[:-1], n, dtype=torch.int64, device=query.device)
    asked = replace(
        request,
        query=query,
        key=longer,
        value=None,
        bias=bias,
        target=target,
        terms=visibility(request).one_more_key().terms,
        rank=True,
        statistics=False,
    )
    rank = forward(asked).rank
    assert rank is not None
    return rank
