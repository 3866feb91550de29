"""Scores of listed pairs of a row and a key, and the distribution of each row over the keys listed for it.

    s_m = softcap(scale_i <query_i, key_j> + bias_j)        for the m-th pair (i, j)

For sets of keys that differ from row to row: several ids of a row, the ids a sampler kept, a teacher's best. Memory
grows with the number of pairs alone; keys are gathered a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from partita.engine.backends import tiled
from partita.engine.request import Request
from partita.engine.state import State, divided
from partita.precision import accumulation_dtype

__all__ = ["Limits", "Spread", "likely_pairs", "of_rows", "pair_scores", "state_of_pairs"]

_GATHERED = 1 << 20  # numbers of gathered keys at a time
_BEST = 256  # keys of a row that are sorted for top_p before more of them are
_CELLS = 1 << 22  # scores held at a time while the likely ones are looked for


class _Products(torch.autograd.Function):
    """<query_i, key_j> of every pair; the gathered vectors are made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, row: Tensor, col: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, row, col)
        dtype = accumulation_dtype(query.dtype)
        found = [(query[i].to(dtype) * key[j].to(dtype)).sum(-1) for i, j in _blocks(row, col, key)]
        return torch.cat(found) if found else query.new_zeros(0, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        create, (query, key, row, col) = torch.is_grad_enabled(), ctx.saved_tensors
        # added up in the dtype of the sums: a key listed for many rows would lose its small parts in bfloat16
        totals = [torch.zeros_like(x, dtype=grad.dtype) for x in (query, key)]
        blocks = _blocks(row, col, key)
        for (i, j), g in zip(blocks, grad.split([len(i) for i, _ in blocks]), strict=True):
            for k, (at, other) in enumerate(((i, key[j]), (j, query[i]))):
                if ctx.needs_input_grad[k]:
                    part = g[:, None] * other.to(g.dtype)
                    # a second derivative needs the sums before this one too
                    totals[k] = totals[k].index_add(0, at, part) if create else totals[k].index_add_(0, at, part)
        needs = ctx.needs_input_grad
        made = [g.to(x.dtype) if need else None for g, x, need in zip(totals, (query, key), needs, strict=False)]
        return made[0], made[1], None, None


def _blocks(row: Tensor, col: Tensor, key: Tensor) -> list[tuple[Tensor, Tensor]]:
    step = len(row) if torch.compiler.is_compiling() else max(1, _GATHERED // max(1, key.shape[-1]))
    return list(zip(row.split(max(1, step)), col.split(max(1, step)), strict=True)) if len(row) else []


def pair_scores(request: Request, row: Tensor, col: Tensor) -> Tensor:  # (m,)
    """The score of every pair, with gradients to query, key, scale and bias."""
    raw: Tensor = _Products.apply(request.query, request.key, row, col)  # type: ignore[no-untyped-call]
    scale = request.scale if request.scale.shape[-1] == 1 else request.scale[row]
    bias = None
    if request.bias is not None:
        bias = request.bias.expand(request.bias.shape[0], request.n_key)[0][col].to(raw.dtype)
    return request.capped(raw * scale, bias)[0]


def state_of_pairs(score: Tensor, row: Tensor, n_query: int) -> State:
    """What each row knows of the keys listed for it; a key of score -inf is not counted."""
    seen = ~score.isneginf()
    peak = score.new_full((n_query,), -torch.inf).scatter_reduce(0, row, score.detach(), "amax")
    level = torch.where(peak.isneginf(), torch.zeros_like(peak), peak)
    centred = torch.where(seen, score - level[row], torch.zeros_like(score))
    weight = torch.where(seen, centred.exp(), torch.zeros_like(score))

    def total(each: Tensor) -> Tensor:
        return torch.zeros_like(peak).index_add(0, row, each)

    mass, first = total(weight), total(weight * centred)
    spread = total(weight * (centred - divided(first, mass)[row]) ** 2)
    return State(peak, mass, first, spread, total(seen.to(score.dtype)))


class Limits(NamedTuple):
    """What a sampler keeps of a row: the k best, of these the fewest with a mass of top_p, of these the ones at least
    min_p times as likely as the best."""

    top_k: int | None
    top_p: float | None
    min_p: float | None


class Spread(NamedTuple):
    """Keys of the same rows in slices over processes."""

    widest: int  # the largest slice
    rank: int
    joined: Callable[[Tensor], Tensor]  # the tensors of all processes, of one shape, along the last dimension


@torch.no_grad()
def likely_pairs(request: Request, limits: Limits, spread: Spread | None = None) -> tuple[Tensor, Tensor]:  # (m,), (m,)
    """The pairs a sampler keeps, by one product of n_query * n_key, some rows at a time.

    Processes exchange the best of a row: k of each for top_k, one for min_p, for top_p 256 where these suffice.
    """
    spread = spread or Spread(request.n_key, 0, lambda own: own)
    step = max(1, _CELLS // max(1, spread.widest))
    found = []
    for start in range(0, request.n_query, step):
        rows = slice(start, min(start + step, request.n_query))
        s = tiled.scores_whole(of_rows(request, rows))
        wide = pad(s, (0, spread.widest - s.shape[-1]), value=-torch.inf)
        i, j = _kept(wide, limits, spread)[:, : s.shape[-1]].nonzero(as_tuple=True)
        found.append((i + start, j))
    if not found:
        nothing = torch.zeros(0, dtype=torch.int64, device=request.query.device)
        return nothing, nothing
    row, col = (torch.cat(part) for part in zip(*found, strict=True))
    return row, col


def of_rows(request: Request, rows: slice) -> Request:
    """The same for some rows."""
    scale = request.scale if request.scale.shape[-1] == 1 else request.scale[..., rows]
    return replace(request, query=request.query[..., rows, :], scale=scale, target=None)


def _kept(s: Tensor, limits: Limits, spread: Spread) -> Tensor:  # (n, V) bool
    keep, many = torch.ones_like(s, dtype=torch.bool), s.shape[-1]
    if not many:
        return keep
    if limits.top_k is not None:
        best = spread.joined(s.topk(min(limits.top_k, many), -1).values)
        if limits.top_k < max(many, best.shape[-1]):
            keep &= s >= best.topk(limits.top_k, -1).values[:, -1:]
    if limits.top_p is not None and limits.top_p < 1.0:
        keep &= _nucleus(s.masked_fill(~keep, -torch.inf), limits.top_p, spread)
    if limits.min_p is not None and limits.min_p > 0.0:
        peak = spread.joined(s.amax(-1, keepdim=True)).amax(-1, keepdim=True)
        keep &= s >= peak + s.new_tensor(limits.min_p).log()
    return keep


def _nucleus(s: Tensor, top_p: float, spread: Spread) -> Tensor:
    """The fewest keys, best first, whose mass reaches top_p."""
    level = spread.joined(s.logsumexp(-1, keepdim=True)).logsumexp(-1, keepdim=True)
    p = (s - level).exp()
    many = min(_BEST, p.shape[-1])
    while True:  # few are enough for nearly every row; sorting all of them would cost more than the product
        best, at = p.topk(many, -1)
        every, order = spread.joined(best).sort(dim=-1, descending=True, stable=True)
        before = every.cumsum(-1) - every
        first = before < top_p
        # no process may have left out a key above the last that is kept
        last = every.gather(-1, (first.sum(-1, keepdim=True) - 1).clamp(min=0))
        reached = before[:, -1:] + every[:, -1:] >= top_p
        if many == p.shape[-1] or bool((reached & (last >= spread.joined(best[:, -1:]).amax(-1, keepdim=True))).all()):
            own = torch.zeros_like(first).scatter(-1, order, first).narrow(-1, spread.rank * many, many)
            return torch.zeros_like(p, dtype=torch.bool).scatter(-1, at, own)
        many = min(many * 8, p.shape[-1])
