"""The forward pass of the ring: W - 1 hops of the key (and value) blocks, states added up as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partita.distributed._ring.blocks import Parts, row_blocks
from partita.distributed._ring.communication import Arrival, arrivals
from partita.distributed._ring.count import count_above
from partita.distributed._ring.tiles import RingPass
from partita.engine import State, execute

__all__ = ["Outputs", "forward"]


class Outputs(NamedTuple):
    """What a pass gives, per row; an absent tensor is empty."""

    peak: Tensor  # float64
    mass: Tensor
    first: Tensor
    spread: Tensor
    visible: Tensor
    mean: Tensor  # E[value]
    score: Tensor  # of the target
    rank: Tensor


def forward(one: RingPass, own: Sequence[Tensor]) -> Outputs:
    """A pass over the blocks of all ranks; `own` are the key and value of this one."""
    rows = one.rows
    shape = (*rows.batch, rows.n_query)
    new = rows.scale
    moment = None if len(own) == 1 else new.new_zeros(*shape, own[1].shape[-1])
    mass, first, spread, count = (new.new_zeros(shape) for _ in range(4))
    total = State(new.new_full(shape, -torch.inf, dtype=torch.float64), mass, first, spread, count, moment)
    score = None if rows.target is None else new.new_full(shape, -torch.inf)
    counts = rows.rank or one.level is not None
    rank = torch.zeros(shape, dtype=torch.int64, device=new.device) if counts else None

    parts = Parts.of(own, max(one.sizes))
    # the rank of a target is counted from its score: those of the own block, where all targets are, come at once
    at_home = parts if rows.target is None else parts.whole_keys()
    for arrival in arrivals(one.group, own, one.sizes, parts, at_home):
        _add(one, parts, arrival, total, score, rank)

    absent = total.mass.new_empty(0)
    return Outputs(
        total.peak,
        total.mass,
        total.first if rows.statistics else absent.clone(),
        total.spread if rows.statistics else absent.clone(),
        total.count,
        absent.clone() if total.moment is None else total.expectation(consume=True),
        absent.clone() if score is None else score,
        absent.clone().long() if rank is None else rank,
    )


def _add(
    one: RingPass, parts: Parts, arrival: Arrival, total: State, score: Tensor | None, rank: Tensor | None
) -> None:
    """Add the sums of one part."""
    rows = one.rows
    pieces = one.pieces(arrival.source) if rows.n_query else ()
    for block in row_blocks(rows.query, parts, arrival.entries, alone=total.moment is None and rank is None):
        for tile in one.tiles(arrival, block, pieces):
            found = execute.forward(tile.request)
            block.state(total).add_(found.state)
            if found.target_score is not None:
                assert score is not None
                block.vector(score).copy_(found.target_score)
            if rank is None:
                continue
            if found.rank is not None:
                block.vector(rank).copy_(found.rank)
            else:
                level = score if one.level is None else one.level
                assert level is not None
                block.vector(rank).add_(count_above(tile.request, block.vector(level)))
