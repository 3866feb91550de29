"""Few rows against many keys: the heads of a group become rows of one tile, and the keys are shared out over programs.

Both are views of the same request and change nothing but who computes what.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita.engine.backends.triton.launch import interpreted
from partita.engine.request import Request
from partita.engine.sums import Sums
from partita.engine.terms import Term

__all__ = ["FEW", "fold", "parts", "unfold"]

FEW = 16  # rows that one tile of the decode kernel holds
_TILES = 4  # tiles of keys that a part has at least: below, starting it costs more than its work
_PRETENDED = 4  # processors of the interpreter, which has none


def fold(request: Request) -> Request | None:
    """One query per head, heads that share their keys: the heads as rows; None where that does not hold."""
    r = request
    if r.n_query != 1 or r.query.dim() < 3 or r.query.shape[-3] == 1 or r.key.shape[-3] != 1 or len(r.terms) > 1:
        return None
    if r.value is not None and r.value.shape[-3] != 1:
        return None
    for term in r.terms:
        if term.hole or (term.key_segment is not None and term.key_segment.shape[-2] != 1):
            return None

    def turned(tensor: Tensor | None, tail: int) -> Tensor | None:
        return None if tensor is None else tensor.transpose(-1 - tail, -tail)

    terms = tuple(
        Term(
            turned(t.start, 1), turned(t.stop, 1), turned(t.query_segment, 1), t.key_segment, turned(t.mask, 2), t.hole
        )
        for t in r.terms
    )
    bias, target = turned(r.bias, 2), turned(r.target, 1)
    query, scale = r.query.transpose(-3, -2), r.scale.transpose(-2, -1)
    return replace(r, query=query, scale=scale, bias=bias, target=target, terms=terms, as_query=False)


def unfold(sums: Sums) -> Sums:
    """The rows of a folded request as heads again."""
    by_value = ("moment", "mean")
    made: dict[str, Any] = {
        name: x if x is None else x.transpose(-3, -2) if name in by_value else x.transpose(-2, -1)
        for name, x in sums._asdict().items()
    }
    return Sums(**made)


def parts(programs: int, n_key: int, keys: int, device: torch.device) -> int:
    """How many parts the keys are cut into, so that every processor has something to do; 1 where rows suffice."""
    processors = _PRETENDED
    if device.type == "cuda" and not interpreted():
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * processors // programs, n_key // (_TILES * keys)))
