"""Negatives that are none: left out by label while streaming, or by a rule on scores a few rows at a time.

by label    keys sorted by label: a row's own label is one interval, everything else two; O(n) numbers, no mask
by score    an Exclusion is asked about a few rows against all keys; its mask lives for that moment, and is asked
            for again in the backward pass
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita import _checks
from partita.engine.terms import Term
from partita.errors import ShapeError
from partita.processes import View
from partita.support import Support

__all__ = ["AbovePositive", "Exclusion", "Guide", "InUse", "OtherLabel", "other_labels", "sort_by_label"]


@dataclass(frozen=True, eq=False)
class OtherLabel(Support):
    """Keys of another label than the row's, for keys sorted by label: j < first_i or j >= last_i."""

    first: Tensor  # (n,) where the row's label begins
    last: Tensor  # (n,) where it has ended

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        lead = [1] * len(batch)
        first, last = (x.to(device=device, dtype=torch.int32).view(*lead, n_query) for x in (self.first, self.last))
        return Term(stop=first), Term(start=last)


@dataclass(frozen=True, eq=False)
class InUse(Support):
    """Slots that hold a key, of a bank that may have room left; a key after the last slot is seen too."""

    used: Tensor  # (m,) bool

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        keep = torch.nn.functional.pad(self.used, (0, n_key - self.used.shape[0]), value=True)
        return (Term(mask=keep.view(*[1] * (len(batch) + 1), n_key)),)


def sort_by_label(labels: Tensor, key_labels: Tensor) -> tuple[Tensor, OtherLabel]:
    """An order of the keys, and the support of the keys in that order whose label differs from the row's."""
    ordered, order = key_labels.sort(stable=True)
    first = torch.searchsorted(ordered, labels.contiguous())
    last = torch.searchsorted(ordered, labels.contiguous(), right=True)
    return order, OtherLabel(first, last)


def other_labels(labels: Tensor, every: Sequence[Tensor], used: Tensor | None = None) -> View:
    """Which keys of each rank, sorted by label, have another label than the row; `every` are the ranks' key labels.

    used: of the keys in that order, those that count.
    """
    ordered = [known.sort(stable=True)[0] for known in every]

    def view(source: int, n: int) -> list[tuple[slice, int, Support]]:
        own = labels.long().contiguous()
        first = torch.searchsorted(ordered[source], own)
        last = torch.searchsorted(ordered[source], own, right=True)
        seen: Support = OtherLabel(first, last)
        return [(slice(0, n), 0, seen if used is None else seen & InUse(used))]

    return view


@dataclass(frozen=True, eq=False)
class Exclusion:
    """A rule that leaves negatives out by looking at scores; abstract."""

    def hidden(self, rows: Tensor, query: Tensor, key: Tensor, positive: Tensor) -> Tensor:
        """(r, m) True where a key is no negative of a row; `rows` are row numbers, `positive` their similarities."""
        raise TypeError("Exclusion is abstract; use AbovePositive or Guide.")

    def check(self, n_query: int, n_key: int) -> None:
        """Raise if the rule does not fit these sizes."""


@dataclass(frozen=True, eq=False)
class AbovePositive(Exclusion):
    """A negative more similar than the positive by more than a margin is taken for an unlabelled positive.

    hidden_ij  iff  <query_i, key_j> > <query_i, positive_i> + margin
    """

    margin: float = 0.0

    def hidden(self, rows: Tensor, query: Tensor, key: Tensor, positive: Tensor) -> Tensor:
        return query @ key.mT > positive[:, None] + self.margin


@dataclass(frozen=True, eq=False)
class Guide(Exclusion):
    """Another encoder's vectors of the same rows and keys say what is too similar (GISTEmbed).

    hidden_ij  iff  <guide_query_i, guide_key_j> > <guide_query_i, guide_positive_i> - margin
    """

    query: Tensor  # (n, dim_guide)
    key: Tensor  # (m, dim_guide); its first n rows are the positives
    margin: float = 0.0

    def check(self, n_query: int, n_key: int) -> None:
        if self.query.shape[0] != n_query or self.key.shape[0] != n_key:
            raise ShapeError(
                f"the guide needs a vector for each query and key, {n_query} and {n_key}; "
                f"got {_checks.shape_text(self.query)} and {_checks.shape_text(self.key)}."
            )

    def hidden(self, rows: Tensor, query: Tensor, key: Tensor, positive: Tensor) -> Tensor:
        own = self.query[rows]
        level = (own * self.key[rows]).sum(-1) - self.margin
        return own @ self.key.mT > level[:, None]
