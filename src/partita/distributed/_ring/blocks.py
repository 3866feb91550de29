"""Blocks are walked in parts, so that whatever is made on the way has the size of a part and not of a block.

    a part of a block   some entries of one batch dimension and all their keys; where that is not enough, some keys
    a block of rows     the rows that meet it: those of the same entries, some at a time

Parts go round the ring one after the other. A part has at least a megabyte and `_FEW` keys: what is smaller would spend
its time starting. At most `_MOST` parts: more would not save what is worth saving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.engine import State
from partita.engine.axes import cut_entries
from partita.engine.terms import Term
from partita.engine.visibility import Visibility

__all__ = ["Parts", "RowBlock", "row_blocks", "steps"]

_SMALLEST = 1 << 20  # bytes of a part
_MOST = 16
_FEW = 256  # keys of a part
_FEW_ROWS = 512  # rows of a block of them, for every thread; on other devices for eight


def steps(n: int, parts: int) -> list[slice]:
    """0, ..., n - 1 in even pieces."""
    return [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def _wanted(size_bytes: int) -> int:
    return max(1, min(_MOST, size_bytes // _SMALLEST))


@dataclass(frozen=True)
class Parts:
    """How the block of every rank is cut, which all ranks must do alike."""

    axis: int = 0  # the batch dimension that is cut
    entries: tuple[slice, ...] = (slice(None),)
    n_keys: int = 1  # so many pieces of the keys of each

    @staticmethod
    def of(tensors: Sequence[Tensor], n: int) -> Parts:  # each (*b, n or fewer, D)
        """Parts of blocks of up to n keys, that hold these tensors."""
        lead = tensors[0].shape[:-2]
        wanted = _wanted(sum(math.prod(t.shape[:-2]) * n * t.shape[-1] * t.element_size() for t in tensors))
        alike = [size if all(t.shape[axis] == size for t in tensors) else 1 for axis, size in enumerate(lead)]
        longest = max(alike, default=1)
        across = min(wanted, max(longest, 1))
        along = max(1, min(-(-wanted // across), n // _FEW))
        if across == 1:
            return Parts(n_keys=along)
        return Parts(alike.index(longest), tuple(steps(longest, across)), along)

    def __len__(self) -> int:
        return len(self.entries) * self.n_keys

    def entry(self, part: int) -> slice:
        return self.entries[part // self.n_keys]

    def keys(self, part: int, n: int) -> slice:
        """Which of n keys."""
        return steps(n, self.n_keys)[part % self.n_keys]

    def take(self, part: int, tensor: Tensor) -> Tensor:  # (*b, n, D)
        """A part of a tensor of the block, as a view."""
        return cut_entries(tensor, self.axis, self.entry(part))[..., self.keys(part, tensor.shape[-2]), :]

    def whole_keys(self) -> Parts:
        """The same without a cut of the keys."""
        return replace(self, n_keys=1)


@dataclass(frozen=True)
class RowBlock:
    """Some rows of some entries; tensors are narrowed to views of them."""

    axis: int
    entries: slice
    rows: slice

    def seen(self, whole: Visibility, keys: slice) -> tuple[Term, ...] | None:
        """What is said about these rows and some of the keys; None if nothing is seen."""
        here = whole.entries(self.axis, self.entries)
        if (self.rows, keys) == (slice(0, whole.n_query), slice(0, whole.n_key)):
            return here.terms_here()
        return here.cut(self.rows, keys).shown()

    def state(self, whole: State) -> State:
        """The state of these rows, in the memory of the whole."""
        at, moment = self.vector, None if whole.moment is None else self.matrix(whole.moment)
        return State(at(whole.peak), at(whole.mass), at(whole.first), at(whole.spread), at(whole.count), moment)

    def vector(self, tensor: Tensor) -> Tensor:  # (*b, Q or 1)
        tensor = cut_entries(tensor, self.axis, self.entries)
        return tensor if tensor.shape[-1] == 1 else tensor[..., self.rows]

    def matrix(self, tensor: Tensor) -> Tensor:  # (*b, Q or 1, X)
        tensor = cut_entries(tensor, self.axis, self.entries)
        return tensor if tensor.shape[-2] == 1 else tensor[..., self.rows, :]


def row_blocks(query: Tensor, parts: Parts, entries: slice, alone: bool = False) -> list[RowBlock]:  # (*b, Q, D)
    """The rows of these entries, so many at a time that their gradient is small; all at once if `alone` is enough."""
    n = query.shape[-2]
    few = _FEW_ROWS * (torch.get_num_threads() if query.device.type == "cpu" else 8)
    wanted = -(-_wanted(query.numel() * max(4, query.element_size())) // len(parts.entries))
    cuts = 1 if alone else max(1, min(wanted, n // few))
    return [RowBlock(parts.axis, entries, rows) for rows in steps(n, cuts)]
