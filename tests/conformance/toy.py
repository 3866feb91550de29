"""A backend in seventy lines: every score and every product written out. It shows what adding one takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from partita.engine.backends.protocol import Backend
from partita.engine.request import Request
from partita.engine.state import State, centre
from partita.engine.sums import OPERANDS, SumGrads, Sums
from partita.engine.terms import window_mask


def _dense(r: Request) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scores, the softcap's slope, and the keys and values each row sees: nothing hidden enters a product."""
    shape = (*r.batch, r.n_query, r.n_key)
    seen = window_mask(r.terms, slice(0, r.n_query), slice(0, r.n_key), r.query.device) if r.terms else None
    seen = torch.ones((), dtype=torch.bool, device=r.query.device) if seen is None else seen
    seen = (seen if r.bias is None else seen & (r.bias != -torch.inf)).expand(shape)
    keys = torch.where(seen[..., None], r.key.to(r.dtype)[..., None, :, :], 0.0)
    bias = torch.zeros((), dtype=r.dtype) if r.bias is None else torch.where(seen, r.bias.to(r.dtype), 0.0)
    s = r.scale[..., None] * (r.query.to(r.dtype)[..., None, :] * keys).sum(-1) + (bias if r.cap_bias else 0.0)
    t = s.new_zeros(()) if r.softcap is None else torch.tanh(s / r.softcap)
    s = (s if r.softcap is None else r.softcap * t) + (0.0 if r.cap_bias else bias)
    values = None if r.value is None else torch.where(seen[..., None], r.value.to(r.dtype)[..., None, :, :], 0.0)
    return torch.where(seen, s, -torch.inf), 1 - t * t, keys, values


def forward(request: Request) -> Sums:
    s, _, _, values = _dense(request)
    state = State.of(s)
    state = replace(state, known=state.stats() if request.statistics else None)
    moment = None if values is None else (centre(s, state.peak)[1][..., None] * values).sum(-2)
    full = replace(state, moment=moment)
    sums = Sums.of(state, mean=full.expectation()) if request.mean and moment is not None else Sums.of(full)
    sums = sums if request.statistics else sums._replace(first=None, spread=None)
    if request.target is None:
        return sums
    score = s.gather(-1, request.target.expand(s.shape[:-1])[..., None])
    return sums._replace(target_score=score[..., 0], rank=(s > score).sum(-1) if request.rank else None)


def backward(request: Request, peak: Tensor, g: SumGrads, needs: Sequence[bool]) -> dict[str, Tensor]:
    r = request
    s, slope, keys, values = _dense(r)
    c, e = centre(s, peak.to(r.dtype))
    first, second = (0.0 if x is None else x[..., None] for x in (g.first, g.second))
    pull = g.mass[..., None] + first * (1 + c) + second * (2 * c + c * c)
    made = {}
    if values is not None and g.moment is not None and r.value is not None:
        pull = pull + (g.moment[..., None, :] * values).sum(-1)
        made["value"] = (e[..., None] * g.moment[..., None, :]).sum(-3).sum_to_size(r.value.shape)
    ds = e * pull
    if g.target is not None and r.target is not None:
        ds = ds + g.target[..., None] * (torch.arange(r.n_key, device=s.device) == r.target[..., None])
    ds = torch.where(s.isneginf(), 0.0, ds)
    inner = ds * slope  # what reaches the product
    if r.bias is not None:
        made["bias"] = (inner if r.cap_bias else ds).sum_to_size(r.bias.shape)
    toward, query = (inner[..., None] * keys).sum(-2), r.query.to(r.dtype)
    made["query"] = (toward * r.scale[..., None]).sum_to_size(r.query.shape)
    made["scale"] = (toward * query).sum(-1).sum_to_size(r.scale.shape)
    made["key"] = (inner[..., None] * (query * r.scale[..., None])[..., None, :]).sum(-3).sum_to_size(r.key.shape)
    zero = {name: torch.zeros_like(getattr(r, name)) for name in OPERANDS if getattr(r, name) is not None}
    return {name: {**zero, **made}[name] for name, need in zip(OPERANDS, needs, strict=True) if need and name in zero}


BACKEND = Backend("toy", lambda request: None, forward, backward)
