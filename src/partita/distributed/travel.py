"""Blocks passed round the ring: rank r sends to r + 1 and hears from r - 1, while it computes.

A block is what one rank holds of the sharded side (keys, or keys and values), flattened into one message. Two buffers
take turns: no rank ever holds more than its own block, the one it works on, and the one that is arriving.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from partita.distributed.team import Team

__all__ = ["Block", "Traffic", "pass_on", "traffic", "wait"]

KEYS, GRADIENTS = 0, 1  # tags: with two ranks both kinds of message run between the same two


@dataclass
class Traffic:
    """What this rank has sent round the ring; the small messages (sizes, row sums) are not counted."""

    sent_bytes: int = 0
    messages: int = 0


_counters: list[Traffic] = []


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what this rank sends while the block runs.

    >>> with traffic() as sent:
    ...     pass
    >>> sent
    Traffic(sent_bytes=0, messages=0)
    """
    counter = Traffic()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


@dataclass(frozen=True)
class Block:
    """How tensors (*b, n, D_1), (*b, n, D_2), ... lie in one flat message; n differs from rank to rank."""

    lead: tuple[tuple[int, ...], ...]  # the batch dimensions of each tensor
    widths: tuple[int, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Block:
        return Block(tuple(tuple(t.shape[:-2]) for t in tensors), tuple(t.shape[-1] for t in tensors))

    def _sizes(self, n: int) -> list[int]:
        return [math.prod(lead) * n * width for lead, width in zip(self.lead, self.widths, strict=True)]

    def empty(self, n: int, like: Tensor) -> Tensor:
        """Room for a block of n rows."""
        return like.new_empty(sum(self._sizes(n)))

    def pack(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """One flat message; a single contiguous tensor is its own."""
        flat = [t.reshape(-1).to(dtype) for t in tensors]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def unpack(self, flat: Tensor, n: int) -> list[Tensor]:
        """The tensors of a message, as views."""
        parts = flat.split(self._sizes(n))
        shapes = ((*lead, n, width) for lead, width in zip(self.lead, self.widths, strict=True))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def pass_on(team: Team, out: Tensor, into: Tensor, tag: int) -> list[dist.Work]:
    """Start sending `out` to the next rank and hearing `into` from the one before; empty messages stay at home."""
    group, moves = team.group, []
    if out.numel():
        moves.append(dist.P2POp(dist.isend, out, team.peer(team.rank + 1), group, tag))
        for counter in _counters:
            counter.sent_bytes += out.numel() * out.element_size()
            counter.messages += 1
    if into.numel():
        moves.append(dist.P2POp(dist.irecv, into, team.peer(team.rank - 1), group, tag))
    return dist.batch_isend_irecv(moves) if moves else []


def wait(moves: Sequence[dist.Work]) -> None:
    """Until both have arrived; a peer that is gone raises here, at the latest after the group's timeout."""
    for move in moves:
        move.wait()
