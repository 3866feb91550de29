"""Tensors in slices, one per rank: cut, looked at as a whole, and in an order that makes causal work even."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from partita import _checks
from partita.collective import Collective, Fact, bytes_of, even_sizes
from partita.errors import DtypeError, ShapeError

__all__ = ["gather", "gather_bytes", "shard", "zigzag"]


def zigzag(group: object) -> Collective:
    """The same group, for `attention` over a sequence in zigzag order: 2 W pieces, rank r holds pieces r, 2 W - 1 - r.

    A causal row sees all keys before it, so in rank order the last rank has almost twice the mean work; here every rank
    has a cheap and a costly piece. `shard` cuts a sequence this way and `gather` puts it together again.
    """
    return replace(Collective.of(group), zigzag=True)


def shard(tensor: Tensor, group: object, dim: int = -2) -> Tensor:
    """This rank's slice of a tensor that all hold whole: even pieces in rank order, or as in `zigzag(group)`."""
    known = Collective.of(group)
    sizes = even_sizes(tensor.shape[dim], known.size, known.zigzag)
    return tensor.index_select(dim, replace(known, sizes=(tuple(sizes),)).positions(known.rank, device=tensor.device))


def gather(tensor: Tensor, group: object, dim: int = -2) -> Tensor:
    """The whole of which each rank holds a slice, on every rank and without a gradient: for looking at it."""
    known = Collective.of(group)
    with known.validate():
        if not -tensor.dim() <= dim < tensor.dim():
            raise ShapeError(f"dim must be a dimension of {_checks.shape_text(tensor)}; got {dim}.")
        rest = list(tensor.shape)
        del rest[dim]
    given: dict[str, Fact] = {"the dtype": tensor.dtype, "the other dimensions": tuple(rest)}
    known = known.check_same("gather", [tensor.shape[dim]], given)
    whole = torch.cat(known.gather_rows(tensor.detach().movedim(dim, 0)))
    where = torch.cat([known.positions(r, device=tensor.device) for r in range(known.size)])
    return torch.empty_like(whole).index_copy(0, where, whole).movedim(0, dim)


def gather_bytes(data: bytes, group: object) -> list[bytes]:
    """The bytes of every rank, in rank order, on every rank: text or JSON, and nothing that could run as code.

    for text in gather_bytes(json.dumps(record).encode(), group): json.loads(text)
    """
    known = Collective.of(group)
    with known.validate():
        if not isinstance(data, bytes):
            raise DtypeError(f"data must be bytes; got {type(data).__name__}. Text is text.encode().")
    known = known.check_same("gather_bytes", [len(data)], {})
    own = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)]
    return [bytes_of(part) for part in known.gather_rows(own.to(known.device))]
