"""Which positions of a sequence a rank holds.

rank order   rank r holds the positions after those of rank r - 1: one run
zigzag       2 W pieces, rank r holds pieces r and 2 W - 1 - r: two runs, and every rank has the same causal work
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita import _checks
from partita.distributed.agree import Fact, joint_checks, meet
from partita.distributed.team import Team, team_of
from partita.errors import ShapeError

__all__ = ["Layout", "gather", "shard"]


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
