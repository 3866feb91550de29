"""A support bound to sizes: a union of terms, each a conjunction a tile can be asked about.

    key j is visible to row i   iff   some term has   start_i <= j < stop_i
                                                      and query_segment_i == key_segment_j
                                                      and mask_ij
                                                      and (j != i if the term has a hole)

Causal, window and length limits are all row intervals, so a conjunction of them is one interval: O(n) numbers, and the
number of visible keys is a subtraction. Every tensor has the same batch dimensions, 1 where it broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita._checks import broadcast
from partita.engine.axes import align, cut_entries, split_heads

__all__ = ["Term", "cut", "pack", "unpack", "visible", "window_mask"]

_TAIL = {"start": 1, "stop": 1, "query_segment": 1, "key_segment": 1, "mask": 2}  # dimensions after those of the batch
_SLOTS = tuple(_TAIL)
_ROWS_AT_ONCE = 1 << 22  # booleans held at a time while counting a mask


@dataclass(frozen=True, eq=False)
class Term:
    """A conjunction. Its cuts keep a hole on the diagonal: `Visibility.cut` knows where it went."""

    start: Tensor | None = None  # (*b, Q) int32
    stop: Tensor | None = None  # (*b, Q) int32
    query_segment: Tensor | None = None  # (*b, Q)
    key_segment: Tensor | None = None  # (*b, K)
    mask: Tensor | None = None  # (*b, Q or 1, K or 1) bool
    hole: bool = False

    @property
    def trivial(self) -> bool:
        return not self.hole and all(getattr(self, slot) is None for slot in _SLOTS)

    @property
    def is_interval(self) -> bool:
        """Whether start and stop say it all."""
        return self.query_segment is None and self.mask is None and not self.hole

    @property
    def batch(self) -> tuple[int, ...]:
        """The common batch dimensions of its tensors."""
        return broadcast(*(t.shape[: -_TAIL[slot]] for slot in _SLOTS if (t := getattr(self, slot)) is not None))

    def __and__(self, other: Term) -> Term:
        """The keys both terms show."""
        query_segment, key_segment = _join_segments(self, other)
        return Term(
            _both(self.start, other.start, torch.maximum),
            _both(self.stop, other.stop, torch.minimum),
            query_segment,
            key_segment,
            _both(self.mask, other.mask, torch.logical_and),
            self.hole or other.hole,
        )

    def rows(self, at: slice | Tensor) -> Term:
        """Some of the rows."""

        def cut(slot: str, tensor: Tensor) -> Tensor:
            if slot == "mask":
                return tensor if tensor.shape[-2] == 1 else tensor[..., at, :]
            return tensor if slot == "key_segment" else tensor[..., at]

        return self._each(cut)

    def keys(self, at: slice) -> Term:
        """Some of the keys, counted from the first of them."""

        def cut(slot: str, tensor: Tensor) -> Tensor:
            if slot in ("start", "stop"):
                return torch.sub(tensor, at.start)
            broadcasts = slot == "mask" and tensor.shape[-1] == 1
            return tensor if slot == "query_segment" or broadcasts else tensor[..., at]

        return self._each(cut)

    def one_more_key(self) -> Term:
        """The same with a key after the last, which an interval or a mask does not show."""

        def pad(slot: str, tensor: Tensor) -> Tensor:
            if slot == "key_segment":
                return torch.cat([tensor, tensor[..., -1:]], -1)
            grows = slot == "mask" and tensor.shape[-1] != 1
            return torch.nn.functional.pad(tensor, (0, 1)) if grows else tensor

        return self._each(pad)

    def entries(self, axis: int, at: slice) -> Term:
        """Some entries of a batch dimension."""
        return self._each(lambda slot, tensor: cut_entries(tensor, axis, at))

    def align(self, n_batch: int) -> Term:
        """The same with so many batch dimensions."""
        return self._each(lambda slot, tensor: align(tensor, n_batch, _TAIL[slot]))

    def split_heads(self, groups: int) -> Term:
        """The last batch dimension as (key heads, groups)."""
        return self._each(lambda slot, tensor: split_heads(tensor, _TAIL[slot], groups))

    def _each(self, change: Callable[[str, Tensor], Tensor]) -> Term:
        """Every tensor there is, changed by a function that is told its name."""
        found = {slot: change(slot, t) for slot in _SLOTS if (t := getattr(self, slot)) is not None}
        return Term(**found, hole=self.hole)


def _both(a: Tensor | None, b: Tensor | None, join: object) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return join(a, b)  # type: ignore[operator,no-any-return]


def _join_segments(a: Term, b: Term) -> tuple[Tensor | None, Tensor | None]:
    """Two pairs of ids become one, so that equal means equal in both."""
    if a.query_segment is None or b.query_segment is None:
        chosen = b if a.query_segment is None else a
        return chosen.query_segment, chosen.key_segment
    assert a.key_segment is not None
    assert b.key_segment is not None
    queries = torch.stack(torch.broadcast_tensors(a.query_segment, b.query_segment), -1)
    keys = torch.stack(torch.broadcast_tensors(a.key_segment, b.key_segment), -1)
    one, other = torch.cat([queries.reshape(-1, 2), keys.reshape(-1, 2)]).unbind(-1)
    label = _places(_places(one) * one.shape[0] + _places(other))
    cut = math.prod(queries.shape[:-1])
    return label[:cut].view(queries.shape[:-1]), label[cut:].view(keys.shape[:-1])


def _places(ids: Tensor) -> Tensor:
    """Ids as the place where each first comes in their order: small numbers, without asking how many there are."""
    ids = ids.contiguous()
    return torch.searchsorted(ids.sort()[0], ids)


def pack(terms: Sequence[Term]) -> tuple[list[Tensor], list[int]]:
    """Tensors and small integers, for an operator that takes nothing else."""
    tensors: list[Tensor] = []
    layout: list[int] = []
    for term in terms:
        flags = 1 << len(_SLOTS) if term.hole else 0
        for bit, slot in enumerate(_SLOTS):
            tensor = getattr(term, slot)
            if tensor is not None:
                flags |= 1 << bit
                tensors.append(tensor)
        layout.append(flags)
    return tensors, layout


def unpack(tensors: Sequence[Tensor], layout: Sequence[int]) -> tuple[Term, ...]:
    """The inverse of `pack`."""
    rest = iter(tensors)
    terms = []
    for flags in layout:
        slots = {slot: next(rest) for bit, slot in enumerate(_SLOTS) if flags >> bit & 1}
        terms.append(Term(**slots, hole=bool(flags >> len(_SLOTS) & 1)))
    return tuple(terms)


def window_mask(terms: Sequence[Term], rows: slice, cols: slice, device: torch.device) -> Tensor | None:
    """Visibility of one tile (*b, rows, cols); None if every term is trivial there."""
    i = torch.arange(rows.start, rows.stop, device=device, dtype=torch.int32)[:, None]
    j = torch.arange(cols.start, cols.stop, device=device, dtype=torch.int32)
    out: Tensor | None = None
    for term in terms:
        part: Tensor | None = None
        if term.start is not None:
            part = _both(part, j >= term.start[..., rows, None], torch.logical_and)
        if term.stop is not None:
            part = _both(part, j < term.stop[..., rows, None], torch.logical_and)
        if term.query_segment is not None and term.key_segment is not None:
            same = term.query_segment[..., rows, None] == term.key_segment[..., None, cols]
            part = _both(part, same, torch.logical_and)
        if term.mask is not None:
            part = _both(part, cut(term.mask, rows, cols), torch.logical_and)
        if term.hole:
            part = _both(part, i != j, torch.logical_and)
        if part is None:
            return None
        out = _both(out, part, torch.logical_or)
    return out


def cut(matrix: Tensor, rows: slice, cols: slice) -> Tensor:
    """A tile of a matrix whose dimensions of size 1 broadcast."""
    matrix = matrix if matrix.shape[-2] == 1 else matrix[..., rows, :]
    return matrix if matrix.shape[-1] == 1 else matrix[..., cols]


def visible(terms: Sequence[Term], n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> Tensor:
    """Number of keys each row may see, (*batch, n_query) int64; a closed form unless a mask or a union is involved."""
    shape = (*batch, n_query)
    if len(terms) == 0:
        return torch.full(shape, n_key, dtype=torch.int64, device=device)
    if len(terms) == 1 and terms[0].mask is None:
        return _interval_count(terms[0], n_query, n_key, device).expand(shape)
    parts = []
    for rows in _rows_at_once(n_query, n_key * math.prod(batch)):
        part = window_mask(terms, rows, slice(0, n_key), device)
        width = rows.stop - rows.start
        if part is None:
            parts.append(torch.full((*batch, width), n_key, dtype=torch.int64, device=device))
        else:
            parts.append(part.expand(*part.shape[:-2], width, n_key).sum(-1).expand(*batch, width))
    return torch.cat(parts, -1) if parts else torch.zeros(shape, dtype=torch.int64, device=device)


def _rows_at_once(n_query: int, width: int) -> list[slice]:
    """Rows a few at a time; while tracing all of them, since nothing can be cut by size (a compiler adds up anyway)."""
    if torch.compiler.is_compiling():
        return [slice(0, n_query)]
    step = max(1, _ROWS_AT_ONCE // max(1, width))
    return [slice(i, min(i + step, n_query)) for i in range(0, n_query, step)]


def _interval_count(term: Term, n_query: int, n_key: int, device: torch.device) -> Tensor:
    row = torch.arange(n_query, device=device)
    start = row.new_zeros(n_query) if term.start is None else term.start.long().clamp(0, n_key)
    stop = row.new_full((n_query,), n_key) if term.stop is None else term.stop.long().clamp(0, n_key)
    if term.query_segment is None or term.key_segment is None:
        count = (stop - start).clamp(min=0)
        same_self = row < n_key
    else:
        count = _segment_count(term.query_segment, term.key_segment, start, stop)
        at = row.clamp(max=max(n_key - 1, 0))
        own = term.key_segment[..., at] if n_key else term.query_segment
        same_self = (row < n_key) & (own == term.query_segment)
    if term.hole:
        count = count - (same_self & (start <= row) & (row < stop)).long()
    return count


def _segment_count(query_segment: Tensor, key_segment: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Keys of the row's segment inside [start, stop): two binary searches in keys sorted by (segment, position)."""
    n_key = key_segment.shape[-1]
    batch = torch.broadcast_shapes(query_segment.shape[:-1], key_segment.shape[:-1], start.shape[:-1], stop.shape[:-1])
    ids = query_segment.expand(*batch, -1).contiguous()
    ordered, position = key_segment.expand(*batch, -1).contiguous().sort(dim=-1, stable=True)
    left = torch.searchsorted(ordered, ids)
    right = torch.searchsorted(ordered, ids, right=True)
    block = torch.searchsorted(ordered, ordered)
    place = block * (n_key + 1) + position
    low = torch.searchsorted(place, (left * (n_key + 1) + start).contiguous())
    high = torch.searchsorted(place, (left * (n_key + 1) + stop).contiguous())
    return (high.clamp(left, right) - low.clamp(left, right)).clamp(min=0)
