"""Which dtype numbers are computed and returned in. Inputs and autocast decide, never torch's default dtype.

sums       float64 for float64 inputs, float32 below
results    the dtype of the input, or autocast's
losses     the dtype of the input, and float32 under autocast
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partita.errors import DtypeError

__all__ = [
    "accumulation_dtype", "autocasts", "check_same_dtype", "finest", "log_of", "loss_dtype", "lowered", "no_autocast",
    "output_dtype", "product",
]  # fmt: skip

# Always there; for others torch is called, which versions before 2.9 cannot trace.
_AUTOCASTING = frozenset(("cpu", "cuda", "mps", "xpu"))


def lowered(tensor: Tensor) -> Tensor:
    """Under autocast, products are taken in its dtype, as torch's own are."""
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and autocasts(tensor.device.type):
        return tensor.to(output_dtype(tensor))
    return tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything below is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def output_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of results that follow this input's: its own, or autocast's."""
    kind = tensor.device.type
    lowered = autocasts(kind) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lowered else tensor.dtype


def loss_dtype(tensor: Tensor) -> torch.dtype:
    """Losses have the dtype of their input, and float32 under autocast, as torch's have."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and autocasts(tensor.device.type) else tensor.dtype


def finest(device: torch.device) -> torch.dtype:
    """The dtype for functions of whole positions, few numbers that many scores are made from."""
    return torch.float64 if device.type in ("cpu", "cuda", "meta") else torch.float32


def log_of(count: int, device: torch.device) -> float | Tensor:
    """log(count); in a graph, where a size may be any number, as a tensor of no dimensions."""
    if torch.compiler.is_compiling():
        return torch.full((), count, dtype=finest(device), device=device).log()
    return math.log(count)


def autocasts(kind: str) -> bool:
    """Whether autocast is on for this kind of device; some kinds have none."""
    known = kind in _AUTOCASTING or torch.amp.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)


def check_same_dtype(names: Sequence[str], one: Tensor, other: Tensor) -> None:
    """Raise unless they share their dtype, or autocast gives them one."""
    if one.dtype != other.dtype and not autocasts(one.device.type):
        raise DtypeError(
            f"{names[0]} and {names[1]} must share their dtype; got {one.dtype} and {other.dtype}. "
            f"Convert one with .to(), or use torch.autocast."
        )


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast has lowered the operands when the request was built; the sums are not lowered."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if autocasts(kind) else contextlib.nullcontext()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the dtype they have: autocast lowers the operands of a pass, never its sums."""
    if autocasts(a.device.type):
        with no_autocast(a):
            return a @ b
    return a @ b
