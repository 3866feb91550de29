"""Keys chosen by their scores while streaming: the best of each row, or one drawn at random.

    top      the k largest scores and their keys
    sample   argmax_j (s_j - log waiting_j), waiting ~ Exp(1): a key drawn from p (the Gumbel-max rule)

Neither has a gradient; `chosen_scores` makes the scores of what was chosen once more, with one. Both look at tiles of
scores, whose number depends on sizes, and both are operators where somebody traces: `partita::top` and
`partita::sample` are one node each. A graph has no generator: a draw inside one takes its seed from torch's own random
numbers, which a graph can have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, library

from partita._checks import check_no_generator
from partita.engine import autograd, backends
from partita.engine.autograd import OPERANDS_SCHEMA, PLAN_SCHEMA, Plan
from partita.engine.backends import tiled
from partita.engine.request import Request

__all__ = ["chosen_scores", "sample", "top"]


@torch.no_grad()
def top(request: Request, k: int, *, kernels: bool) -> tuple[Tensor, Tensor]:  # (*b, Q, k) each
    """The k best scores and their keys, best first; past the visible keys -inf and -1. A backend's kernel may serve."""
    if torch.compiler.is_compiling():
        plan, tensors = Plan.of(request, "")
        score, index = torch.ops.partita.top(*tensors[:6], tensors[6:], *plan.options(), k)
        return score, index
    return _top(request, k, kernels)


@torch.no_grad()
def sample(request: Request, generator: torch.Generator | None = None) -> Tensor:  # (*b, Q)
    """One key per row; -1 on an empty row."""
    if torch.compiler.is_compiling():
        check_no_generator(generator)
        plan, tensors = Plan.of(request, "")
        seed = torch.randint(1 << 62, (), device=request.query.device)
        drawn: Tensor = torch.ops.partita.sample(*tensors[:6], tensors[6:], *plan.options(), seed)
        return drawn
    return _sample(request, generator)


def _top(request: Request, k: int, kernels: bool = True) -> tuple[Tensor, Tensor]:
    kernel = backends.choose(request).top if kernels else None
    known = None if kernel is None else kernel(request, k)
    if known is not None:
        return known
    found = [_top_rows(request, rows, tiles, k) for rows, tiles in tiled.score_tiles(request)]
    score, index = zip(*found, strict=True)
    return torch.cat(score, -2), torch.cat(index, -2)


def _top_rows(request: Request, rows: slice, tiles: tiled.Tiles, k: int) -> tuple[Tensor, Tensor]:
    shape = (*request.batch, rows.stop - rows.start, k)
    score = request.scale.new_full(shape, -torch.inf)
    index = torch.full(shape, -1, dtype=torch.int64, device=request.query.device)
    for cols, s in tiles:
        own, at = s.topk(min(k, s.shape[-1]), -1)
        at = torch.where(own.isneginf(), -1, at + cols.start)
        score, order = torch.cat([score, own], -1).topk(k, -1)
        index = torch.cat([index, at], -1).gather(-1, order)
    return score, index


def _sample(request: Request, generator: torch.Generator | None) -> Tensor:
    parts = []
    for rows, tiles in tiled.score_tiles(request):
        shape = (*request.batch, rows.stop - rows.start)
        best = request.scale.new_full(shape, -torch.inf)
        index = torch.full(shape, -1, dtype=torch.int64, device=request.query.device)
        for cols, s in tiles:
            noise = torch.empty_like(s).exponential_(generator=generator).log_()
            top, at = (s - noise).max(-1)
            better = top > best
            best = torch.where(better, top, best)
            index = torch.where(better, at + cols.start, index)
        parts.append(index)
    return torch.cat(parts, -1)


# ---- operators ------------------------------------------------------------------------------------------------------

library.define("partita::top", f"({OPERANDS_SCHEMA}, {PLAN_SCHEMA}, SymInt k) -> (Tensor, Tensor)")
library.define("partita::sample", f"({OPERANDS_SCHEMA}, {PLAN_SCHEMA}, Tensor seed) -> Tensor")


def _read(arguments: Any) -> tuple[Request, Any]:
    plan, tensors, (more,) = autograd.read(arguments)
    return plan.request(tensors), more


@library.impl("partita::top", "CompositeExplicitAutograd")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _top(*_read(arguments))


@library.register_fake("partita::top")  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    r, k = _read(arguments)
    score = r.query.new_empty((*r.batch, r.n_query, k), dtype=r.dtype)
    return score, torch.empty_like(score, dtype=torch.int64)


@library.impl("partita::sample", "CompositeExplicitAutograd")
def _(*arguments: Any) -> Tensor:
    request, seed = _read(arguments)
    return _sample(request, torch.Generator(seed.device).manual_seed(int(seed)))


@library.register_fake("partita::sample")  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> Tensor:
    r, _ = _read(arguments)
    return r.query.new_empty((*r.batch, r.n_query), dtype=torch.int64)


def chosen_scores(request: Request, index: Tensor) -> Tensor:  # (*b, Q, k)
    """Scores of chosen keys, differentiable; the keys are gathered."""
    batch, (n, k) = request.batch, index.shape[-2:]
    if not request.n_key:  # nothing to choose from: a key of zeros stands in, so that its gradient is 0 and not absent
        pad = torch.nn.functional.pad
        bias = None if request.bias is None else pad(request.bias[..., :0], (0, 1))
        request = replace(request, key=pad(request.key, (0, 0, 0, 1)), bias=bias)
    key = request.key.expand(*batch, *request.key.shape[-2:]).to(request.dtype)
    flat = index.reshape(*batch, n * k, 1).expand(*batch, n * k, key.shape[-1])
    chosen = key.gather(-2, flat).unflatten(-2, (n, k))
    query = request.query.to(request.dtype)
    if request.pairs is None:
        score = ((query * request.scale[..., None])[..., None, :] * chosen).sum(-1)
    else:
        score = request.pairs(query[..., None, :], chosen).squeeze(-2) * request.scale[..., None]
    bias = None
    if request.bias is not None:
        bias = request.bias.expand(*batch, n, request.n_key).gather(-1, index).to(score.dtype)
    return request.capped(score, bias)[0]
