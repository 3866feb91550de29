"""Both ends of rows whose keys are spread over ranks in slices, in rank order.

least = min_r least_r          the first key of the largest score: of the first rank that has it, counted from its slice
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.distributed._ring.group import Group
from partita.engine.sums import Sums

__all__ = ["merge_ends"]


@torch.no_grad()
def merge_ends(sums: Sums, first: int, group: Group) -> tuple[Tensor, Tensor]:  # (..., Q), (2, ..., Q)
    """The smallest score and the places of both ends among the keys of all ranks; this slice begins at key `first`.

    Every rank holds the same rows. A nan is both ends of its row, as it is in one process.
    """
    assert sums.least is not None
    assert sums.places is not None
    own = torch.where(sums.places < 0, sums.places, sums.places + first)
    scores = torch.stack(group.all_gather(torch.stack([sums.peak.double(), sums.least.double()])))
    places = torch.stack(group.all_gather(own))
    best = torch.stack([scores[:, 0].argmax(0), scores[:, 1].argmin(0)])[None]  # of ranks that tie, the first
    return scores[:, 1].amin(0).to(sums.least.dtype), places.gather(0, best)[0]
