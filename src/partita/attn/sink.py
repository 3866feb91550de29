"""A sink: a key of a learned score and value 0, that joins the denominator of every row of its head."""

from __future__ import annotations

from torch import Tensor

from partita._checks import expands, shape_text
from partita.errors import ShapeError

__all__ = ["sink_per_row"]


def sink_per_row(sink: Tensor, rows: Tensor, name: str = "sink") -> Tensor:
    """A sink per head spread over the head's rows; `rows` has their shape and dtype."""
    if sink.dim() == 1 and rows.dim() >= 2 and sink.shape[0] == rows.shape[-2]:
        sink = sink[:, None]
    if not expands(sink.shape, rows.shape):
        raise ShapeError(
            f"{name} must be one score per head, or broadcast to the rows {shape_text(rows)}; got {shape_text(sink)}."
        )
    return sink.to(rows.dtype).expand_as(rows)
