"""Backend: the C++ library, on CPU tensors.

library               its structures, and finding, loading and calling it
call                  the operands of a call: checked and laid out
passes                the pass, its gradients, plain attention, scans
losses, divergence    kernels of their own
"""

from __future__ import annotations

from functools import partial

import torch

from partita.engine.backends.disjoint import too_large
from partita.engine.backends.native import library, passes
from partita.engine.backends.native.divergence import divergences
from partita.engine.backends.native.losses import both_ways, both_ways_backward, product, weighted_nll
from partita.engine.backends.protocol import Backend, BothWays
from partita.engine.request import Request

__all__ = ["BACKEND", "why_not"]


def why_not(request: Request) -> str | None:
    """None, or why the native library cannot serve this request."""
    if not request.query.is_cpu:
        return f"it serves CPU tensors, these are on {request.query.device}"
    if request.cap_bias and request.softcap is not None and request.bias is not None:
        return "it adds a bias after the softcap, not before"
    return (too_large(request) if len(request.terms) > 1 else None) or library.why_not()


def instructions(request: Request) -> str:
    """The instruction set, and what becomes of bfloat16 numbers on it."""
    found = library.load()
    name, pairs = ("none", False) if found is None else (found.isa, found.pairs)
    half = ", bfloat16 numbers " + ("multiplied in pairs" if pairs else "widened to float32")
    return f"with {name}" + (half if request.query.dtype == torch.bfloat16 else "")


BACKEND = Backend(
    "native",
    why_not,
    passes.forward,
    passes.backward,
    rounded_backward=partial(passes.backward, rounded=True),
    attention=passes.attention,
    weighted_nll=weighted_nll,
    both_ways=BothWays(both_ways, both_ways_backward),
    column_sums=passes.column_sums,
    top=passes.top,
    gaps=passes.gaps,
    divergences=divergences,
    row_statistics=passes.row_statistics,
    instructions=instructions,
    product=product,
)
