"""What each key receives from the rows, on the native library: scores once more, nothing of Q * K held.

Legend: Q query rows, K keys, D features. Nothing here is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partita.engine.axes import offsets
from partita.engine.backends.native import layout, library
from partita.engine.backends.native.operands import CPU, Term, pointer, prepare, sound
from partita.engine.request import Request

__all__ = ["received"]


def received(
    r: Request,
    terms: Sequence[Term],
    peak: Tensor,  # (*b, Q) float64, as `reduce` gave it
    weight: Tensor,  # (*b, Q), accumulation dtype
    shared: bool,  # the entries of the last batch dimension add up
) -> Tensor | None:  # (*b, K)
    """sum_i weight_i exp(s_ij - peak_i) of every key; None where one is not finite."""
    call, problem, acc = prepare(r.query, r.key, None, r.scale, r.bias, None, terms, r.softcap)
    rows = (*call.batch, call.n_query)
    for name, x, dtype in (("peak", peak, torch.float64), ("weight", weight, acc)):
        if x.dtype != dtype or tuple(x.shape) != rows or x.device.type != "cpu":
            raise ValueError(f"{name} must be {dtype} {rows} on the CPU; got {x.dtype}, {tuple(x.shape)}, {x.device}")
    peak, weight = sound(peak, "peak").contiguous(), sound(weight, "weight").contiguous()
    slots = (*call.batch[:-1], 1) if shared else call.batch
    sums = torch.empty((*slots, call.n_key), dtype=acc, device=CPU)
    if not math.prod(rows) or not call.n_key:
        return sums.zero_()
    steps = torch.empty(slots, dtype=torch.float32, device="meta").stride()
    slot = offsets(call.batch, slots, steps)
    packed = layout.COLUMNS.pack(*map(pointer, (peak, weight, slot)), math.prod(slots), pointer(sums))
    return sums if library.run("received", problem, packed) else None
