"""States of disjoint keys, one on every rank, put together: partition functions add.

    peak = max_r peak_r        mass = sum_r exp(peak_r - peak) mass_r        and so on for every sum

Three small messages per row, whatever the number of keys. A rank with no keys brings the neutral state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from partita.distributed._ring.group import Group, group_of
from partita.distributed._ring.handshake import checks, handshake
from partita.engine import State
from partita.errors import DtypeError
from partita.processes import Fact

__all__ = ["merge", "merge_states"]


def merge(state: State, group: object) -> State:
    """The state of the keys of all ranks together, for states of the same queries; every rank gets it.

        log Z = log sum_r Z_r

    Exact and differentiable: the gradient on a rank is that of the global numbers with respect to its own keys. The
    queries are the same on every rank, so their gradient comes in parts that add up over ranks.
    """
    known = group_of(group)
    with checks(known):
        if not isinstance(state, State):
            raise DtypeError(f"merge takes a State, of gibbs.state(); got {type(state).__name__}.")
        facts: dict[str, Fact] = {
            "the dtype of the state": state.mass.dtype,
            "the rows of the state": tuple(state.mass.shape),
            "the last dimension of its value": None if state.moment is None else state.moment.shape[-1],
        }
    handshake(known, "merge", [], facts)
    return merge_states(state, known)


def merge_states(state: State, group: Group, statistics: bool = True) -> State:
    """`merge` for those who know the group; without statistics the moments of the score are left out."""
    if group.size == 1:
        return state
    peak = group.all_reduce(state.peak.detach().clone(memory_format=torch.contiguous_format), dist.ReduceOp.MAX)
    own = state.seen_from(peak)
    rows = [own.mass, own.count, own.first] if statistics else [own.mass, own.count]
    sums = group.total(torch.stack(torch.broadcast_tensors(*rows)))
    mass, count = sums[0], sums[1].detach()
    moment = None if own.moment is None else group.total(own.moment)
    if not statistics:
        nothing = torch.zeros_like(mass)
        return State(peak, mass, nothing, nothing, count, moment)
    merged = State(peak, mass, sums[2], torch.zeros_like(mass), count, moment)
    # The spread about the common mean. The mean is a constant here: it is where the sum of squares is least, so that a
    # change of it changes nothing, and only this rank's own part of its derivative would be seen.
    gap = state.mean_from(peak) - merged.mean_from(peak).detach()
    return replace(merged, spread=group.total(own.spread + own.mass * gap * gap))
