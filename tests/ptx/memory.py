"""Memory that watches: bounds, alignment, what was never written, and races.

Every granule (the narrowest access of the kernel) has the stamp of its last writer and of its last reader: block,
number of barriers before, warp. Two accesses of which one writes race if they are of different blocks, or of different
warps of a block with no barrier between them. Equal values written twice are no race.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Fault", "Region", "Shared", "Space", "Stamps"]

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WARPS = 64  # of a block, in a stamp; the last stands for several
_EPOCHS = 1 << 20  # barriers of a block, in a stamp
HOLE, UNWRITTEN, WRITTEN = 0, 1, 2


class Fault(Exception):
    """What a kernel must not do: `kind` names it in a word or two."""

    def __init__(self, kind: str, said: str):
        super().__init__(f"{kind}: {said}")
        self.kind = kind


class Stamps:
    """Last writers and readers of some granules."""

    def __init__(self, size: int):
        self.writer = np.zeros(size, np.int64)  # 0 for the host
        self.reader = np.zeros(size, np.int64)

    @staticmethod
    def of(block: Any, epoch: Any, warp: Any) -> Any:
        return (block * _EPOCHS + epoch + 1) * _WARPS + warp

    @staticmethod
    def _clash(found: Any, mine: Any) -> Any:
        """Another block's, or another warp's since the last barrier."""
        same_block = found // (_EPOCHS * _WARPS) == mine // (_EPOCHS * _WARPS)
        together = found // _WARPS == mine // _WARPS
        return (found != 0) & (found != mine) & (together | ~same_block)

    def read(self, at: Any, mine: Any) -> None:
        clash = self._clash(self.writer[at], mine)
        if clash.any():
            raise Fault("race", f"{int(clash.sum())} granules are read that another warp wrote with no barrier between")
        # readers clash with each other as well: then several stand there
        several = mine // _WARPS * _WARPS + _WARPS - 1
        new = np.where(self._clash(self.reader[at], mine), several, mine)
        self.reader[at] = new
        lost = self.reader[at] != new
        if lost.any():
            self.reader[at[lost]] = np.broadcast_to(several, at.shape)[lost]

    def write(self, at: Any, mine: Any, changes: Any) -> None:
        clash = self._clash(self.reader[at], mine) | (self._clash(self.writer[at], mine) & changes)
        if clash.any():
            raise Fault("race", f"{int(clash.sum())} granules are written that another warp uses, no barrier between")
        self.writer[at] = mine


class Space:
    """Bytes of one operand, or of the shared memory of all blocks, with their shadow."""

    def __init__(self, data: Any, granule: int, state: Any):
        self.words = {n: data.view(kind) for n, kind in WORDS.items()}
        self.granule, self.state, self.stamps = granule, state, Stamps(len(state))

    def granules(self, at: Any, size: int) -> Any:
        """(accesses, granules of each)."""
        return (at // self.granule)[:, None] + np.arange(size // self.granule)

    def load(self, at: Any, width: int, count: int, stamp: Any) -> Any:
        """(accesses, count) words at these byte offsets."""
        near = self.granules(at, width * count)
        state = self.state[near]
        if (state != WRITTEN).any():
            kind = "out of bounds" if (state == HOLE).any() else "uninitialised"
            raise Fault(kind, f"{int((state != WRITTEN).any(1).sum())} reads of {width * count} bytes, "
                              f"the first at byte {int(at[(state != WRITTEN).any(1)][0])}")  # fmt: skip
        self.stamps.read(near, stamp[:, None])
        return self.words[width][(at // width)[:, None] + np.arange(count)]

    def store(self, at: Any, width: int, values: Any, stamp: Any) -> None:
        """values: (accesses, count)."""
        near = self.granules(at, width * values.shape[1])
        if (self.state[near] == HOLE).any():
            raise Fault("out of bounds", f"a write of {width * values.shape[1]} bytes")
        words, place = self.words[width], (at // width)[:, None] + np.arange(values.shape[1])
        per = self.granule // width if self.granule > width else 1
        assert per == 1, "a granule is the narrowest access"
        changes = np.repeat(words[place] != values, width // self.granule, 1)
        self.stamps.write(near, stamp[:, None], changes | (self.state[near] != WRITTEN))
        words[place] = values
        if (words[place] != values).any():
            raise Fault("race", "two threads write different values to one place at once")
        self.state[near] = WRITTEN


class Shared(Space):
    """Shared memory of all blocks: a thread sees only its own's."""

    BASE = 1040  # aligned to 16 bytes and no more, as the kernel declares

    def __init__(self, blocks: int, size: int, granule: int, junk: np.random.Generator):
        self.size, self.whole = size, -(-max(size, 16) // 16) * 16
        data = junk.integers(0, 256, blocks * self.whole, np.uint8)
        super().__init__(data, granule, np.full(len(data) // granule, UNWRITTEN, np.uint8))
        self.coming = np.zeros(
            len(self.state), bool
        )  # of a copy that is on its way: no thread's, until it was waited for

    def place(self, address: Any, size: int, block: Any) -> Any:
        at = address.astype(np.int64) - self.BASE
        if (at % size != 0).any():
            raise Fault("misaligned", f"{size} bytes of shared memory")
        if ((at < 0) | (at + size > self.size)).any():
            raise Fault("out of bounds", f"shared byte {int(at.min())} to {int(at.max())} + {size} of {self.size}")
        return at + block * self.whole

    def load(self, at: Any, width: int, count: int, stamp: Any) -> Any:
        self._no_copy(self.granules(at, width * count))
        return super().load(at, width, count, stamp)

    def store(self, at: Any, width: int, values: Any, stamp: Any) -> None:
        self._no_copy(self.granules(at, width * values.shape[1]))
        super().store(at, width, values, stamp)

    def begin(self, at: Any, size: int, stamp: Any) -> None:
        """A copy to these places starts."""
        near = self.granules(at, size)
        self._no_copy(near)
        self.stamps.write(near, stamp[:, None], np.True_)
        self.coming[near] = True

    def arrive(self, at: Any, values: Any, stamp: Any) -> None:
        """It was waited for: the bytes are the waiting thread's, as if it had written them now."""
        self.coming[self.granules(at, 4 * values.shape[1])] = False
        super().store(at, 4, values, stamp)

    def _no_copy(self, near: Any) -> None:
        if self.coming[near].any():
            raise Fault("race", "a copy to these bytes of shared memory is on its way")


@dataclass
class Region:
    """The bytes of operands that overlap: where a kernel sees them, and who may touch which."""

    base: int
    size: int  # bytes; the space may end later, at a whole word
    space: Space


class Global:
    """All operands of a launch, each far from the others."""

    def __init__(self, regions: list[Region]):
        self.regions = sorted(regions, key=lambda r: r.base)
        self.bases = [r.base for r in self.regions]

    def each(self, address: Any, size: int) -> Any:
        """(region, which accesses, byte offsets), together all accesses."""
        left = np.arange(len(address))
        while len(left):
            first = int(address[left[0]])
            i = bisect.bisect_right(self.bases, first) - 1
            if i < 0:
                raise Fault("out of bounds", f"address {first:#x} belongs to no operand")
            region = self.regions[i]
            at = address[left].astype(np.int64) - region.base
            inside = (at >= 0) & (at + size <= region.size)
            if (at[inside] % size != 0).any():
                raise Fault("misaligned", f"{size} bytes of an operand")
            if not inside[0]:
                raise Fault("out of bounds", f"{size} bytes at {int(at[0])} of an operand of {region.size}")
            yield region.space, left[inside], at[inside]
            left = left[~inside]
