"""Which keys some rows may see: a union of terms that can be cut again and again.

    rows of a block of queries, keys of a shard, entries of the batch: of each, what the whole support says about it

Row intervals are moved by where the keys begin; segment ids and masks are cut. A hole stays where row and key are the
same position of the whole: `at` remembers it, and `terms_here` turns one that left the diagonal into two intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.engine.disjoint import visible
from partita.engine.terms import Term

__all__ = ["Visibility"]


@dataclass(frozen=True, eq=False)
class Visibility:
    """Terms over n_query rows and n_key keys, with the batch dimensions of the rows; no terms show every key."""

    terms: tuple[Term, ...]
    n_query: int
    n_key: int
    batch: tuple[int, ...]
    device: torch.device
    at: int | Tensor = 0  # the key at row 0, where rows lie side by side; else (Q,), the key at each row

    @staticmethod
    def of(terms: Sequence[Term], n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> Visibility:
        """A support bound to these sizes."""
        plain = any(term.trivial for term in terms)
        return Visibility(() if plain else tuple(terms), n_query, n_key, tuple(batch), device)

    def cut(self, rows: slice | Tensor | None = None, keys: slice | None = None) -> Visibility:
        """Some of the rows, some of the keys; a slice has both ends."""
        terms, n_query, n_key, at = self.terms, self.n_query, self.n_key, self.at
        if rows is not None:
            terms = tuple(term.rows(rows) for term in terms)
            if isinstance(at, Tensor):
                at = at[rows]
            else:
                at = at + rows.start if isinstance(rows, slice) else rows.to(torch.int32) + at
            n_query = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if keys is not None:
            terms = tuple(term.keys(keys) for term in terms)
            at, n_key = at - keys.start, keys.stop - keys.start
        return replace(self, terms=terms, n_query=n_query, n_key=n_key, at=at)

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
        terms = tuple(term.align(len(self.batch)).split_heads(groups) for term in self.terms)
        return replace(self, terms=terms, batch=(*lead, heads // groups, groups))

    def one_more_key(self) -> Visibility:
        """The same with a key after the last, which every row sees."""
        terms = self.terms_here()
        longer = Visibility(terms, self.n_query, self.n_key + 1, self.batch, self.device)
        beside = self.n_query <= self.n_key  # no row has its hole there
        if not terms or (beside and terms[0].hole and replace(terms[0], hole=False).trivial):
            return longer
        last = torch.full((self.n_query,), self.n_key, dtype=torch.int32, device=self.device)
        added = Term(start=last).align(len(self.batch))
        return replace(longer, terms=(*(term.one_more_key() for term in terms), added))

    def visible(self) -> Tensor:  # (*batch, Q)
        """How many keys each row sees."""
        return visible(self.terms_here(), self.n_query, self.n_key, self.batch, self.device)

    def terms_here(self) -> tuple[Term, ...]:
        """The terms as a backend takes them: aligned, holes on the diagonal."""
        return tuple(part.align(len(self.batch)) for term in self.terms for part in self._around_hole(term))

    def shown(self) -> tuple[Term, ...] | None:
        """As `terms_here`, but only those that matter: () if every key is seen, None if none is. Looks at values."""
        if not self.terms:
            return ()
        found = []
        for term in self.terms_here():
            seen = _extent(term, self.n_key)
            if seen == "all":
                return ()
            if seen == "some":
                found.append(term)
        return tuple(found) or None

    def _around_hole(self, term: Term) -> tuple[Term, ...]:
        """A hole that left the diagonal becomes two intervals: the keys before it, and the keys after it."""
        if not term.hole:
            return (term,)
        n, at, without = self.n_key, self.at, replace(term, hole=False)
        if isinstance(at, Tensor):
            there = bool(((at >= 0) & (at < n)).any())
            diagonal = bool((at == torch.arange(len(at), device=at.device)).all())
        else:
            there, diagonal = -self.n_query < at < n, at == 0
        if diagonal or not there:
            return (term if diagonal else without,)
        if not isinstance(at, Tensor):
            at = torch.arange(at, at + self.n_query, dtype=torch.int32, device=self.device)
        before, after = (part.align(len(self.batch)) for part in (Term(stop=at), Term(start=at + 1)))
        return without & before, without & after


def _extent(term: Term, n: int) -> str:
    """Whether the rows of a term see all, some or none of n keys, as far as its intervals and mask tell."""
    start, stop = term.start, term.stop
    whole = term.query_segment is None and not term.hole
    if start is not None or stop is not None:
        first = torch.zeros_like(stop) if start is None and stop is not None else start
        assert first is not None
        last = torch.full_like(first, n) if stop is None else stop
        if not bool((first.clamp(min=0) < last.clamp(max=n)).any()):
            return "none"
        whole = whole and bool(((first <= 0) & (last >= n)).all())
    if term.mask is not None:
        if not bool(term.mask.any()):
            return "none"
        whole = whole and bool(term.mask.all())
    return "all" if whole else "some"
