"""Tensors in slices, one per rank: cut, looked at as a whole, and in an order that makes causal work even."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from partita import _checks
from partita.distributed._ring.group import Zigzag, group_of
from partita.distributed._ring.handshake import checks, handshake
from partita.distributed._ring.layout import Layout, even_sizes
from partita.errors import DtypeError, ShapeError
from partita.processes import Fact

__all__ = ["gather", "gather_bytes", "shard", "zigzag"]


def zigzag(group: object) -> Zigzag:
    """The same group, for `attention` over a sequence in zigzag order: 2 W pieces, rank r holds pieces r, 2 W - 1 - r.

    A causal row sees all keys before it, so in rank order the last rank has almost twice the mean work; here every rank
    has a cheap and a costly piece. `shard` cuts a sequence this way and `gather` puts it together again.
    """
    return Zigzag(group)


def shard(tensor: Tensor, group: object, dim: int = -2) -> Tensor:
    """This rank's slice of a tensor that all hold whole: even pieces in rank order, or as in `zigzag(group)`."""
    known = group_of(group)
    layout = Layout.of(even_sizes(tensor.shape[dim], known.size, known.zigzag), known.zigzag)
    return tensor.index_select(dim, layout.positions(known.rank, tensor.device))


def gather(tensor: Tensor, group: object, dim: int = -2) -> Tensor:
    """The whole of which each rank holds a slice, on every rank and without a gradient: for looking at it."""
    known = group_of(group)
    with checks(known):
        if not -tensor.dim() <= dim < tensor.dim():
            raise ShapeError(f"dim must be a dimension of {_checks.shape_text(tensor)}; got {dim}.")
        rest = list(tensor.shape)
        del rest[dim]
        facts: dict[str, Fact] = {"the dtype": tensor.dtype, "the other dimensions": tuple(rest)}
    sizes = [row[0] for row in handshake(known, "gather", [tensor.shape[dim]], facts)]
    layout = Layout.of(sizes, known.zigzag)
    parts = known.gather_rows(tensor.detach().movedim(dim, 0), sizes)
    where = torch.cat([layout.positions(r, tensor.device) for r in range(known.size)])
    whole = torch.cat(parts)
    return torch.empty_like(whole).index_copy(0, where, whole).movedim(0, dim)


def gather_bytes(data: bytes, group: object) -> list[bytes]:
    """The bytes of every rank, in rank order, on every rank: text or JSON, and nothing that could run as code.

    for text in gather_bytes(json.dumps(record).encode(), group): json.loads(text)
    """
    known = group_of(group)
    with checks(known):
        if not isinstance(data, bytes):
            raise DtypeError(f"data must be bytes; got {type(data).__name__}. Text is text.encode().")
    sizes = [row[0] for row in handshake(known, "gather_bytes", [len(data)], {})]
    cpu = torch.device("cpu")
    own = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)]
    parts = [part.to(cpu) for part in known.gather_rows(own.to(known.device), sizes)]
    return [ctypes.string_at(part.data_ptr(), len(part)) if len(part) else b"" for part in parts]
