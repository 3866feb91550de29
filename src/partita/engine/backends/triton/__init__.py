"""Backend: kernels in Triton, on GPUs; on CPU tensors in Triton's interpreter, to test them where there is no GPU.

Triton is imported when the first kernel runs, never before. Sums are in float32: float64 stays with the tiled backend,
but the interpreter serves it too, so that what the kernels compute can be compared to the last digits.
"""

from __future__ import annotations

import importlib.util

import torch

from partita.engine.backends.disjoint import too_large
from partita.engine.backends.protocol import Backend
from partita.engine.backends.triton.launch import interpreted
from partita.engine.backends.triton.losses import BOTH_WAYS, weighted_nll
from partita.engine.backends.triton.reduce import backward, forward
from partita.engine.backends.triton.tiles import autotuned
from partita.engine.request import Request

__all__ = ["BACKEND", "why_not"]

_LARGEST = 256  # features of a query or a value that fit into a tile
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _why_not_here(request: Request) -> str | None:
    """None, or why no kernel runs on these tensors; this is all that a loss needs, whose products torch makes."""
    device = request.query.device
    if device.type == "cpu" and not interpreted():
        return "it serves GPU tensors, and CPU tensors only in Triton's interpreter (TRITON_INTERPRET=1)"
    if device.type not in ("cpu", "cuda"):
        return f"it serves CUDA and ROCm tensors, these are on {device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'partita[gpu]'"
    if request.query.dtype not in _DTYPES and not interpreted():
        return f"its sums are in float32, {request.query.dtype} needs more"
    return None


def why_not(request: Request) -> str | None:
    """None, or why the kernels cannot serve this request."""
    r, reason = request, _why_not_here(request)
    if reason is not None:
        return reason
    if r.value is not None and r.value.dtype != r.query.dtype:
        return f"query and value have different dtypes, {r.query.dtype} and {r.value.dtype}"
    dim = max(r.query.shape[-1], 0 if r.value is None else r.value.shape[-1])
    if dim > _LARGEST:
        return f"it serves up to {_LARGEST} features, these have {dim}"
    return too_large(r)


def _skip_in_auto(request: Request) -> str | None:
    """The interpreter is there to be tested, not to be used."""
    if request.query.device.type == "cpu":
        return "it serves CPU tensors in Triton's interpreter, slowly, and only if it is named"
    if request.argmax:
        return "it does not look for the best key"
    return None


BACKEND = Backend(
    "triton",
    why_not,
    autotuned(forward),
    autotuned(backward),
    weighted_nll=weighted_nll,
    both_ways=BOTH_WAYS,
    why_no_loss=_why_not_here,
    skip_in_auto=_skip_in_auto,
)
