"""One tree for every number of processes: in exact rows the bits do not tell how keys were shared out.

    classes      n of them are halved, the first half the larger by one, until a leaf has `CLASSES` or fewer
    positions    leaves of `POSITIONS`, aligned to the whole sequence, in pairs, pairs of pairs and so on

A pass has one leaf, and two neighbours are joined by the rule that merges states, or added. Equal slices of classes
over 1, 2, 4, ... ranks are nodes of the first tree, so each rank works its own node out, and the ranks are joined as
their numbers are halved. Of positions a rank sees every leaf come by. What autograd adds up for a row it adds up the
same way: `spread` gives every leaf its own name of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from partita.collective import Collective
from partita.engine import State

__all__ = ["CLASSES", "POSITIONS", "Joining", "added", "fold", "halves", "leaves", "merged", "pieces"]

CLASSES = 4096
POSITIONS = 256

T = TypeVar("T")


# ---- halves of a known number ---------------------------------------------------------------------------------------


def halves(n: int, most: int) -> list[int]:
    """The sizes of the leaves of n things, in order."""
    return [n] if n <= most else [*halves(n - n // 2, most), *halves(n // 2, most)]


def fold(n: int, leaves: Iterable[T], join: Callable[[T, T], T], most: int) -> T:
    """What the leaves of n things come to, two neighbours at a time; each is made when it is needed."""
    coming = iter(leaves)

    def node(n: int) -> T:
        return next(coming) if n <= most else join(node(n - n // 2), node(n // 2))

    return node(n)


def spread(tensor: Tensor, n: int, most: int) -> list[Tensor]:
    """The tensor once for every leaf; its gradients are added as the leaves are joined."""
    if n <= most:
        return [tensor]
    one, other = _Twice.apply(tensor) if tensor.requires_grad else (tensor, tensor)  # type: ignore[no-untyped-call]
    return [*spread(one, n - n // 2, most), *spread(other, n // 2, most)]


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return tensor.view_as(tensor), tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one + other


def leaves(
    rows: Sequence[Any], key: Tensor, bias: Tensor | None
) -> list[tuple[tuple[Any, ...], Tensor, Tensor | None]]:
    """`Collective.leaves` of a rank's classes."""
    n = key.shape[-2]
    sizes = halves(n, CLASSES)
    each = [spread(x, n, CLASSES) if isinstance(x, Tensor) else [x] * len(sizes) for x in rows]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes, -1)
    return list(zip(zip(*each, strict=True), key.split(sizes, -2), biases, strict=True))


# ---- over ranks -----------------------------------------------------------------------------------------------------


def added(tensor: Tensor, known: Collective) -> Tensor:
    """The sum over ranks, without a gradient."""
    return fold(known.size, known.all_gather(tensor.detach()), torch.add, 1)


def merged(state: State, known: Collective) -> State:
    """The state of the keys of all ranks; the others are constants, and this rank's own keeps its graph."""
    rows = torch.broadcast_tensors(state.peak, state.mass, state.first, state.spread, state.count)
    numbers = known.all_gather(torch.stack([x.detach() for x in rows]))
    moments: Sequence[Tensor | None] = [None] * known.size
    if state.moment is not None:
        moments = known.all_gather(state.moment.detach())
    states = [State(*x.unbind(), moment) for x, moment in zip(numbers, moments, strict=True)]  # type: ignore[call-arg, arg-type]
    states[known.rank] = state
    return fold(known.size, states, State.merge, 1)


# ---- positions, in whatever order they come -------------------------------------------------------------------------


def pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Some positions, cut where leaves begin."""
    while start < stop:
        end = min(stop, (start // POSITIONS + 1) * POSITIONS)
        yield start, end
        start = end


class Joining(Generic[T]):
    """Leaves of positions, joined as soon as both neighbours are there; what no row sees does not come.

    A leaf that is cut between ranks comes in pieces, which are joined from left to right.
    """

    def __init__(self, n: int, join: Callable[[T, T], T]):
        self._n, self._join = n, join
        self._nodes: dict[tuple[int, int], T] = {}  # by how many times pairs were joined, and their number there
        self._cut: dict[int, dict[int, T]] = {}  # by leaf, then by position

    def add(self, start: int, stop: int, item: T) -> None:
        leaf = start // POSITIONS
        if stop - start < min((leaf + 1) * POSITIONS, self._n) - leaf * POSITIONS:
            self._cut.setdefault(leaf, {})[start] = item
            return
        level, i = 0, leaf
        while (level, i ^ 1) in self._nodes:
            other = self._nodes.pop((level, i ^ 1))
            item = self._join(other, item) if i % 2 else self._join(item, other)
            level, i = level + 1, i // 2
        self._nodes[level, i] = item

    def result(self) -> T | None:
        """Of everything that came; None if nothing did."""
        level = 0
        while POSITIONS << level < self._n:
            level += 1
        return self._node(level, 0)

    def _node(self, level: int, i: int) -> T | None:
        if (level, i) in self._nodes:
            return self._nodes[level, i]
        if level:
            if (i * POSITIONS) << level >= self._n:
                return None
            found = [self._node(level - 1, 2 * i), self._node(level - 1, 2 * i + 1)]
        else:
            found = [item for _, item in sorted(self._cut.get(i, {}).items(), key=lambda x: x[0])]
        there = [x for x in found if x is not None]
        total: T | None = None
        for item in there:
            total = item if total is None else self._join(total, item)
        return total
