"""Who takes part in a call: this process alone, or the ranks of a group.

A face asks one object for what may lie on other processes, and does not ask which kind it is:

    processes = processes_of(group)                  alone without a group
    with processes.checks(): ...                     what fails on one rank fails on all
    processes = processes.agree(call, ...)           sizes of all ranks; everything else is the same on them
    processes.sums(query, key, ...)                  one pass over the keys of all ranks
    processes.reduce(rows, "mean")                   torch's reduction over the rows of all ranks

`Processes` is the one process and the interface; `partita.distributed.ranks.Ranks` is the group. That is loaded when a
group is first given: torch's distributed modules are no business of a single process.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypedDict

import torch
from torch import Tensor

from partita.engine.sums import Sums
from partita.engine.visibility import Visibility
from partita.gibbs import Gibbs
from partita.rows import in_row_blocks, reduce_rows
from partita.support import Support

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ALONE", "Fact", "Pass", "PerRow", "Processes", "View", "processes_of"]


@dataclass(frozen=True, eq=False)
class PerRow:
    """A fact that is one number, the same on every rank, or a tensor with one for each of so many rows."""

    value: float | Tensor
    rows: int


Fact = bool | int | float | str | Sequence[int] | torch.dtype | Tensor | PerRow | None
# For the block of a rank with so many keys: (where in the block, first position in the whole, which keys count).
View = Callable[[int, int], Iterable[tuple[slice, int, "Support | Visibility | None"]]]


class Pass(TypedDict, total=False):
    """What is asked of one pass, and over what."""

    bias: Tensor | None
    support: Support | None  # of the rank's own block; every other block is seen whole
    view: View | None  # of every block, instead of a support
    kind: int  # whose sizes the keys have
    softcap: float | None
    grouped: bool
    batch: Sequence[int]  # one more to broadcast to
    value: Tensor | None
    target: Tensor | None  # keys of the rank's own block
    rank: bool
    statistics: bool


@dataclass(frozen=True, eq=False)
class Processes:
    """This process alone."""

    sizes: tuple[tuple[int, ...], ...] = ()  # once agreed: of each kind of rows, how many every rank holds
    rank: int = 0
    zigzag: bool = False  # whether a sequence is spread in zigzag order
    alone: ClassVar[bool] = True

    def checks(self) -> contextlib.AbstractContextManager[None]:
        """Checks of this rank's own arguments: what fails here is an error on every rank."""
        return contextlib.nullcontext()

    def agree(self, call: str, sizes: Sequence[int], facts: Mapping[str, Fact]) -> Processes:
        """The same processes, who know the sizes of all; raises on every rank if they disagree about a fact."""
        return replace(self, sizes=tuple((n,) for n in sizes))

    def confirm(self, call: str) -> None:
        """After checks that had to wait for the sizes: all ranks have passed them, or all raise."""

    def probe(self, query: Tensor, key: Tensor, scale: float | Tensor = 1.0) -> None:
        """Inside `checks`: raise now what a pass over these would raise when the others have started."""

    def runs(self, kind: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of every rank, the runs (first position in the whole, length) that its rows of a kind are."""
        return (((0, self.sizes[kind][0]),),)

    # ---- sums over ranks -------------------------------------------------------------------------------------------

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of what they then use alike."""
        return tensor

    def pooled(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of what each then uses in its own way."""
        return tensor

    def share(self, tensor: Tensor) -> Tensor:
        """A replicated tensor used alike on every rank: each gets an equal part of its gradient."""
        return tensor

    def added(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, without a gradient."""
        return tensor.detach()

    def gather_rows(self, own: Tensor, kind: int = 0) -> list[Tensor]:
        """A small tensor per row, of every rank; without a gradient."""
        return [own]

    def reduce(self, rows: Tensor, reduction: str, total: Tensor | None = None) -> Tensor:
        """torch's reduction over the rows of all ranks; "none" gives this rank's own."""
        return reduce_rows(rows, reduction, total)

    # ---- passes over the keys of all ranks -------------------------------------------------------------------------

    def sums(self, query: Tensor, key: Tensor, scale: float | Tensor, **asked: Unpack[Pass]) -> Sums:
        """The sums of these rows over the keys of all ranks; with a value its mean."""
        gibbs = Gibbs(
            query,
            key,
            scale=scale,
            bias=asked.get("bias"),
            support=_own(asked, key),
            softcap=asked.get("softcap"),
            grouped=asked.get("grouped", False),
        )
        value, rank, statistics = asked.get("value"), asked.get("rank", False), asked.get("statistics", True)
        return gibbs.reduce(value, asked.get("target"), rank=rank, statistics=statistics, mean=value is not None)

    def slices(self, gibbs: Gibbs, target: Tensor, here: Tensor | None, *, rank: bool, statistics: bool) -> Sums:
        """The sums of rows that every rank holds, where each holds a slice of the keys; states are merged.

        target: a key of this rank's slice; where `here` is False the row's target is elsewhere.
        rank: with the ranks come both ends of every row, named by their keys in the whole, and the variance.
        """
        return gibbs.reduce(target=target, rank=rank, statistics=statistics, variance=rank, extremes=rank)

    def both_ways_nll(
        self, query: Tensor, key: Tensor, scale: float | Tensor, bias: Tensor | None, own: Tensor
    ) -> tuple[Tensor, Tensor]:  # (n,), (n,)
        """-log p of key i for query i, and of query i for key i, by rows and columns of one score matrix."""
        if bias is None:
            return Gibbs(query, key, scale=scale).both_ways_nll()
        rows = self.sums(query, key, scale, bias=bias, target=own, statistics=False)
        return rows.nll(), self.sums(key, query, scale, bias=bias, target=own, statistics=False).nll()

    def count_above(self, query: Tensor, key: Tensor, level: Tensor, **asked: Unpack[Pass]) -> Tensor:  # (n,)
        """How many of the keys a row may see are more similar to it than its level, which need not be a key's.

        The level becomes the score of one more key, in one more dimension: the pass that ranks a target serves.
        """
        pad = torch.nn.functional.pad
        with torch.no_grad():  # not as a decorator: dynamo knows no decorated method of an object it made
            longer = pad(key.to(query.dtype), (0, 1, 0, 1))
            longer[-1, -1] = 1.0
            rows = torch.cat([query, level[:, None].to(query.dtype)], -1)
            target = torch.full((len(rows),), key.shape[0], dtype=torch.int64, device=rows.device)
            return Gibbs(rows, longer, support=_own(asked, key)).target_rank(target)

    def ask_all(
        self, ask: Callable[..., Tensor], rows: Tensor, key: Tensor, shared: Sequence[Tensor]
    ) -> Tensor:  # (n,)
        """The sum over the keys of all ranks of ask(rows, their numbers, keys, their numbers, *shared).

        The partner of a row is the key of its rank with its number. Rows and keys are asked in the dtype of `shared`:
        gradients of half-precision vectors are added up, then rounded once.
        """
        own, numbers = (torch.arange(len(x), device=x.device) for x in (rows, key))
        rows, key = (x.to(shared[0].dtype) for x in (rows, key))
        return in_row_blocks(ask, [rows, own], [key, numbers, *shared], len(key))


ALONE = Processes()


def _own(asked: Pass, key: Tensor) -> Support | None:
    """What is said of the only block there is."""
    view = asked.get("view")
    if view is None:
        return asked.get("support")
    ((_, _, seen),) = view(0, len(key))
    assert not isinstance(seen, Visibility)
    return seen


def processes_of(group: object | None) -> Processes:
    """This process alone, or the ranks of a group: of torch.distributed, or a DeviceMesh of one dimension."""
    if group is None:
        return ALONE
    found: Processes = importlib.import_module("partita.distributed.ranks").Ranks.of(group)
    return found
