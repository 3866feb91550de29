"""Numbers as tensors, refusals in the caller's words, a root, what is public: shared by every module of the theory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partita._checks import number as number
from partita._checks import require as require
from partita.errors import ShapeError

Number = float | int | Tensor


def public(module: dict[str, Any], *more: str) -> list[str]:
    """What a module defines and does not mark as private, and names that it passes on."""
    own = (name for name, thing in module.items() if getattr(thing, "__module__", None) == module["__name__"])
    return [*(name for name in own if not name.startswith("_")), *more]


def where(generator: torch.Generator | None) -> torch.device:
    """Where random numbers are drawn: at the generator, else on the CPU, whatever the default device."""
    return torch.device("cpu") if generator is None else generator.device


def per_row(scale: Number, scores: Tensor) -> Tensor | float:
    """A scale that multiplies scores: a number as it is, a tensor of rows with a last axis of one key."""
    if not isinstance(scale, Tensor):
        return float(scale)
    return scale.to(scores.dtype)[..., None] if scale.dim() else scale.to(scores.dtype)


def together(*xs: Number) -> list[Tensor]:
    """These numbers as float64 tensors of one common shape."""
    out: list[Tensor] = list(torch.broadcast_tensors(*[number(x).double() for x in xs]))
    return out


def above_zero(name: str, x: Number, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of x, of this dtype if one is given; refused unless it is above 0 everywhere."""
    found = number(x).to(dtype=dtype)
    require(found > 0, f"{name} must be positive; got {found}.")
    return found


def not_negative(what: str, x: Number) -> Tensor:
    """A tensor of x, of which `what` says what it is, such as "b is a width"; refused where it is below 0."""
    found = number(x)
    require(found >= 0, f"{what}, so {what.split()[0]} >= 0; got {found}.")
    return found


def count(n: Number, least: int = 1) -> Tensor:
    """A tensor of n, which counts the visible keys of a row; refused below `least`."""
    found = number(n)
    require(found >= least, f"n counts visible keys, so n >= {least}; got {found}.")
    return found


def bisect(below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, steps: int = 80) -> Tensor:
    """Where a condition that holds at low stops to hold on the way to high."""
    for _ in range(steps):
        mid = (low + high) / 2
        holds = below(mid)
        low, high = torch.where(holds, mid, low), torch.where(holds, high, mid)
    return (low + high) / 2


def require_shape(ok: bool, message: str) -> None:
    """Raise ShapeError with this message unless ok."""
    if not ok:
        raise ShapeError(message)
