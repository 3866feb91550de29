"""Blocks passed round the ring, part after part: rank r sends to r + 1 and hears from r - 1, while it computes.

A block is what one rank holds of the sharded side (keys, or keys and values). A part of it is one flat message. A rank
holds its own block, the part it works on and the one that is arriving; of gradients on their way home, the one it
makes, the one it sends and the one it hears. These buffers are made once and take turns.

    arrivals         part 0 of rank r - 1, of r - 2, ..., then part 1 of r - 1, ...; the own block before all others
    GradientReturn   with each part goes its gradient: W - 1 hops from the first rank it visits until it is home
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from partita.distributed._ring.blocks import Parts
from partita.distributed._ring.group import Group

__all__ = ["Block", "GradientReturn", "Traffic", "Arrival", "send_receive", "traffic", "arrivals", "wait"]

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
    """How the parts of tensors (*b, n, D_1), (*b, n, D_2), ... lie in flat messages; n differs from rank to rank."""

    parts: Parts
    lead: tuple[tuple[int, ...], ...]  # the batch dimensions of each tensor
    widths: tuple[int, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor], parts: Parts) -> Block:
        return Block(parts, tuple(tuple(t.shape[:-2]) for t in tensors), tuple(t.shape[-1] for t in tensors))

    def shapes(self, part: int, n: int) -> list[tuple[int, ...]]:
        """The tensors of a part of a block of n keys."""
        keys, entries = self.parts.keys(part, n), self.parts.entry(part)
        found = []
        for lead, width in zip(self.lead, self.widths, strict=True):
            batch = list(lead)
            if entries != slice(None) and batch[self.parts.axis] > 1:
                batch[self.parts.axis] = entries.stop - entries.start
            found.append((*batch, keys.stop - keys.start, width))
        return found

    def size(self, part: int, n: int) -> int:
        return sum(math.prod(shape) for shape in self.shapes(part, n))

    def room(self, sizes: Sequence[int], count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Buffers, each for any part of any rank."""
        most = max(self.size(part, max(sizes)) for part in range(len(self.parts)))
        return [torch.empty(most, dtype=dtype, device=device) for _ in range(count)]

    def message(self, buffer: Tensor, part: int, n: int) -> Tensor:
        """As much of a buffer as a part of a block of n keys takes."""
        return buffer[: self.size(part, n)]

    def unpack(self, flat: Tensor, part: int, n: int) -> list[Tensor]:
        """The tensors of a message, as views."""
        shapes = self.shapes(part, n)
        return [x.view(shape) for x, shape in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True)]


@dataclass(frozen=True, eq=False)
class Arrival:
    """A part of the block of a rank, that is here to be worked on."""

    step: int  # how far it has come; 0 is one's own
    source: int
    part: int
    entries: slice  # of the batch dimension that is cut
    keys: slice  # of the block
    tensors: list[Tensor]


def arrivals(
    group: Group, own: Sequence[Tensor], sizes: Sequence[int], parts: Parts, at_home: Parts
) -> Iterator[Arrival]:
    """Parts of the blocks of all ranks, one's own (cut as `at_home` says) first; the next is under way meanwhile."""
    form, dtype = Block.of(own, parts), own[0].dtype
    stops = [(part, step) for part in range(len(parts)) for step in range(1, group.size)]
    lies = len(own) == 1  # a part that lies in one piece is its own message
    lies = lies and all(parts.take(part, own[0]).is_contiguous() for part in range(len(parts)))
    buffers = form.room(sizes, 2 if lies else 3, dtype, own[0].device) if stops else []

    def start(at: int, here: Tensor | None) -> tuple[Tensor, list[dist.Work]]:
        """Hear the message of a stop, and send what the next rank waits for."""
        part, step = stops[at]
        out = here
        if step == 1:
            mine = [parts.take(part, tensor) for tensor in own]
            out = mine[0].reshape(-1) if lies else form.message(buffers[2], part, sizes[group.rank])
            for tensor, to in zip(mine, () if lies else form.unpack(out, part, sizes[group.rank]), strict=not lies):
                to.copy_(tensor)
        assert out is not None
        coming = form.message(buffers[at % 2], part, sizes[(group.rank - step) % group.size])
        return coming, send_receive(group, out, coming, KEYS)

    coming, moves = start(0, None) if stops else (own[0], [])
    for part in range(len(at_home)):
        keys = at_home.keys(part, sizes[group.rank])
        mine = [at_home.take(part, tensor) for tensor in own]
        yield Arrival(0, group.rank, part, at_home.entry(part), keys, mine)
    for at, (part, step) in enumerate(stops):
        source = (group.rank - step) % group.size
        wait(moves)
        here, moves = coming, []
        if at + 1 < len(stops):
            coming, moves = start(at + 1, here)
        keys = parts.keys(part, sizes[source])
        yield Arrival(step, source, part, parts.entry(part), keys, form.unpack(here, part, sizes[source]))


