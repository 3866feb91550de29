"""Keys near the largest score of their row, counted on the native library: scores twice, nothing of Q * K held."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partita.engine.backends.native import layout, library
from partita.engine.backends.native.operands import CPU, Term, pointer, prepare
from partita.engine.request import Request

__all__ = ["gaps"]


def gaps(
    r: Request,
    terms: Sequence[Term],
    edges: Tensor,  # (E), accumulation dtype, not negative, in any order
) -> Tensor | None:  # (*b, Q, E) int64
    """How many keys score within each edge of their row's largest score; None where a score is not finite."""
    call, problem, acc = prepare(r.query, r.key, None, r.scale, r.bias, None, terms, r.softcap)
    count = torch.zeros((*call.batch, call.n_query, len(edges)), dtype=torch.int64, device=CPU)
    if not math.prod(count.shape) or not call.n_key:
        return count
    rising, order = edges.to(acc).sort()
    if not library.run("gaps", problem, layout.GAPS.pack(len(edges), pointer(rising), pointer(count))):
        return None
    return count[..., order.argsort()]
