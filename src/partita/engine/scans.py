"""What is read off the scores while they stream by, without a gradient: the best of each row, one drawn, some counted.

    top      the k largest scores and their keys
    sample   argmax_j (s_j - log waiting_j), waiting ~ Exp(1): a key drawn from p (the Gumbel-max rule)
    gaps     N_i(edge) = #{ j visible : max_k s_ik - s_ij <= edge }

`gaps` makes the scores twice, once for the largest and once to count, by the same operations in the same order: so the
largest is within 0 of itself whatever was rounded, which the peak of another pass would not promise.
`chosen_scores` makes the scores of chosen keys once more, with a gradient.

In a graph each of the three is an operator of its own name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita._checks import check_no_generator, has_values, shape_text
from partita.engine import backends
from partita.engine.autograd import Context, traceable
from partita.engine.backends import tiled
from partita.engine.operators import arguments, define
from partita.engine.request import Request
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.precision import finest

__all__ = ["chosen_scores", "gaps", "sample", "top"]


def top(request: Request, k: int) -> tuple[Tensor, Tensor]:  # (*b, Q, k) each
    """The k best scores and their keys, best first, without a gradient; past the visible keys -inf and -1."""
    r = traceable(request)
    if torch.compiler.is_compiling():
        score, index = torch.ops.partita.top(*arguments(r, ""), k)
        return score, index
    return _top(r, k, not Context.of(r.tensors()).traced)


@torch.no_grad()
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


def sample(request: Request, generator: torch.Generator | None = None) -> Tensor:  # (*b, Q)
    """One key per row, drawn; -1 on an empty row."""
    r = traceable(request)
    if torch.compiler.is_compiling():  # a graph has no generator: the draw takes its seed from torch's random numbers
        check_no_generator(generator)
        seed = torch.randint(1 << 62, (), device=r.query.device)
        drawn: Tensor = torch.ops.partita.sample(*arguments(r, ""), seed)
        return drawn
    return _sample(r, generator)


@torch.no_grad()
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


def gaps(request: Request, edges: Sequence[float] | Tensor) -> Tensor:  # (*b, Q, E) int64
    """Visible keys within each edge of the row's largest score; 0 on an empty row, and where a visible score is nan."""
    r, given = request, _edges(edges, request.query.device)
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.partita.gaps(*arguments(r, ""), given)
        return found
    return _gaps(r, given, not Context.of(r.tensors()).traced)


@torch.no_grad()
def _gaps(request: Request, edges: Tensor, kernels: bool = True) -> Tensor:
    edges = edges.to(request.dtype)
    kernel = backends.choose(request).gaps if kernels else None
    known = None if kernel is None else kernel(request, edges)
    if known is not None:
        return known
    if not len(edges):
        return torch.zeros((*request.batch, request.n_query, 0), dtype=torch.int64, device=request.query.device)
    twice = zip(tiled.score_tiles(request), tiled.score_tiles(request), strict=True)
    return torch.cat([_count(request, rows, first, again, edges) for (rows, first), (_, again) in twice], -2)


def _count(request: Request, rows: slice, first: tiled.Tiles, again: tiled.Tiles, edges: Tensor) -> Tensor:
    shape = (*request.batch, rows.stop - rows.start)
    peak = request.scale.new_full((*shape, 1), -torch.inf)
    for _, s in first:
        peak = torch.maximum(peak, s.amax(-1, keepdim=True))  # nan stays
    count = torch.zeros((*shape, len(edges)), dtype=torch.int64, device=request.query.device)
    for _, s in again:
        gap = torch.where(s == peak, 0.0, peak - s)  # +inf has no distance from itself, and is the largest all the same
        gap = torch.where(s.isneginf(), torch.nan, gap)
        # one edge at a time: all of them would take the memory of that many tiles
        count = count + torch.stack([(gap <= edge).sum(-1) for edge in edges], -1)
    return count


def _edges(edges: Sequence[float] | Tensor, device: torch.device) -> Tensor:
    """The edges as a vector of numbers that are not negative; +inf may be one of them."""
    if not isinstance(edges, Tensor):
        try:
            edges = torch.tensor(list(edges), dtype=finest(device), device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DtypeError(f"edges must be a sequence of numbers or a 1-D tensor; got {edges!r}.") from error
    example = "Give one number per distance below the row's maximum: gaps([0.0, 1.0, 2.0])."
    if edges.dim() != 1:
        raise ShapeError(f"edges must be a sequence of numbers or a 1-D tensor; got {shape_text(edges)}. {example}")
    if edges.is_complex() or edges.dtype == torch.bool:
        raise DtypeError(f"edges must be real numbers; got {edges.dtype}. {example}")
    if has_values(edges) and bool((~(edges >= 0)).any()):
        wrong = edges[~(edges >= 0)][0].item()
        raise ValueRangeError(f"edges must be numbers that are not negative; got {wrong!r} among them. {example}")
    return edges.to(device)


def chosen_scores(request: Request, index: Tensor) -> Tensor:  # (*b, Q, k)
    """Scores of chosen keys, differentiable; the keys are gathered. -inf, without a gradient, where the index is -1."""
    missing, index = index < 0, index.clamp(min=0)
    batch, (n, k) = request.batch, index.shape[-2:]
    if not request.n_key:  # nothing to choose from: a key of zeros stands in, so that its gradient is 0 and not absent
        pad = torch.nn.functional.pad
        bias = None if request.bias is None else pad(request.bias[..., :0], (0, 1))
        request = replace(request, key=pad(request.key, (0, 0, 0, 1)), bias=bias)
    key = request.key.expand(*batch, *request.key.shape[-2:]).to(request.dtype)
    flat = index.reshape(*batch, n * k, 1).expand(*batch, n * k, key.shape[-1])
    # a key of zeros is in the place of a missing one: a hidden key may be nan, and so would its gradient be
    chosen = key.gather(-2, flat).unflatten(-2, (n, k)).masked_fill(missing[..., None], 0.0)
    query = request.query.to(request.dtype)
    if request.pairs is None:
        score = ((query * request.scale[..., None])[..., None, :] * chosen).sum(-1)
    else:
        score = request.pairs(query[..., None, :], chosen).squeeze(-2) * request.scale[..., None]
    bias = None
    if request.bias is not None:
        bias = request.bias.expand(*batch, n, request.n_key).gather(-1, index).to(score.dtype)
    return request.capped(score, bias)[0].masked_fill(missing, -torch.inf)


# ---- as operators ---------------------------------------------------------------------------------------------------


def _empty(r: Request, *more: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return r.query.new_empty((*r.batch, r.n_query, *more), dtype=dtype)


def _drawn(r: Request, _: Any, seed: Tensor) -> Tensor:
    return _sample(r, torch.Generator(seed.device).manual_seed(int(seed)))


define(
    "top",
    "SymInt k",
    "(Tensor, Tensor)",
    lambda r, _, k: _top(r, k),
    lambda r, _, k: (_empty(r, k, dtype=r.dtype), _empty(r, k)),
)
define("sample", "Tensor seed", "Tensor", _drawn, lambda r, *_: _empty(r))
define(
    "gaps",
    "Tensor edges",
    "Tensor",
    lambda r, _, edges: _gaps(r, _edges(edges, edges.device)),
    lambda r, _, edges: _empty(r, edges.shape[0]),
)
