"""The ranks of a group, as a face sees them: what `partita.processes.Processes` says of one process, said of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from partita.distributed._ring.count import count_above
from partita.distributed._ring.distribution import Ring
from partita.distributed._ring.ends import merge_ends
from partita.distributed._ring.group import Group, group_of
from partita.distributed._ring.handshake import checks, confirm, handshake
from partita.distributed._ring.layout import Layout
from partita.distributed._ring.merge import merge_states
from partita.distributed._ring.questions import ask_all
from partita.engine.sums import Sums
from partita.gibbs import Gibbs
from partita.processes import Fact, Pass, Processes
from partita.rows import reduce_rows
from partita.support import Support

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Ranks"]


@dataclass(frozen=True, eq=False)
class Ranks(Processes):
    """A group that makes a call together."""

    group: Group = field(kw_only=True)
    alone: ClassVar[bool] = False

    @staticmethod
    def of(group: object) -> Ranks:
        known = group_of(group)
        return Ranks(rank=known.rank, zigzag=known.zigzag, group=known)

    def checks(self) -> contextlib.AbstractContextManager[None]:
        return checks(self.group)

    def agree(self, call: str, sizes: Sequence[int], facts: Mapping[str, Fact]) -> Ranks:
        table = handshake(self.group, call, sizes, facts)
        return replace(self, sizes=tuple(zip(*table, strict=True)))

    def confirm(self, call: str) -> None:
        confirm(self.group, call)

    def runs(self, kind: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        return Layout.of(self.sizes[kind], self.zigzag).runs

    def probe(self, query: Tensor, key: Tensor, scale: float | Tensor = 1.0) -> None:
        Gibbs(query, key, scale=scale)

    def total(self, tensor: Tensor) -> Tensor:
        return self.group.total(tensor)

    def pooled(self, tensor: Tensor) -> Tensor:
        return self.group.pooled(tensor)

    def share(self, tensor: Tensor) -> Tensor:
        return self.group.scaled_gradient(tensor, 1.0 / self.group.size)

    def added(self, tensor: Tensor) -> Tensor:
        return self.group.added(tensor)

    def gather_rows(self, own: Tensor, kind: int = 0) -> list[Tensor]:
        return self.group.gather_rows(own, list(self.sizes[kind]))

    def reduce(self, rows: Tensor, reduction: str, total: Tensor | None = None) -> Tensor:
        if reduction == "none":
            return rows
        if reduction == "mean" and total is None:
            total = rows.new_full((), float(rows.numel()))
        count = None if total is None else self.added(total)
        return reduce_rows(self.total(rows.sum()), reduction, count)

    def _ring(self, query: Tensor, key: Tensor, scale: float | Tensor, asked: Pass) -> Ring:
        """The distribution of these rows over the keys of all ranks."""
        own, support, view = self.rank, asked.get("support"), asked.get("view")

        def apart(source: int, n: int) -> list[tuple[slice, int, Support | None]]:
            return [(slice(0, n), 0, support if source == own else None)]

        return Ring(
            query,
            key,
            group=self.group,
            sizes=self.sizes[asked.get("kind", 0)],
            scale=scale,
            bias=asked.get("bias"),
            view=apart if view is None and support is not None else view,
            softcap=asked.get("softcap"),
            grouped=asked.get("grouped", False),
            batch=asked.get("batch", ()),
        )

    def sums(self, query: Tensor, key: Tensor, scale: float | Tensor, **asked: Unpack[Pass]) -> Sums:
        rank, statistics = asked.get("rank", False), asked.get("statistics", True)
        ring = self._ring(query, key, scale, asked)
        return ring.sums(asked.get("value"), asked.get("target"), rank=rank, statistics=statistics)

    def slices(self, gibbs: Gibbs, target: Tensor, here: Tensor | None, *, rank: bool, statistics: bool) -> Sums:
        assert here is not None
        if gibbs.key.shape[-2] == 0:
            sums = gibbs.reduce(statistics=statistics, extremes=rank)
            score, ranks = torch.zeros_like(sums.mass), target
        else:
            sums = gibbs.reduce(target=target, rank=rank, statistics=statistics, extremes=rank)
            assert sums.target_score is not None
            score, ranks = sums.target_score, target if sums.rank is None else sums.rank
        whole = merge_states(sums.state, self.group, statistics)
        score = self.total(torch.where(here, score, torch.zeros_like(score)))
        if not rank:
            return Sums.of(whole, score)
        if gibbs.key.shape[-2] and not bool(here.all()):
            ranks = torch.where(here, ranks, count_above(gibbs.request(), score.detach()))
        least, places = merge_ends(sums, sum(self.sizes[0][: self.rank]), self.group)
        return Sums.of(whole, score, self.added(ranks))._replace(least=least, places=places)

    def both_ways_nll(
        self, query: Tensor, key: Tensor, scale: float | Tensor, bias: Tensor | None, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, columns = self._ring(query, key, scale, {"bias": bias}).both_ways(own)
        return rows.nll(), columns.nll()

    @torch.no_grad()
    def count_above(self, query: Tensor, key: Tensor, level: Tensor, **asked: Unpack[Pass]) -> Tensor:
        rank = self._ring(query, key, 1.0, asked).sums(level=level, statistics=False).rank
        assert rank is not None
        return rank

    def ask_all(self, ask: Callable[..., Tensor], rows: Tensor, key: Tensor, shared: Sequence[Tensor]) -> Tensor:
        return ask_all(ask, self.group, self.sizes[1], rows, key, shared)
