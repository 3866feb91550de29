"""A support bound to sizes: a union of terms, each a conjunction whose value on a tile is known from a few vectors.

    key j is visible to row i   iff   some term has   start_i <= j < stop_i
                                                      and query_segment_i == key_segment_j
                                                      and mask_ij
                                                      and j != skip_i

Causal, window and length limits are all row intervals, so a conjunction of them is one interval: O(n) numbers, and the
number of visible keys is a subtraction. Every tensor has the same batch dimensions, 1 where it broadcasts.

A term is cut to some rows and some keys: what names a key (start, stop, skip) is moved by where the keys begin, segment
ids and masks are cut. `Visibility` does so for a union, again and again.

Sums over keys that two terms show would count them twice; sums over terms that have no key in common merge exactly, by
the rule of `State`. `split_disjoint` makes such terms of a union:

    a | b  =  a | (b & not a),        and where a is an interval of each row, not a is the two intervals around it
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from partita._checks import broadcast, has_values
from partita.engine.axes import align, cut_entries, parts, split_heads

__all__ = ["TAIL", "Term", "Visibility", "both", "cut", "pack", "split_disjoint", "unpack", "visible", "window_mask"]

# dimensions after those of the batch
TAIL = {"start": 1, "stop": 1, "query_segment": 1, "key_segment": 1, "mask": 2, "skip": 1}
_SLOTS = tuple(TAIL)
_ROWS_AT_ONCE = 1 << 22  # booleans held at a time while counting a mask


class Term(NamedTuple):
    """A conjunction; what is None restricts nothing."""

    start: Tensor | None = None  # (*b, Q) int32
    stop: Tensor | None = None  # (*b, Q) int32
    query_segment: Tensor | None = None  # (*b, Q)
    key_segment: Tensor | None = None  # (*b, K)
    mask: Tensor | None = None  # (*b, Q or 1, K or 1) bool
    skip: Tensor | None = None  # (*b, Q) int32: the key a row leaves out; one that does not exist leaves out none

    @property
    def trivial(self) -> bool:
        return not [1 for tensor in self if tensor is not None]

    @property
    def is_interval(self) -> bool:
        """Whether start and stop are all there is."""
        return self.query_segment is None and self.mask is None and self.skip is None

    @property
    def batch(self) -> tuple[int, ...]:
        """The common batch dimensions of its tensors."""
        return broadcast(*[t.shape[: -TAIL[slot]] for slot, t in zip(_SLOTS, self, strict=True) if t is not None])

    def __and__(self, other: Term) -> Term:
        """The keys both terms show, where at most one of them leaves out a key: `both` is for two that may."""
        query_segment, key_segment = _join_segments(self, other)
        return Term(
            _both(self.start, other.start, torch.maximum),
            _both(self.stop, other.stop, torch.minimum),
            query_segment,
            key_segment,
            _both(self.mask, other.mask, torch.logical_and),
            other.skip if self.skip is None else self.skip,
        )

    def rows(self, at: slice | Tensor) -> Term:
        """Some of the rows."""

        def cut(slot: str, tensor: Tensor) -> Tensor:
            if slot == "mask":
                return tensor if tensor.shape[-2] == 1 else tensor[..., at, :]
            return tensor if slot == "key_segment" else tensor[..., at]

        return self.each(cut)

    def keys(self, at: slice) -> Term:
        """Some of the keys, counted from the first of them."""

        def cut(slot: str, tensor: Tensor) -> Tensor:
            if slot in ("start", "stop", "skip"):
                return torch.sub(tensor, at.start)
            broadcasts = slot == "mask" and tensor.shape[-1] == 1
            return tensor if slot == "query_segment" or broadcasts else tensor[..., at]

        return self.each(cut)

    def entries(self, axis: int, at: slice) -> Term:
        """Some entries of a batch dimension."""
        return self.each(lambda slot, tensor: cut_entries(tensor, axis, at))

    def align(self, n_batch: int) -> Term:
        """The same with this number of batch dimensions."""
        return self.each(lambda slot, tensor: align(tensor, n_batch, TAIL[slot]))

    def split_heads(self, groups: int) -> Term:
        """The last batch dimension as (key heads, groups)."""
        return self.each(lambda slot, tensor: split_heads(tensor, TAIL[slot], groups))

    def each(self, change: Callable[[str, Tensor], Tensor]) -> Term:
        """Every tensor there is, changed by a function of its name and itself."""
        return Term(*[None if t is None else change(slot, t) for slot, t in zip(_SLOTS, self, strict=True)])


def both(a: Term, b: Term) -> tuple[Term, ...]:
    """What two terms both show, as terms: two of them where each leaves out a key of its own."""
    if a.skip is None or b.skip is None or (has_values(a.skip) and torch.equal(a.skip, b.skip)):
        return (a & b,)
    rest = b._replace(skip=None)
    return a & rest & Term(stop=b.skip), a & rest & Term(start=b.skip + 1)


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
    tensors = [t for term in terms for t in term if t is not None]
    return tensors, [sum([1 << bit for bit, t in enumerate(term) if t is not None]) for term in terms]


def unpack(tensors: Sequence[Tensor], layout: Sequence[int]) -> tuple[Term, ...]:
    """The inverse of `pack`."""
    rest = iter(tensors)
    slots = range(len(_SLOTS))
    return tuple([Term(*[next(rest) if flags >> bit & 1 else None for bit in slots]) for flags in layout])


def window_mask(terms: Sequence[Term], rows: slice, cols: slice, device: torch.device) -> Tensor | None:
    """Visibility of one tile (*b, rows, cols); None if every term is trivial there."""
    j = torch.arange(cols.start, cols.stop, device=device, dtype=torch.int32)
    shown: list[Tensor] = []
    for term in terms:
        shows: list[Tensor] = []
        if term.start is not None:
            shows.append(j >= term.start[..., rows, None])
        if term.stop is not None:
            shows.append(j < term.stop[..., rows, None])
        if term.query_segment is not None and term.key_segment is not None:
            shows.append(term.query_segment[..., rows, None] == term.key_segment[..., None, cols])
        if term.mask is not None:
            shows.append(cut(term.mask, rows, cols))
        if term.skip is not None:
            shows.append(j != term.skip[..., rows, None])
        if not shows:
            return None
        shown.append(functools.reduce(torch.logical_and, shows))
    return functools.reduce(torch.logical_or, shown) if shown else None


def cut(matrix: Tensor, rows: slice, cols: slice) -> Tensor:
    """A tile of a matrix whose dimensions of size 1 broadcast."""
    matrix = matrix if matrix.shape[-2] == 1 else matrix[..., rows, :]
    return matrix if matrix.shape[-1] == 1 else matrix[..., cols]


# ---- how many keys a row sees ---------------------------------------------------------------------------------------


def visible(terms: Sequence[Term], n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> Tensor:
    """Number of keys each row may see, (*batch, n_query) int64.

    A closed form but for masks and for unions that do not split; the counts of disjoint terms add up.
    """
    masked = [1 for term in terms if term.mask is not None]
    found = None if masked else split_disjoint(terms, n_query, n_key, device)
    if found is None:
        return _count(terms, n_query, n_key, batch, device)
    shape = (*batch, n_query)
    if not found:
        return torch.full(shape, n_key, dtype=torch.int64, device=device)
    each = [_interval_count(term, n_query, n_key, device).expand(shape) for term in found]
    return each[0] if len(each) == 1 else torch.stack(each).sum(0)


def _count(terms: Sequence[Term], n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> Tensor:
    """By writing the union out, some rows at a time."""
    counts = []
    for rows in parts(n_query, max(1, _ROWS_AT_ONCE // max(1, n_key * math.prod(batch)))):
        seen = window_mask(terms, rows, slice(0, n_key), device)
        seen = torch.ones((), dtype=torch.bool, device=device) if seen is None else seen
        counts.append(seen.expand(*batch, rows.stop - rows.start, n_key).sum(-1))
    return torch.cat(counts, -1) if counts else torch.zeros((*batch, 0), dtype=torch.int64, device=device)


def _interval_count(term: Term, n_query: int, n_key: int, device: torch.device) -> Tensor:
    """Of a term without a mask."""
    zero = torch.zeros(n_query, dtype=torch.int64, device=device)
    start = zero if term.start is None else term.start.long().clamp(0, n_key)
    stop = zero + n_key if term.stop is None else term.stop.long().clamp(0, n_key)
    if term.query_segment is None or term.key_segment is None:
        count = (stop - start).clamp(min=0)
    else:
        count = _segment_count(term.query_segment, term.key_segment, start, stop)
    if term.skip is None:
        return count
    left_out = (start <= term.skip) & (term.skip < stop)
    if term.query_segment is not None and term.key_segment is not None and n_key:
        at = term.skip.long().clamp(0, n_key - 1)
        lead = broadcast(at.shape[:-1], term.key_segment.shape[:-1])
        segment = term.key_segment.expand(*lead, n_key).gather(-1, at.expand(*lead, n_query))
        left_out = left_out & (segment == term.query_segment)
    return count - left_out.long()


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


# ---- a union as terms without a common key --------------------------------------------------------------------------


def split_disjoint(terms: Sequence[Term], n_query: int, n_key: int, device: torch.device) -> tuple[Term, ...] | None:
    """Terms that show the same keys, each to a row at most once; None if two of them are no plain intervals."""
    if len(terms) < 2:
        return tuple(terms)
    plain = [term for term in terms if term.is_interval]
    others = [term for term in terms if not term.is_interval]
    if len(others) > 1:
        return None
    zero = torch.zeros(n_query, dtype=torch.int32, device=device)
    end = zero + n_key
    starts = [zero if term.start is None else term.start.clamp(0, n_key).to(torch.int32) for term in plain]
    stops = [end if term.stop is None else term.stop.clamp(0, n_key).to(torch.int32) for term in plain]
    ends = torch.stack(torch.broadcast_tensors(*starts, *stops), -1)  # (*b, Q, 2 * intervals)
    start, order = ends[..., : len(plain)].sort(dim=-1)
    # one turned round, as an & of intervals may leave it, shows nothing and reaches no further back than it starts
    stop = torch.maximum(ends[..., len(plain) :].gather(-1, order), start)
    reached = torch.cummax(stop, -1).values  # where the intervals up to this one end
    before = torch.cat([torch.zeros_like(start[..., :1]), reached[..., :-1]], -1)
    found = list(_intervals(torch.maximum(start, before), stop))
    if others:  # what is before each interval, and after the last
        last = reached[..., -1:]
        gaps = [*_intervals(before, start), *_intervals(last, end[:, None].expand_as(last))]
        found += [others[0] & gap for gap in gaps]
    return tuple(found)


def _intervals(start: Tensor, stop: Tensor) -> Iterator[Term]:
    for one, other in zip(start.unbind(-1), stop.unbind(-1), strict=True):
        yield Term(start=one.contiguous(), stop=other.contiguous())


# ---- a union that is cut --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Visibility:
    """Terms over n_query rows and n_key keys, with the batch dimensions of the rows; no terms show every key."""

    terms: tuple[Term, ...]
    n_query: int
    n_key: int
    batch: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(terms: Sequence[Term], n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> Visibility:
        """A support bound to these sizes."""
        plain = any(term.trivial for term in terms)
        return Visibility(() if plain else tuple(terms), n_query, n_key, tuple(batch), device)

    def cut(self, rows: slice | Tensor | None = None, keys: slice | None = None) -> Visibility:
        """Some of the rows, some of the keys; a slice has both ends."""
        terms, n_query, n_key = self.terms, self.n_query, self.n_key
        if rows is not None:
            terms = tuple(term.rows(rows) for term in terms)
            n_query = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if keys is not None:
            terms = tuple(term.keys(keys) for term in terms)
            n_key = keys.stop - keys.start
        return replace(self, terms=terms, n_query=n_query, n_key=n_key)

    def entries(self, axis: int, at: slice) -> Visibility:
        """Some entries of a batch dimension, for aligned terms."""
        if at == slice(None):
            return self
        batch = list(self.batch)
        batch[axis] = min(batch[axis], at.stop - at.start)
        return replace(self, terms=tuple(term.entries(axis, at) for term in self.terms), batch=tuple(batch))

    def also(self, mask: Tensor) -> Visibility:
        """Only keys that this mask (..., Q or 1, K or 1) shows as well."""
        shown = Term(mask=mask).align(len(self.batch))
        return replace(self, terms=tuple(term & shown for term in self.terms) or (shown,))

    def split_heads(self, groups: int) -> Visibility:
        """For grouped queries: terms and batch with the heads as (key heads, groups)."""
        if groups == 1:
            return self
        *lead, heads = self.batch
        terms = tuple(term.split_heads(groups) for term in self.terms_here())
        return replace(self, terms=terms, batch=(*lead, heads // groups, groups))

    def visible(self) -> Tensor:  # (*batch, Q)
        """How many keys each row sees."""
        return visible(self.terms_here(), self.n_query, self.n_key, self.batch, self.device)

    def terms_here(self) -> tuple[Term, ...]:
        """The terms as a backend takes them: aligned."""
        return tuple(term.align(len(self.batch)) for term in self.terms)

    def shown(self) -> tuple[Term, ...] | None:
        """As `terms_here`, but only those that matter: () if every key is seen, None if none is. Looks at values."""
        if not self.terms:
            return ()
        found = []
        for term in self.terms_here():
            if term.skip is not None and not bool(((term.skip >= 0) & (term.skip < self.n_key)).any()):
                term = term._replace(skip=None)
            plain, mask = term._replace(mask=None), term.mask
            seen = visible((plain,), self.n_query, self.n_key, plain.batch, self.device)
            if not bool(seen.any()) or (mask is not None and not bool(mask.any())):
                continue
            if bool((seen == self.n_key).all()) and (mask is None or bool(mask.all())):
                return ()
            found.append(term)
        return tuple(found) or None
