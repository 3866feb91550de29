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

from partita.distributed.layout import Cut
from partita.engine.request import Request
from partita.engine.terms import Term

__all__ = ["Parts", "Place", "cut_keys", "cut_terms", "places", "steps"]

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
        return _entries(tensor, self.axis, self.entry(part))[..., self.keys(part, tensor.shape[-2]), :]

    def whole_keys(self) -> Parts:
        """The same without a cut of the keys."""
        return replace(self, n_keys=1)


def _entries(tensor: Tensor, axis: int, entries: slice) -> Tensor:
    """Entries of one batch dimension; a tensor of size 1 there serves all."""
    if entries == slice(None) or tensor.shape[axis] == 1:
        return tensor
    return tensor.narrow(axis, entries.start, entries.stop - entries.start)


@dataclass(frozen=True)
class Place:
    """Some rows of some entries; tensors are narrowed to views of them."""

    axis: int
    entries: slice
    rows: slice
    n_query: int  # of the whole
    dims: int  # batch dimensions of every tensor
    device: torch.device

    def entry(self, tensor: Tensor) -> Tensor:
        return _entries(tensor, self.axis, self.entries)

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
    return [Place(parts.axis, entries, rows, n, query.dim() - 2, query.device) for rows in steps(n, cuts)]


def cut_terms(terms: Sequence[Term], place: Place, keys: slice, n_key: int) -> tuple[Term, ...] | None:
    """What a support of all rows over n_key keys says about a place and some of the keys; None if nothing is seen."""
    known = tuple(_entries_of(term, place) for term in terms)
    whole = place.rows.stop - place.rows.start == place.n_query and keys.stop - keys.start == n_key
    if whole or not known:
        return known
    found = Cut.rows(known, place.rows, place.device).keys(keys.start, keys.stop - keys.start)
    return None if found is None else tuple(_aligned(term, place.dims) for term in found)


def _aligned(term: Term, dims: int) -> Term:
    """A hole that became intervals has no batch dimensions of its own."""

    def row(vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.view(*[1] * (dims + 1 - vector.dim()), *vector.shape)

    return replace(term, start=row(term.start), stop=row(term.stop))


def _entries_of(term: Term, place: Place) -> Term:
    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else place.entry(tensor)

    ids = part(term.query_segment), part(term.key_segment)
    return Term(part(term.start), part(term.stop), *ids, part(term.mask), term.hole)


def cut_keys(request: Request) -> list[Request]:
    """The same rows over one part of the keys after the other; parts that nobody sees are left out."""
    n = request.n_key
    parts = Parts.of([request.key], n).n_keys
    if parts == 1:
        return [request]
    rows = slice(0, request.n_query)
    place = Place(0, slice(None), rows, request.n_query, request.query.dim() - 2, request.query.device)
    found = []
    for keys in steps(n, parts):
        terms = cut_terms(request.terms, place, keys, n)
        if terms is None:
            continue
        bias = request.bias
        if bias is not None and bias.shape[-1] != 1:
            bias = bias[..., keys]
        value = None if request.value is None else request.value[..., keys, :]
        found.append(replace(request, key=request.key[..., keys, :], value=value, bias=bias, terms=terms))
    return found
