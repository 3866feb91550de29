"""Attention between rotated queries and keys, with distances that may stop growing.

    score_ij = scale <rotate(query_i, clamp(i - j, -reach, reach)), key_j>

Keys within reach have ordinary rotary scores. Keys further back are all at one distance, so they are one more pass with
the query rotated and the keys as they are; keys further ahead are another. The passes merge exactly (M-GIB-9).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from partita import support as supports
from partita._checks import check_pair, check_whole
from partita.attn.positions import Positions, RopeFrequencies, Rotary
from partita.attn.problem import Problem, both
from partita.attn.sdpa import attention, finish
from partita.engine import State, Stats
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.scale import TargetEntropy
from partita.support import Support

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from partita.attn.problem import Options

__all__ = ["rope_attention", "rotary_attention", "rotary_weights"]


def rotary_attention(
    query: Tensor,  # (..., heads, n_query, dim), not yet rotated
    key: Tensor,  # (..., heads, n_key, dim), not yet rotated
    value: Tensor,
    positions: Positions | None = None,
    *,
    where: int | Tensor = 0,
    sink: Tensor | None = None,
    return_stats: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Stats]:
    """Attention whose queries and keys are rotated by their positions; takes the options of `attention`.

        score_ij = scale <rotate(query_i, i), rotate(key_j, j)>          distances clipped if the setting clips

    positions: a setting such as `attn.YaRN(4.0, 512)` or `attn.Clipped(511)`; None is `attn.Rotary()`.
    where: the position of the first query among the keys (with a cache: how many keys came before), or of every query,
        broadcastable to the rows (..., n_query).

    >>> x = torch.eye(2)[None]
    >>> rotary_attention(torch.zeros(1, 2, 2), x, x, Rotary(), is_causal=True)
    tensor([[[1.0000, 0.0000],
             [0.5000, 0.5000]]])
    """
    given = Rotary() if positions is None else positions
    if not isinstance(given, Positions):
        raise DtypeError(f"positions must be a setting of partita.attn such as Rotary(); got {given!r}.")
    check_pair(query, key)
    rope = given.rope(query.shape[-1], query.device)
    return rope_attention(query, key, value, rope, where=where, sink=sink, return_stats=return_stats, **options)


def rope_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope: RopeFrequencies,
    *,
    where: int | Tensor = 0,
    sink: Tensor | None = None,
    return_stats: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Stats]:
    """`rotary_attention` for given frequencies."""
    if rope.reach is None:
        n_query, n_key = query.shape[-2], key.shape[-2]
        own, keys = _places(where, n_query, query.device), torch.arange(n_key, device=key.device)
        q, k = rope(query, own), rope(key, keys)
        out: Tensor | tuple[Tensor, Stats] = attention(q, k, value, sink=sink, return_stats=return_stats, **options)
        return out
    parts = _parts(_problem(query, key, value, options), rope, where)
    states = [part.state(value[..., keys, :], statistics=return_stats) for part, keys in parts]
    return finish(functools.reduce(State.merge, states), value, sink, return_stats)


def rotary_weights(
    query: Tensor, key: Tensor, positions: Positions, **options: Unpack[Options]
) -> Tensor:  # (..., n_query, n_key)
    """The weights of `rotary_attention` under clipped distances: dense, for small problems."""
    rope = positions.rope(query.shape[-1], query.device)
    parts = list(_parts(_problem(query, key, key, options), rope, 0))
    total = functools.reduce(State.merge, (part.state() for part, _ in parts)).log_partition()
    level = torch.where(total.isneginf(), torch.zeros_like(total), total)
    weights = query.new_zeros(*total.shape, key.shape[-2])
    for part, keys in parts:
        share = (part.log_partition() - level).exp()[..., None].to(query.dtype)
        weights = weights + F.pad(part.probs() * share, (keys.start, key.shape[-2] - keys.stop))
    return weights


def _problem(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Problem:
    """The call as one problem with the scale of every row: a policy counts near and far keys together."""
    if isinstance(options.get("scale"), TargetEntropy):
        raise ValueRangeError("TargetEntropy solves for plain scores; with clipped distances use another policy.")
    problem = Problem.of(query, key, **options)
    if problem.rule is not None:
        raise ValueRangeError("clipped distances take a bias as a tensor: bias=rule.dense(n_query, n_key, query).")
    return problem.ready(value)


def _places(where: int | Tensor, n_query: int, device: torch.device) -> Tensor:  # (..., n_query)
    if not isinstance(where, Tensor):
        check_whole("where", where)
        return torch.arange(n_query, device=device) + where
    if where.dim() < 1 or where.shape[-1] not in (1, n_query) or where.is_floating_point():
        raise ShapeError(
            f"where must be a whole number, or whole numbers that broadcast to the {n_query} queries; "
            f"got {where.dtype} {tuple(where.shape)}."
        )
    return where


def _parts(problem: Problem, rope: RopeFrequencies, where: int | Tensor) -> Iterator[tuple[Gibbs, slice]]:
    """Keys within reach, further back, and further ahead, each with the slice of keys it was cut to."""
    reach, query, n_query, n_key = rope.reach, problem.query, problem.n_query, problem.n_key
    assert reach is not None
    own = _places(where, n_query, query.device)
    near, back, ahead = _bands(own, where, reach, n_key)
    first, last = 0, n_key  # keys within reach of some query
    behind, beyond = n_key, 0  # keys behind some query's reach end here, those beyond it begin here
    if not isinstance(where, Tensor) and not torch.compiler.is_compiling():
        first, last = min(max(where - reach, 0), n_key), min(where + n_query + reach, n_key)
        behind, beyond = min(max(where + n_query - 1 - reach, 0), n_key), min(where + reach + 1, n_key)
    # a part of no keys adds nothing; the nearest one is always there, so that there is a state
    cut = slice(first, max(last, first))
    part = replace(problem, support=both(problem.support, near)).keys(cut)
    k = rope(part.key, torch.arange(cut.start, cut.stop, device=query.device))
    yield replace(part, query=rope(query, own), key=k).gibbs(), cut
    for side, cut, distance in ((back, slice(0, behind), reach), (ahead, slice(beyond, n_key), -reach)):
        if torch.compiler.is_compiling() or cut.stop > cut.start:
            part = replace(problem, support=both(problem.support, side)).keys(cut)
            k = part.key if rope.amplitude == 1.0 else part.key * rope.amplitude
            yield replace(part, query=rope.by(query, distance), key=k).gibbs(), cut


def _bands(own: Tensor, where: int | Tensor, reach: int, n_key: int) -> tuple[Support, Support, Support]:
    """Keys within reach, further back, further ahead: bands, or masks where every query has a place of its own."""
    if not isinstance(where, Tensor):
        near = supports.window(reach - where, reach + where)
        return near, supports.window(None, where - reach - 1), supports.window(-(where + reach + 1), None)
    distance = own[..., None] - torch.arange(n_key, device=own.device)
    return supports.mask(distance.abs() <= reach), supports.mask(distance > reach), supports.mask(distance < -reach)
