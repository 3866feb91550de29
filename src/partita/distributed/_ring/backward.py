"""The backward pass of the ring: the blocks go round once more, and with each goes its gradient, until it is home.

Scores are recomputed; no rank ever holds all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from partita.distributed._ring.blocks import Parts, RowBlock, row_blocks
from partita.distributed._ring.communication import Arrival, GradientReturn, arrivals
from partita.distributed._ring.forward import Outputs
from partita.distributed._ring.tiles import RingPass, Tile, columns_of
from partita.engine import execute
from partita.engine.request import Request
from partita.engine.state import raw_gradients
from partita.engine.sums import Upstream

__all__ = ["TRAVELLING", "Known", "backward"]

TRAVELLING = ("key", "value")  # what goes round


class Known(NamedTuple):
    """What the backward pass needs of the outputs of a pass."""

    peak: Tensor
    mass: Tensor
    first: Tensor
    mean: Tensor

    @staticmethod
    def of(out: Outputs) -> Known:
        return Known(out.peak, out.mass, out.first, out.mean)


def backward(
    one: RingPass, own: Sequence[Tensor], known: Known, grads: Sequence[Tensor | None], total: dict[str, Tensor]
) -> None:
    """Add the gradients of a pass to `total`, which holds zeros, or those of other passes.

    grads: of the outputs, in their order.
    """
    parts = Parts.of(own, max(one.sizes))
    travelling = [name for name in TRAVELLING if name in total]
    home = GradientReturn(one.group, [total[name] for name in travelling], one.sizes, parts)
    for arrival in arrivals(one.group, own, one.sizes, parts, parts):
        into = dict(zip(travelling, home.begin(arrival), strict=True))
        # in a function of its own: what it has made is free before the next part is worked on
        _add(one, parts, arrival, known, grads, total, into)
        home.end(arrival)
    home.finish()


def _add(
    one: RingPass,
    parts: Parts,
    arrival: Arrival,
    known: Known,
    grads: Sequence[Tensor | None],
    total: dict[str, Tensor],
    into: dict[str, Tensor],
) -> None:
    """Add the gradients that come from one part: its own to `into`, what belongs to the rows to `total`."""
    rows = one.rows
    asked = ("query" in total, "key" in into, "value" in into, "scale" in total, "bias" in total)
    pieces = one.pieces(arrival.source) if rows.n_query and any(asked) else ()
    for block in row_blocks(rows.query, parts, arrival.entries) if pieces else ():
        upstream = _upstream(one, known, grads, block)
        for tile in one.tiles(arrival, block, pieces):
            request, above = _within(tile, upstream)
            for name, grad in execute.backward(request, block.vector(known.peak), above, asked).items():
                if name in TRAVELLING:
                    into[name][..., tile.keys, :].add_(grad)
                elif name == "query":
                    block.matrix(total[name]).add_(grad)
                elif name == "scale":
                    block.vector(total[name]).add_(grad)
                else:
                    columns_of(block.matrix(total[name]), tile.columns).add_(grad)


def _upstream(one: RingPass, known: Known, grads: Sequence[Tensor | None], block: RowBlock) -> Upstream:
    """Gradients of the raw sums of some rows, zeros for those nobody asked for: every rank takes part, asked or not."""
    rows, at = one.rows, block.vector
    _, mass, first, spread, _, mean, target, _ = grads

    def row(tensor: Tensor | None, wanted: bool = True) -> Tensor | None:
        return None if tensor is None or not wanted else at(tensor)

    total = at(known.mass)
    raw = raw_gradients(
        total,
        row(known.first, rows.statistics),
        mean=None if rows.value is None else block.matrix(known.mean),
        g_mass=row(mass),
        g_first=row(first, rows.statistics),
        g_spread=row(spread, rows.statistics),
        g_mean=None if rows.value is None or mean is None else block.matrix(mean),
    )
    zero, moment = torch.zeros_like(total), raw.moment
    if rows.value is not None and moment is None:
        moment = zero[..., None].expand(*zero.shape, known.mean.shape[-1])
    return Upstream(
        raw.mass,
        zero if raw.first is None else raw.first,
        zero if raw.second is None else raw.second,
        moment,
        None if rows.target is None else zero if target is None else at(target),
    )


def _within(tile: Tile, g: Upstream) -> tuple[Request, Upstream]:
    """Targets as keys of this tile; those that are elsewhere pass nothing back."""
    request = replace(tile.request, rank=False)
    if request.target is None:
        return request, replace(g, target=None)
    at = request.target - tile.first
    here = (at >= 0) & (at < request.n_key)
    assert g.target is not None
    target = torch.where(here, g.target, torch.zeros_like(g.target))
    return replace(request, target=torch.where(here, at, torch.zeros_like(at))), replace(g, target=target)
