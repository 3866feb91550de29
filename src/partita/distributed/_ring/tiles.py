"""One pass as the engine sees it: rows of this rank against one part of a block after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from partita.distributed._ring.blocks import RowBlock
from partita.distributed._ring.communication import Arrival
from partita.distributed._ring.group import Group
from partita.engine.request import Request
from partita.engine.visibility import Visibility

__all__ = ["Piece", "RingPass", "Tile", "columns_of"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Some keys of a block that lie side by side in the whole, and which of them this rank's rows see."""

    keys: slice  # within the block
    first: int  # where they begin in the whole
    seen: Visibility


@dataclass(frozen=True, eq=False)
class Tile:
    """Some rows and some keys, as the engine takes them."""

    request: Request
    keys: slice  # within the part
    columns: slice  # in the whole
    first: int  # the key of the block it begins with


@dataclass(frozen=True, eq=False)
class RingPass:
    """What does not need a gradient: who takes part, which rows see what, and what is asked for."""

    group: Group
    sizes: tuple[int, ...]  # keys of every rank
    pieces: Callable[[int], Sequence[Piece]]  # of the block of a rank; () if no row sees any of it
    rows: Request  # this rank's rows: what every request is made from; its tensors carry no graph
    level: Tensor | None = None  # count keys whose score lies above; needs no target
    moves: tuple[bool, bool] = (True, True)  # whether anybody wants the gradient of key, value: then it travels

    def of(self, query: Tensor, scale: Tensor, bias: Tensor | None) -> RingPass:
        """The same for these rows."""
        return replace(self, rows=replace(self.rows, query=query, scale=scale, bias=bias))

    def tiles(self, arrival: Arrival, block: RowBlock, pieces: Sequence[Piece]) -> list[Tile]:
        """A block of rows against the part of a block of keys that has arrived."""
        rows, found = self.rows, []
        for piece in pieces:
            low, high = max(piece.keys.start, arrival.keys.start), min(piece.keys.stop, arrival.keys.stop)
            if low >= high:
                continue
            within = slice(low - piece.keys.start, high - piece.keys.start)
            terms = block.seen(piece.seen, within)
            if terms is None:
                continue
            keys = slice(low - arrival.keys.start, high - arrival.keys.start)
            columns = slice(piece.first + within.start, piece.first + within.stop)
            key, *value = (t[..., keys, :] for t in arrival.tensors)
            target = None
            if rows.target is not None and not arrival.step:  # targets are in the own block
                target = block.vector(rows.target)
            request = replace(
                rows,
                query=block.matrix(rows.query),
                key=key,
                value=value[0] if value else None,
                scale=block.vector(rows.scale),
                bias=None if rows.bias is None else columns_of(block.matrix(rows.bias), columns),
                target=target,
                terms=terms,
                rank=target is not None and rows.rank,
            )
            found.append(Tile(request, keys, columns, low))
        return found


def columns_of(bias: Tensor, columns: slice) -> Tensor:
    """Some columns of a bias; one that has a single column serves all."""
    return bias if bias.shape[-1] == 1 else bias[..., columns]
