"""Which positions of a sequence a rank holds.

rank order   rank r holds the positions after those of rank r - 1: one run
zigzag       2 W pieces, rank r holds pieces r and 2 W - 1 - r: two runs, and every rank has the same causal work
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.errors import ShapeError

__all__ = ["Layout", "even_sizes"]


@dataclass(frozen=True)
class Layout:
    """The runs (first position, length) every rank holds."""

    runs: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def of(sizes: Sequence[int], zigzag: bool) -> Layout:
        total, world = sum(sizes), len(sizes)
        if not zigzag:
            return Layout(tuple(((sum(sizes[:r]), n),) for r, n in enumerate(sizes)))
        steps = _pieces(total, 2 * world)
        firsts = [sum(steps[:i]) for i in range(2 * world)]
        runs = tuple(tuple((firsts[i], steps[i]) for i in (r, 2 * world - 1 - r)) for r in range(world))
        expected = even_sizes(total, world, zigzag)
        if list(sizes) != expected:
            raise ShapeError(
                f"in zigzag order the ranks hold {expected} of {total} positions; got {list(sizes)}. "
                f"Cut the sequence with partita.distributed.shard(tensor, zigzag(group))."
            )
        return Layout(runs)

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """The positions of a rank's rows, in the order it holds them."""
        return torch.cat([torch.arange(first, first + n, device=device) for first, n in self.runs[rank]])


def even_sizes(n: int, world: int, zigzag: bool) -> list[int]:
    """How many of n positions each rank holds, as evenly as can be."""
    if not zigzag:
        return _pieces(n, world)
    steps = _pieces(n, 2 * world)
    return [steps[r] + steps[2 * world - 1 - r] for r in range(world)]


def _pieces(n: int, count: int) -> list[int]:
    return [n // count + (i < n % count) for i in range(count)]
