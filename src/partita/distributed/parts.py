"""Blocks are walked in parts, so that whatever is made on the way has the size of a part and not of a block.

    a part of a block   some entries of one batch dimension and all their keys; where that is not enough, some keys
    a place             the rows that meet it: those of the same entries, some at a time

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
from partita.engine.request import Request
from partita.engine.terms import Term
from partita.engine.visibility import Visibility

__all__ = ["Parts", "Place", "cut_keys", "places", "steps", "visibility"]

_SMALLEST = 1 << 20  # bytes of a part
_MOST = 16
_FEW = 256  # keys of a part
_FEW_ROWS = 512  # rows of a place, for every thread; on other devices for eight


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
class Place:
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

    def entry(self, tensor: Tensor) -> Tensor:
        return cut_entries(tensor, self.axis, self.entries)

    def vector(self, tensor: Tensor) -> Tensor:  # (*b, Q or 1)
        tensor = self.entry(tensor)
        return tensor if tensor.shape[-1] == 1 else tensor[..., self.rows]

    def matrix(self, tensor: Tensor) -> Tensor:  # (*b, Q or 1, X)
        tensor = self.entry(tensor)
        return tensor if tensor.shape[-2] == 1 else tensor[..., self.rows, :]


def places(query: Tensor, parts: Parts, entries: slice, alone: bool = False) -> list[Place]:  # (*b, Q, D)
    """The rows of these entries, so many at a time that their gradient is small; all at once if `alone` is enough."""
    n = query.shape[-2]
    few = _FEW_ROWS * (torch.get_num_threads() if query.device.type == "cpu" else 8)
    wanted = -(-_wanted(query.numel() * max(4, query.element_size())) // len(parts.entries))
    cuts = 1 if alone else max(1, min(wanted, n // few))
    return [Place(parts.axis, entries, rows) for rows in steps(n, cuts)]


def visibility(request: Request) -> Visibility:
    """Which keys the rows of a request see."""
    return Visibility(request.terms, request.n_query, request.n_key, request.batch, request.query.device)


def cut_keys(request: Request) -> list[Request]:
    """The same rows over one part of the keys after the other; parts that nobody sees are left out."""
    n = request.n_key
    parts = Parts.of([request.key], n).n_keys
    if parts == 1:
        return [request]
    seen = visibility(request)
    found = []
    for keys in steps(n, parts):
        terms = seen.cut(keys=keys).shown()
        if terms is None:
            continue
        bias = request.bias
        if bias is not None and bias.shape[-1] != 1:
            bias = bias[..., keys]
        value = None if request.value is None else request.value[..., keys, :]
        found.append(replace(request, key=request.key[..., keys, :], value=value, bias=bias, terms=terms))
    return found
