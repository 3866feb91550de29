"""Which positions of a sequence a rank holds, and what a support says about its rows and some keys.

    rank order   rank r holds the positions after those of rank r - 1: one run
    zigzag       2 W pieces, rank r holds pieces r and 2 W - 1 - r: two runs, and every rank has the same causal work

A support speaks of positions in the whole sequence. Row intervals are moved by where a run of keys begins; segment ids
and masks are cut; a hole on a diagonal that is not the block's own becomes two intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita import _checks
from partita.distributed.agree import Fact, joint_checks, meet
from partita.distributed.team import Team, team_of
from partita.engine.terms import Term, conjunction, visible
from partita.errors import ShapeError

__all__ = ["Cut", "Layout", "gather", "shard"]


@dataclass(frozen=True)
class Layout:
    """The runs (first position, length) every rank holds."""

    runs: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def of(sizes: Sequence[int], zigzag: bool) -> Layout:
        total, world = sum(sizes), len(sizes)
        if not zigzag:
            return Layout(tuple(((sum(sizes[:r]), n),) for r, n in enumerate(sizes)))
        steps = [total // (2 * world) + (i < total % (2 * world)) for i in range(2 * world)]
        firsts = [sum(steps[:i]) for i in range(2 * world)]
        runs = tuple(tuple((firsts[i], steps[i]) for i in (r, 2 * world - 1 - r)) for r in range(world))
        expected = [sum(n for _, n in own) for own in runs]
        if list(sizes) != expected:
            raise ShapeError(
                f"in zigzag order the ranks hold {expected} of {total} positions; got {list(sizes)}. "
                f"Cut the sequence with partita.distributed.shard(tensor, zigzag(group))."
            )
        return Layout(runs)

    @property
    def total(self) -> int:
        return sum(n for own in self.runs for _, n in own)

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """The positions of a rank's rows, in the order it holds them."""
        return torch.cat([torch.arange(first, first + n, device=device) for first, n in self.runs[rank]])


@dataclass(frozen=True, eq=False)
class Cut:
    """A support bound to the whole, of which only this rank's rows are left."""

    terms: tuple[Term, ...]
    at: Tensor  # (Q,) int32, the position of each row

    @staticmethod
    def of(terms: Sequence[Term], at: Tensor) -> Cut:
        return Cut(tuple(_rows(term, at) for term in terms), at.to(torch.int32))

    @staticmethod
    def rows(terms: Sequence[Term], rows: slice, device: torch.device) -> Cut:
        """Of rows that lie side by side: nothing is copied."""
        at = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)
        return Cut(tuple(_rows(term, rows) for term in terms), at)

    def also(self, mask: Tensor) -> Cut:
        """Only keys that this mask (*b, Q or 1, K or 1) shows as well."""
        shown = Term(mask=mask)
        return Cut(tuple(conjunction(term, shown) for term in self.terms) if self.terms else (shown,), self.at)

    def keys(self, first: int, n: int) -> tuple[Term, ...] | None:
        """Terms over the keys first, ..., first + n - 1; () if all are seen, None if none is."""
        if not self.terms:
            return ()
        found: list[Term] = []
        for term in self.terms:
            for part in self._shifted(term, first, n):
                seen = _extent(part, n)
                if seen == "all":
                    return ()
                if seen == "some":
                    found.append(part)
        return tuple(found) or None

    def visible(self, n_key: int, batch: Sequence[int]) -> Tensor:  # (*batch, Q)
        """How many keys of the whole each row sees."""
        terms = [part for term in self.terms for part in self._shifted(term, 0, n_key)]
        return visible(terms, len(self.at), n_key, batch, self.at.device)

    def _shifted(self, term: Term, first: int, n: int) -> Sequence[Term]:
        keys = slice(first, first + n)
        part = Term(
            None if term.start is None else term.start - first,
            None if term.stop is None else term.stop - first,
            term.query_segment,
            None if term.key_segment is None else term.key_segment[..., keys],
            term.mask if term.mask is None or term.mask.shape[-1] == 1 else term.mask[..., keys],
        )
        if not term.hole:
            return (part,)
        at = self.at - first
        if not bool(((at >= 0) & (at < n)).any()):
            return (part,)
        if len(at) <= n and bool((at == torch.arange(len(at), device=at.device)).all()):
            return (Term(part.start, part.stop, part.query_segment, part.key_segment, part.mask, hole=True),)
        at = at.view(*[1] * (_dims(part) - 1), -1)
        return conjunction(part, Term(stop=at)), conjunction(part, Term(start=at + 1))


def _dims(term: Term) -> int:
    """How many dimensions a row vector of this term has."""
    for vector in (term.start, term.stop, term.query_segment):
        if vector is not None:
            return vector.dim()
    return 1 if term.mask is None else term.mask.dim() - 1


def _rows(term: Term, at: Tensor | slice) -> Term:
    def row(vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector[..., at]

    mask = term.mask if term.mask is None or term.mask.shape[-2] == 1 else term.mask[..., at, :]
    return Term(row(term.start), row(term.stop), row(term.query_segment), term.key_segment, mask, term.hole)


def _extent(term: Term, n: int) -> str:
    """Whether the rows of a term see all, some or none of n keys, as far as its intervals and mask tell."""
    low = None if term.start is None else term.start.clamp(min=0)
    high = None if term.stop is None else term.stop.clamp(max=n)
    whole = term.query_segment is None and not term.hole
    if low is not None or high is not None:
        begin = torch.zeros_like(high) if low is None and high is not None else low
        assert begin is not None
        end = torch.full_like(begin, n) if high is None else high
        if not bool((begin < end).any()):
            return "none"
        whole = whole and bool(((begin <= 0) & (end >= n)).all())
    if term.mask is not None:
        if not bool(term.mask.any()):
            return "none"
        whole = whole and bool(term.mask.all())
    return "all" if whole else "some"


def shard(tensor: Tensor, group: object, dim: int = -2) -> Tensor:
    """This rank's slice of a tensor that all hold whole: even pieces in rank order, or as in `zigzag(group)`."""
    team = team_of(group)
    n = tensor.shape[dim]
    sizes = _even(n, team)
    return tensor.index_select(dim, Layout.of(sizes, team.zigzag).positions(team.rank, tensor.device))


def _even(n: int, team: Team) -> list[int]:
    pieces = team.size * (2 if team.zigzag else 1)
    steps = [n // pieces + (i < n % pieces) for i in range(pieces)]
    return [steps[r] + steps[pieces - 1 - r] for r in range(team.size)] if team.zigzag else steps


def gather(tensor: Tensor, group: object, dim: int = -2) -> Tensor:
    """The whole of which each rank holds a slice, on every rank and without a gradient: for looking at it."""
    team = team_of(group)
    with joint_checks(team):
        if not -tensor.dim() <= dim < tensor.dim():
            raise ShapeError(f"dim must be a dimension of {_checks.shape_text(tensor)}; got {dim}.")
    rest = list(tensor.shape)
    del rest[dim]
    facts: dict[str, Fact] = {"the dtype": tensor.dtype, "the other dimensions": tuple(rest)}
    sizes = [row[0] for row in meet(team, "gather", [tensor.shape[dim]], facts)]
    parts = team.gather_rows(tensor.detach().movedim(dim, 0), sizes)
    layout = Layout.of(sizes, team.zigzag)
    where = torch.cat([layout.positions(r, tensor.device) for r in range(team.size)])
    whole = torch.cat(parts)
    return torch.empty_like(whole).index_copy(0, where, whole).movedim(0, dim)
