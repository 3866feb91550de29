"""Gradients of the operands of a pass, added up tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from partita.engine.backends.tiled.tile import Operands, row_slice
from partita.engine.request import Request
from partita.engine.terms import cut

__all__ = ["Accumulator", "view"]


class Accumulator:
    """Gradients of all operands, added up tile by tile in the accumulation dtype."""

    def __init__(self, request: Request, needs: Sequence[bool]):
        given = Operands(request.query, request.key, request.value, request.scale, request.bias)
        self.total: dict[str, Tensor] = {}
        for field, needed in zip(fields(given), needs, strict=True):
            tensor = getattr(given, field.name)
            if needed and tensor is not None:
                self.total[field.name] = torch.zeros_like(tensor, dtype=request.dtype)

    def add(self, part: Operands, rows: slice, cols: slice) -> None:
        for name, total in self.total.items():
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
