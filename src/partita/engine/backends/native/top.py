"""The best scores of every row and their keys, on the native library, while the scores go by once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partita.engine.backends.native import layout, library
from partita.engine.backends.native.operands import CPU, Term, pointer, prepare
from partita.engine.request import Request

__all__ = ["LARGEST", "top"]

LARGEST = 64  # of a row's best that are kept in order while its keys go by


def top(r: Request, terms: Sequence[Term], k: int) -> tuple[Tensor, Tensor] | None:  # (*b, Q, k) each
    """Scores in falling order and their keys, -inf and -1 past the visible ones; None where a score is not finite."""
    call, problem, acc = prepare(r.query, r.key, None, r.scale, r.bias, None, terms, r.softcap)
    shape = (*call.batch, call.n_query, k)
    score = torch.empty(shape, dtype=acc, device=CPU)
    index = torch.empty(shape, dtype=torch.int64, device=CPU)
    if not math.prod(shape) or not call.n_key:
        return score.fill_(-math.inf), index.fill_(-1)
    fine = library.run("top", problem, layout.TOP.pack(k, pointer(score), pointer(index)))
    return (score, index) if fine else None
