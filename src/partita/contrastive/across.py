"""Pairs spread over processes: every rank has its own rows, and all ranks' keys are candidates.

A rank's positives are its own, so labels are local; the global order of rows is that of the ranks. What is asked of one
process by a Gibbs is asked here of the ring, and gives the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.contrastive.exclude import OtherLabel
from partita.distributed import Fact, Ring, Sums, Team, View, meet
from partita.gibbs import Gibbs
from partita.rows import reduce_rows
from partita.support import Support

__all__ = ["Across", "read_both", "read_sums", "reduce_all"]


@dataclass(frozen=True, eq=False)
class Across:
    """A group that has agreed on a call, and how many rows each rank brings."""

    team: Team
    sizes: tuple[tuple[int, ...], ...]  # per kind of rows (anchors, negatives, queue), per rank

    @staticmethod
    def of(
        team: Team | None,
        call: str,
        tensors: Mapping[str, Tensor | None],
        scale: float | Tensor,
        options: Sequence[object] = (),
        sizes: Sequence[int] = (),
    ) -> Across | None:
        """Ask the others; None without a group. Sizes default to the rows of each tensor."""
        if team is None:
            return None
        grad = torch.is_grad_enabled()
        facts: dict[str, Fact] = {"the temperature or scale": scale}
        for name, tensor in tensors.items():
            facts[f"the dtype of {name}"] = None if tensor is None else tensor.dtype
            facts[f"the last dimension of {name}"] = None if tensor is None else tensor.shape[-1]
            facts[f"whether {name} needs a gradient"] = tensor is not None and grad and tensor.requires_grad
        given = list(sizes) or [0 if t is None else t.shape[0] for t in tensors.values()]
        table = meet(team, f"{call} {tuple(options)}", given, facts)
        return Across(team, tuple(zip(*table, strict=True)))

    def ring(
        self,
        query: Tensor,
        key: Tensor,
        scale: float | Tensor,
        *,
        bias: Tensor | None = None,
        support: Support | None = None,  # of the rank's own block; every other block is seen whole
        view: View | None = None,  # of every block, instead of a support
        kind: int = 0,
    ) -> Ring:
        """The distribution of these rows over the keys of all ranks."""
        own = self.team.rank

        def apart(source: int, n: int) -> list[tuple[slice, int, Support | None]]:
            return [(slice(0, n), 0, support if source == own else None)]

        seen = apart if view is None and support is not None else view
        return Ring(query, key, team=self.team, sizes=self.sizes[kind], scale=scale, bias=bias, view=seen)

    def labels(self, own: Tensor, kind: int = 0) -> list[Tensor]:
        """The labels of every rank's keys: one integer each, small beside the keys."""
        return self.team.gather_rows(own.long(), list(self.sizes[kind]))

    def other_labels(self, rows: Tensor, keys: Sequence[Tensor]) -> View:
        """Which keys of a block, sorted by label, have another label than the row."""
        ordered = [labels.sort(stable=True)[0] for labels in keys]

        def view(source: int, n: int) -> list[tuple[slice, int, Support]]:
            mine = rows.long().contiguous()
            first = torch.searchsorted(ordered[source], mine)
            last = torch.searchsorted(ordered[source], mine, right=True)
            return [(slice(0, n), 0, OtherLabel(first, last))]

        return view


def read_sums(
    across: Across | None,
    query: Tensor,
    key: Tensor,
    scale: float | Tensor,
    *,
    bias: Tensor | None = None,
    support: Support | None = None,
    view: View | None = None,
    kind: int = 0,
    target: Tensor | None = None,
    rank: bool = False,
    statistics: bool = True,
) -> Sums:
    """One pass over the keys of this process, or of all ranks."""
    if across is None:
        gibbs = Gibbs(query, key, scale=scale, bias=bias, support=support)
        return gibbs.reduce(target=target, rank=rank, statistics=statistics)
    ring = across.ring(query, key, scale, bias=bias, support=support, view=view, kind=kind)
    return ring.sums(target=target, rank=rank, statistics=statistics)


def read_both(
    across: Across | None, query: Tensor, key: Tensor, scale: float | Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Sums, Sums]:
    """Rows over keys and keys over rows, of this process or of all ranks; without statistics."""
    if across is not None:
        return across.ring(query, key, scale, bias=bias).both(target)
    rows = read_sums(None, query, key, scale, bias=bias, target=target, statistics=False)
    return rows, read_sums(None, key, query, scale, bias=bias, target=target, statistics=False)


def reduce_all(across: Across | None, rows: Tensor, reduction: str, total: Tensor | None = None) -> Tensor:
    """torch's reduction over the rows of all ranks; "none" gives this rank's own."""
    if across is None or reduction == "none":
        return reduce_rows(rows, reduction, total)
    team = across.team
    if reduction == "mean" and total is None:
        total = rows.new_full((), float(rows.numel()))
    count = None if total is None else team.all_reduce(total.detach().clone())
    return reduce_rows(team.total(rows.sum()), reduction, count)
