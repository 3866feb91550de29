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

from partita.distributed._ring.blocks import Parts, steps
from partita.engine import execute
from partita.engine.request import Request
from partita.engine.state import filled
from partita.engine.visibility import Visibility

__all__ = ["count_above"]

_FAR = 1e30


@torch.no_grad()
def count_above(request: Request, level: Tensor) -> Tensor:  # (*b, Q) int64
    """Visible keys of the request whose score is above its row's level; nan counts none, -inf all."""
    total = torch.zeros((*request.batch, request.n_query), dtype=torch.int64, device=request.query.device)
    for part in _cut_keys(request):  # with one more dimension the keys are copied: a part at a time
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
    last = torch.where(scale == 0, torch.zeros_like(level), level / filled(scale))
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
        terms=_visibility(request).one_more_key().terms,
        rank=True,
        statistics=False,
    )
    rank = execute.forward(asked).rank
    assert rank is not None
    return rank


def _visibility(request: Request) -> Visibility:
    return Visibility(request.terms, request.n_query, request.n_key, request.batch, request.query.device)


def _cut_keys(request: Request) -> list[Request]:
    """The same rows over one part of the keys after the other; parts that nobody sees are left out."""
    n = request.n_key
    parts = Parts.of([request.key], n).n_keys
    if parts == 1:
        return [request]
    seen, found = _visibility(request), []
    for keys in steps(n, parts):
        terms = seen.cut(keys=keys).shown()
        if terms is None:
            continue
        bias = request.bias
        if bias is not None and bias.shape[-1] != 1:
            bias = bias[..., keys]
        value = None if request.value is None else request.value[..., keys, :]
        found.append(replace(request, key=request.key[..., keys, :], value=value, bias=bias, terms=terms))
    return found
