"""Blocks of keys on their way round the ring, overlapped with compute.

    block   what one rank holds of the sharded side: keys, or keys and values
    part    some entries of one batch dimension of a block and some of their keys: one flat message

Rank r sends to r + 1 and receives from r - 1 overlapped with compute. The own block comes first, then part 0 of rank
r - 1, of r - 2, ..., then part 1 of r - 1, ... In a backward pass the gradient of a part travels with it: every rank
adds its own, W - 1 hops from the first rank that the part visits until it is home.

Whatever is made on the way has the size of a part: a rank holds the one it packs, the current one and the next; of
gradients the one it makes, the one it sends and the one it receives. These buffers are made once and take turns. A
part has at least a megabyte and `_FEW` keys, since smaller ones would spend their time starting; at most `_MOST` parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from partita.collective import Collective
from partita.engine.axes import cut_entries

__all__ = ["Cut", "Part", "Traffic", "row_pieces", "send_receive", "traffic", "wait", "walk"]

KEYS, GRADIENTS = 0, 1  # tags: with two ranks both kinds of message run between the same two

_SMALLEST = 1 << 20  # bytes of a part
_MOST = 16
_FEW = 256  # keys of a part
_FEW_ROWS = 512  # rows that meet a part at a time, for every thread; on other devices for eight


# ---- how blocks are cut ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How the block of every rank is cut into parts, in the same way on all ranks."""

    axis: int = 0  # the batch dimension that is cut
    entries: tuple[slice, ...] = (slice(None),)
    n_keys: int = 1  # pieces of the keys of each

    @staticmethod
    def of(tensors: Sequence[Tensor], n: int) -> Cut:  # each (*b, n or fewer, D)
        """Parts of blocks of up to n keys: some entries and all their keys; where that is not enough, some keys."""
        lead, size = tensors[0].shape[:-2], 0
        for t in tensors:
            size += math.prod(t.shape[:-2]) * n * t.shape[-1] * t.element_size()
        wanted = _pieces(size)
        if wanted == 1:
            return Cut()
        alike = [k if all(t.shape[axis] == k for t in tensors) else 1 for axis, k in enumerate(lead)]
        longest = max(alike, default=1)
        across = max(1, min(wanted, longest))
        along = max(1, min(-(-wanted // across), n // _FEW))
        if across == 1:
            return Cut(n_keys=along)
        return Cut(alike.index(longest), tuple(_piece(longest, across, i) for i in range(across)), along)

    def __len__(self) -> int:
        return len(self.entries) * self.n_keys

    def entry(self, part: int) -> slice:
        return self.entries[part // self.n_keys]

    def keys(self, part: int, n: int) -> slice:
        """Which of n keys."""
        return _piece(n, self.n_keys, part % self.n_keys)

    def take(self, part: int, tensors: Sequence[Tensor]) -> list[Tensor]:  # each (*b, n, D)
        """A part of the tensors of a block, as views."""
        if len(self) == 1:
            return list(tensors)
        return [cut_entries(t, self.axis, self.entry(part))[..., self.keys(part, t.shape[-2]), :] for t in tensors]

    def message(self, buffer: Tensor, part: int, n: int, like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What a part of a block of n keys takes of a buffer, and its tensors, of the form of `like`, as views."""
        used, views = 0, []
        for shape in self._shapes(part, n, like):
            size = math.prod(shape)
            views.append(buffer[used : used + size].view(shape))
            used += size
        return buffer[:used], views

    def buffers(self, count: int, n: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Room for any part of any block of up to n keys."""
        most = max(sum(map(math.prod, self._shapes(part, n, like))) for part in range(len(self)))
        return [torch.empty(most, dtype=like[0].dtype, device=like[0].device) for _ in range(count)]

    def _shapes(self, part: int, n: int, like: Sequence[Tensor]) -> list[tuple[int, ...]]:
        keys, entries, found = self.keys(part, n), self.entry(part), []
        for t in like:
            batch = list(t.shape[:-2])
            if entries != slice(None) and batch[self.axis] > 1:
                batch[self.axis] = entries.stop - entries.start
            found.append((*batch, keys.stop - keys.start, t.shape[-1]))
        return found

    def whole_keys(self) -> Cut:
        """The same without a cut of the keys."""
        return replace(self, n_keys=1)


def row_pieces(query: Tensor, cut: Cut) -> list[slice]:  # (*b, Q, D)
    """The rows that meet a part at a time, so that their gradient is small."""
    n = query.shape[-2]
    few = _FEW_ROWS * (torch.get_num_threads() if query.device.type == "cpu" else 8)
    wanted = -(-_pieces(query.numel() * max(4, query.element_size())) // len(cut.entries))
    pieces = max(1, min(wanted, n // few))
    return [_piece(n, pieces, i) for i in range(pieces)]


def _pieces(size_bytes: int) -> int:
    return max(1, min(_MOST, size_bytes // _SMALLEST))


def _piece(n: int, pieces: int, i: int) -> slice:
    """One of the even pieces of 0, ..., n - 1."""
    return slice(n * i // pieces, n * (i + 1) // pieces)


# ---- the walk -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the block of a rank that has arrived."""

    step: int  # hops it has made; 0 is the own block
    source: int
    entries: slice  # of the batch dimension that is cut
    keys: slice  # of the block
    tensors: list[Tensor]
    grads: list[Tensor]  # where to add the gradients of the travelling tensors


def walk(
    collective: Collective,
    own: Sequence[Tensor],
    sizes: Sequence[int],
    cut: Cut,
    grads: Sequence[Tensor] = (),
    at_home: Cut | None = None,
) -> Iterator[Part]:
    """The parts of the blocks of all ranks, the own block (cut as `at_home`) first; the next part arrives meanwhile.

    sizes: keys of every rank.
    grads: of the own block, where the gradients of its parts end; those that travel, or none.
    """
    rank, world, home = collective.rank, collective.size, cut if at_home is None else at_home
    stops = [(part, step) for part in range(len(cut)) for step in range(1, world)]
    # parts of one tensor that are contiguous are their own messages
    packs = len(own) > 1 or not all(cut.take(part, own)[0].is_contiguous() for part in range(len(cut)))
    buffers = cut.buffers(3 if packs else 2, max(sizes), own) if stops else []

    def begin(at: int, here: Tensor | None) -> tuple[Tensor, list[Tensor], list[dist.Work]]:
        """Start to receive the message of a stop, and to send what the next rank waits for."""
        part, step = stops[at]
        if step == 1 and not packs:
            here = cut.take(part, own)[0].reshape(-1)
        elif step == 1:
            here, packed = cut.message(buffers[2], part, sizes[rank], own)
            for tensor, to in zip(cut.take(part, own), packed, strict=True):
                to.copy_(tensor)
        assert here is not None
        coming, tensors = cut.message(buffers[at % 2], part, sizes[(rank - step) % world], own)
        return coming, tensors, send_receive(collective, here, coming, KEYS)

    arriving = begin(0, None) if stops else None
    for part in range(len(home)):
        mine = home.take(part, own), home.take(part, grads)
        yield Part(0, rank, home.entry(part), home.keys(part, sizes[rank]), *mine)
    returning = _Returning(collective, cut, sizes, grads) if stops and grads else None
    for at, (part, step) in enumerate(stops):
        assert arriving is not None
        here, tensors, moves = arriving
        wait(moves)
        if at + 1 < len(stops):
            arriving = begin(at + 1, here)
        source = (rank - step) % world
        into = [] if returning is None else returning.place(part, source)
        yield Part(step, source, cut.entry(part), cut.keys(part, sizes[source]), tensors, into)
        if returning is not None:
            returning.send(part, step, source)
    if returning is not None:
        returning.settle()


class _Returning:
    """Gradients of parts on their way home: each rank adds its own to what it receives, and sends that on."""

    def __init__(self, collective: Collective, cut: Cut, sizes: Sequence[int], own: Sequence[Tensor]):
        self._collective, self._cut, self._sizes, self._own = collective, cut, sizes, own
        self._free = cut.buffers(3, max(sizes), own)
        self._at: list[Tensor] = []  # the buffer of the current part
        self._moving: list[Tensor] = []  # the buffer that is sent, and the one that is received into
        self._moves: list[dist.Work] = []
        self._home: int | None = None  # the part of the own block that is received, if it is one

    def place(self, part: int, source: int) -> list[Tensor]:
        """Where to add the gradients of a part."""
        self._at = [self._free.pop()]
        message, views = self._cut.message(self._at[0], part, self._sizes[source], self._own)
        message.zero_()
        return views

    def send(self, part: int, step: int, source: int) -> None:
        """Add what the ranks before have found for this part, and send both on."""
        world, cut = self._collective.size, self._cut
        message, _ = cut.message(self._at[0], part, self._sizes[source], self._own)
        received = self.settle()
        if step > 1:
            message += cut.message(received[1], part, self._sizes[source], self._own)[0]
        self._home = part if step == world - 1 else None
        into = self._free.pop()
        coming, _ = cut.message(into, part, self._sizes[(source - 1) % world], self._own)
        self._moving = [*self._at, into]
        self._moves = send_receive(self._collective, message, coming, GRADIENTS)

    def settle(self) -> list[Tensor]:
        """The buffers of the last exchange, which is over; a part of the own block is put where it belongs."""
        wait(self._moves)
        moving, self._moving, self._moves = self._moving, [], []
        self._free += moving
        if self._home is not None:
            part, n = self._home, self._sizes[self._collective.rank]
            arrived = self._cut.message(moving[1], part, n, self._own)[1]
            for tensor, more in zip(self._cut.take(part, self._own), arrived, strict=True):
                tensor.add_(more)
            self._home = None
        return moving


# ---- messages -------------------------------------------------------------------------------------------------------


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


def send_receive(collective: Collective, out: Tensor, into: Tensor, tag: int) -> list[dist.Work]:
    """Start to send `out` to the next rank and to receive `into` from the one before; empty messages stay at home."""
    moves, group = [], collective.process_group
    if out.numel():
        moves.append(dist.P2POp(dist.isend, out, collective.peer(1), group, tag))
        for counter in _counters:
            counter.sent_bytes += out.numel() * out.element_size()
            counter.messages += 1
    if into.numel():
        moves.append(dist.P2POp(dist.irecv, into, collective.peer(-1), group, tag))
    return dist.batch_isend_irecv(moves) if moves else []


def wait(moves: Sequence[dist.Work]) -> None:
    """Until both have arrived; a peer that is gone raises here, at the latest after the group's timeout."""
    for move in moves:
        move.wait()
