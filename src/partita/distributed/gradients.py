"""Gradients of replicated tensors: summed over ranks by us, averaged by DDP."""

from __future__ import annotations

from torch import Tensor

from partita.distributed._ring.group import group_of

__all__ = ["for_ddp", "replicate"]


def replicate(tensor: Tensor, group: object) -> Tensor:
    """A tensor that is the same on every rank, whose gradient is summed over ranks.

        forward  x        backward  dL/dx = sum over ranks of the part that flowed back on each

    `linear_cross_entropy(..., group=)` gives the gradient of a replicated input in parts, one per slice of the classes.
    A model that is not sharded below its head wants the whole on every rank: pass `replicate(input, group)` instead.
    """
    return group_of(group).replicated(tensor)


def for_ddp(loss: Tensor, group: object) -> Tensor:
    """The same value with a gradient `world size` times as large: DDP then averages it to the sum it should be.

    DDP keeps (1/W) sum_r grad_r;  the gradient of a global value is sum_r grad_r
    """
    known = group_of(group)
    return known.scaled_gradient(loss, float(known.size))