class GradientReturn:
    """Gradients of parts on their way home: each rank adds its own to what it hears, and sends that on.

    own: the gradients of this rank's block, where all of its parts end.
    """

    def __init__(self, group: Group, own: Sequence[Tensor], sizes: Sequence[int], parts: Parts):
        self._group, self._own, self._sizes, self._parts = group, own, sizes, parts
        self._form = Block.of(own, parts)
        travels = bool(own) and group.size > 1
        self._free = self._form.room(sizes, 3, own[0].dtype, own[0].device) if travels else []
        self._at: Tensor | None = None  # the buffer of the part at hand
        self._moving: list[Tensor] = []  # buffers of the gradient being sent, and of the one that is heard
        self._moves: list[dist.Work] = []
        self._home: int | None = None  # the part of our own block that is heard, if it is one

    def begin(self, arrival: Arrival) -> list[Tensor]:
        """Where to add the gradient of a part: for one's own that is the result itself."""
        if not arrival.step or not self._own:
            return [self._parts.take(arrival.part, tensor) for tensor in self._own]
        self._at = self._free.pop()
        n = self._sizes[arrival.source]
        return self._form.unpack(self._form.message(self._at, arrival.part, n).zero_(), arrival.part, n)

    def end(self, arrival: Arrival) -> None:
        """The gradient of this part is complete as far as this rank is concerned."""
        if not arrival.step or not self._own:
            return
        group, form, part = self._group, self._form, arrival.part
        at, n = self._at, self._sizes[arrival.source]
        assert at is not None
        message = form.message(at, part, n)
        heard = self._settle()
        if arrival.step > 1:
            assert heard is not None
            message += form.message(heard, part, n)
        last = arrival.step == group.size - 1
        self._home = part if last else None
        into = self._free.pop()
        coming = form.message(into, part, self._sizes[(arrival.source - 1) % group.size])
        self._moving, self._moves = [at, into], send_receive(group, message, coming, GRADIENTS)

    def finish(self) -> None:
        """Until the last part is home."""
        self._settle()

    def _settle(self) -> Tensor | None:
        """What was heard; a part of our own block is put where it belongs."""
        wait(self._moves)
        moving, self._moving, self._moves = self._moving, [], []
        self._free += moving
        if not moving:
            return None
        heard = moving[1]
        if self._home is not None:
            n = self._sizes[self._group.rank]
            arrived = self._form.unpack(self._form.message(heard, self._home, n), self._home, n)
            for tensor, more in zip(self._own, arrived, strict=True):
                self._parts.take(self._home, tensor).add_(more)
            self._home = None
        return heard


def send_receive(group: Group, out: Tensor, into: Tensor, tag: int) -> list[dist.Work]:
    """Start sending `out` to the next rank and hearing `into` from the one before; empty messages stay at home."""
    moves, handle = [], group.process_group
    if out.numel():
        moves.append(dist.P2POp(dist.isend, out, group.peer(group.rank + 1), handle, tag))
        for counter in _counters:
            counter.sent_bytes += out.numel() * out.element_size()
            counter.messages += 1
    if into.numel():
        moves.append(dist.P2POp(dist.irecv, into, group.peer(group.rank - 1), handle, tag))
    return dist.batch_isend_irecv(moves) if moves else []


def wait(moves: Sequence[dist.Work]) -> None:
    """Until both have arrived; a peer that is gone raises here, at the latest after the group's timeout."""
    for move in moves:
        move.wait()
