"""States of disjoint keys, one on every rank, put together: partition functions add.

    peak = max_r peak_r        mass = sum_r exp(peak_r - peak) mass_r        and so on for every sum

Three small messages per row, whatever the number of keys. A rank with no keys brings the neutral state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from partita.collective import Collective, Fact
from partita.distributed.ring import count_above
from partita.engine import State
from partita.engine.dispatch import execute
from partita.engine.request import Request
from partita.engine.sums import Sums
from partita.errors import DtypeError

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
    known: Collective, make: Callable[..., Request], target: Tensor, here: Tensor, *, rank: bool, statistics: bool
) -> Sums:
    """`Collective.slices` for a group."""
    request = make(statistics=statistics, argmax=rank)
    if not request.n_key:
        sums = execute(request)
        score, ranks = torch.zeros_like(sums.mass), target
    else:
        sums = execute(make(target=target, rank=rank, statistics=statistics, argmax=rank))
        assert sums.target_score is not None
        score, ranks = sums.target_score, target if sums.rank is None else sums.rank
    whole = merged(sums.state, known, statistics)
    score = known.total(torch.where(here, score, torch.zeros_like(score)))
    if not rank:
        return Sums.of(whole, score)
    if request.n_key and not bool(here.all()):
        ranks = torch.where(here, ranks, count_above(request, score.detach()))
    return Sums.of(whole, score, known.added(ranks))._replace(argmax=_best_key(sums, known))


@torch.no_grad()
def _best_key(sums: Sums, known: Collective) -> Tensor:  # (..., Q)
    """The first key, in the whole, of the largest score; of ranks that tie, the first."""
    assert sums.argmax is not None
    first = sum(known.sizes[0][: known.rank])
    scores = torch.stack(known.all_gather(sums.peak.double()))
    keys = torch.stack(known.all_gather(torch.where(sums.argmax < 0, sums.argmax, sums.argmax + first)))
    return keys.gather(0, scores.argmax(0)[None])[0]
