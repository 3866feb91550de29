"""Sums over pairs that need no partition function: rows ask every key of all ranks, one part after the other.

    out_i = sum over blocks of  ask(row_i, keys of the block, their numbers)

A key's number is its place among the keys of its rank where that is the rows' own, and -1 elsewhere: a row knows its
partner by it. Scores are made again in the backward pass, and the gradients of keys travel home with their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partita.distributed._ring.blocks import Parts
from partita.distributed._ring.communication import Arrival, GradientReturn, arrivals
from partita.distributed._ring.group import Group
from partita.precision import no_autocast
from partita.rows import in_row_blocks

__all__ = ["ask_all"]

Ask = Callable[..., Tensor]  # (rows, numbers of rows, keys, numbers of keys, *shared) -> one number per row


def ask_all(
    ask: Ask, group: Group, sizes: Sequence[int], rows: Tensor, key: Tensor, shared: Sequence[Tensor]
) -> Tensor:  # (n,)
    """What each row of this rank hears from the keys of all ranks."""
    out: Tensor = _AskAll.apply(ask, group, tuple(sizes), rows, key, *shared)  # type: ignore[no-untyped-call]
    return out


class _AskAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ask: Ask, group: Group, sizes: tuple[int, ...], rows: Tensor, key: Tensor, *shared: Tensor
    ) -> Tensor:
        ctx.ask, ctx.group, ctx.sizes = ask, group, sizes
        ctx.save_for_backward(rows, key, *shared)
        dtype = shared[0].dtype
        out, parts, wide = shared[0].new_zeros(len(rows)), Parts.of([key], max(sizes)), rows.to(dtype)
        with no_autocast(rows):
            for arrival in arrivals(group, [key], sizes, parts, parts):
                out += _heard(ask, arrival, [wide, arrival.tensors[0].to(dtype), *shared])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, needs = ctx.saved_tensors, ctx.needs_input_grad[3:]
        rows, key, *shared = given
        total = [torch.zeros(x.shape, dtype=grad.dtype, device=x.device) for x in given]
        parts = Parts.of([key], max(ctx.sizes))
        home = GradientReturn(ctx.group, [total[1]] if needs[1] else [], ctx.sizes, parts)
        with no_autocast(rows):
            for arrival in arrivals(ctx.group, [key], ctx.sizes, parts, parts):
                places = [total[0], *(home.begin(arrival) or [total[1]]), *total[2:]]
                _add(ctx.ask, arrival, [rows, arrival.tensors[0], *shared], needs, grad, places)
                home.end(arrival)
            home.finish()
        kept = zip(total, given, needs, strict=True)
        return None, None, None, *(g.to(x.dtype) if need else None for g, x, need in kept)


def _add(
    ask: Ask, arrival: Arrival, given: Sequence[Tensor], needs: Sequence[bool], grad: Tensor, places: Sequence[Tensor]
) -> None:
    """Add the gradients that come from one part to their places."""
    leaves = [x.detach().to(grad.dtype).requires_grad_(need) for x, need in zip(given, needs, strict=True)]
    with torch.enable_grad():
        out = _heard(ask, arrival, leaves)
    wanted = [(x, place) for x, place in zip(leaves, places, strict=True) if x.requires_grad]
    for found, (_, place) in zip(torch.autograd.grad(out, [x for x, _ in wanted], grad), wanted, strict=True):
        place.add_(found)


def _heard(ask: Ask, arrival: Arrival, given: Sequence[Tensor]) -> Tensor:
    rows, key, *shared = given
    numbers = torch.arange(arrival.keys.start, arrival.keys.stop, device=key.device)
    numbers = torch.full_like(numbers, -1) if arrival.step else numbers
    own = torch.arange(len(rows), device=rows.device)
    return in_row_blocks(ask, [rows, own], [key, numbers, *shared], len(key))
