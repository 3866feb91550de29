"""Gradients of the operands of a pass, added up tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.engine.backends.tiled.tile import Operands, row_slice
from partita.engine.pairs import parameter_names
from partita.engine.request import Request
from partita.engine.sums import OPERANDS
from partita.engine.terms import cut

__all__ = ["Accumulator", "view"]


class Accumulator:
    """Gradients of all operands, added up tile by tile in the accumulation dtype; those of a score's own come last."""

    def __init__(self, request: Request, needs: Sequence[bool]):
        r = request
        own = () if r.pairs is None else r.pairs.parameters
        self._own = parameter_names(len(own))
        named = zip((*OPERANDS, *self._own), (r.query, r.key, r.value, r.scale, r.bias, *own), strict=True)
        self.total: dict[str, Tensor] = {}
        for (name, tensor), needed in zip(named, needs, strict=False):
            if needed and tensor is not None:
                self.total[name] = torch.zeros_like(tensor, dtype=r.dtype)

    def add(self, part: Operands, rows: slice, cols: slice) -> None:
        pieces = dict(zip(self._own, part.parameters or (), strict=False))
        for name, total in self.total.items():
            if name in pieces:
                total += pieces[name]
                continue
            piece = getattr(part, name)
            if piece is not None:
                place = view(name, total, rows, cols)
                place += piece


def view(name: str, tensor: Tensor, rows: slice, cols: slice) -> Tensor:
    """The part of an operand that a tile reads."""
    if name == "query":
        return tensor[..., rows, :]
    if name in ("key", "value"):
        return tensor[..., cols, :]
    return row_slice(tensor, rows) if name == "scale" else cut(tensor, rows, cols)
