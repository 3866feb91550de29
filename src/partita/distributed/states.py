"""States of disjoint keys, one on every rank, put together: partition functions add.

    peak = max_r peak_r        mass = sum_r exp(peak_r - peak) mass_r        and so on for every sum

Three small messages per row, whatever the number of keys. A rank with no keys brings the neutral state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from partita.collective import Collective, Fact
from partita.distributed import tree
from partita.distributed.ring import count_above
from partita.engine import State
from partita.engine.backends import tiled
from partita.engine.dispatch import execute
from partita.engine.request import Request
from partita.engine.sums import Sums
from partita.errors import DtypeError
from partita.exactness import in_exact_rows

__all__ = ["merge", "merged", "slices"]


def merge(state: State, group: object) -> State:
    """The state of the keys of all ranks together, for states of the same queries; every rank gets it.

        log Z = log sum_r Z_r

    Exact and differentiable: the gradient on a rank is that of the global numbers with respect to its own keys. The
    queries are the same on every rank, so their gradient comes in parts that add up over ranks.
    """
    known = Collective.of(group)
    with known.validate():
        if not isinstance(state, State):
            raise DtypeError(f"merge takes a State, of gibbs.state(); got {type(state).__name__}.")
        given: dict[str, Fact] = {
            "the dtype of the state": state.mass.dtype,
            "the rows of the state": tuple(state.mass.shape),
            "the last dimension of its value": None if state.moment is None else state.moment.shape[-1],
        }
    return merged(state, known.check_same("merge", [], given))


def merged(state: State, known: Collective, statistics: bool = True) -> State:
    """`merge` after the checks; without statistics the moments of the score are left out."""
    if known.size == 1:
        return state
    if in_exact_rows():
        return tree.merged(state, known)
    peak = known.all_reduce(state.peak, dist.ReduceOp.MAX)
    own = state.seen_from(peak)
    rows = [own.mass, own.count, own.first] if statistics else [own.mass, own.count]
    sums = known.total(torch.stack(torch.broadcast_tensors(*rows)))
    mass, count = sums[0], sums[1].detach()
    moment = None if own.moment is None else known.total(own.moment)
    if not statistics:
        nothing = torch.zeros_like(mass)
        return State(peak, mass, nothing, nothing, count, moment)
    merged = State(peak, mass, sums[2], torch.zeros_like(mass), count, moment)
    # The spread about the common mean. The mean is a constant here: it is where the sum of squares is least, so that a
    # change of it changes nothing, and only this rank's own part of its derivative would be seen.
    gap = state.mean_from(peak) - merged.mean_from(peak).detach()
    return replace(merged, spread=known.total(own.spread + own.mass * gap * gap))


def slices(
    known: Collective,
    makes: Sequence[Callable[..., Request]],
    target: Tensor,
    here: Tensor,
    *,
    rank: bool,
    statistics: bool,
) -> Sums:
    """`Collective.slices` for a group."""
    exact, first = in_exact_rows() and target.is_cpu, 0
    parts: list[_Part] = []
    for make in makes:
        request = make(statistics=statistics, argmax=rank)
        mine, n = here & (target >= first) & (target < first + request.n_key), request.n_key
        if n:
            at = torch.where(mine, target - first, torch.zeros_like(target))
            request = make(target=at, rank=rank and not exact, statistics=statistics, argmax=rank)
        parts.append(_Part(request, mine, first, execute(request)))
        first += n
    found = [x.sums for x in parts]
    whole = merged(known.joined([x.state for x in found], State.merge), known, statistics)
    score = known.total(_at_target(parts, found))
    if not rank:
        return Sums.of(whole, score)
    ranks, level = torch.zeros_like(target), score.detach()
    by_tiles = exact and parts[0].request.pairs is None
    if by_tiles:  # scores of all keys, and of the target, by products of one shape
        quiet: dict[str, Any] = {"rank": False, "statistics": False, "argmax": False}
        level = known.added(_at_target(parts, [tiled.forward(replace(x.request, **quiet)) for x in parts]))
    for x in parts if first else ():
        counted = x.sums.rank
        if by_tiles:
            counted = tiled.count_above(x.request, level)
        elif counted is None or not bool(x.mine.all()):
            other = count_above(x.request, level)
            counted = other if counted is None else torch.where(x.mine, counted, other)
        ranks = ranks + counted
    return Sums.of(whole, score, known.added(ranks))._replace(argmax=_best_key(parts, known))


class _Part(NamedTuple):
    """A rank's slice of the keys, or a leaf of it."""

    request: Request
    mine: Tensor  # rows whose target is here
    first: int  # its first key in the slice
    sums: Sums


def _at_target(parts: Sequence[_Part], found: Sequence[Sums]) -> Tensor:
    """The score of the target of every row, 0 where it is on another rank."""
    total = torch.zeros_like(found[0].mass)
    for x, sums in zip(parts, found, strict=True):
        if sums.target_score is not None:
            total = torch.where(x.mine, sums.target_score, total)
    return total


@torch.no_grad()
def _best_key(parts: Sequence[_Part], known: Collective) -> Tensor:  # (..., Q)
    """The first key, in the whole, of the largest score; of leaves and ranks that tie, the first."""
    before = sum(known.sizes[0][: known.rank])
    scores = torch.stack([x.sums.peak.double() for x in parts])
    keys = []
    for x in parts:
        assert x.sums.argmax is not None
        keys.append(torch.where(x.sums.argmax < 0, x.sums.argmax, x.sums.argmax + (before + x.first)))
    best = scores.argmax(0, keepdim=True)
    own, at = (t.gather(0, best)[0] for t in (scores, torch.stack(keys)))
    best = torch.stack(known.all_gather(own)).argmax(0, keepdim=True)
    return torch.stack(known.all_gather(at)).gather(0, best)[0]
