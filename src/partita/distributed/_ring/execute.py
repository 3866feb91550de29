"""The two ways from the ring into the engine, without autograd: the ring is a function of its own."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from partita.engine import Request, Sums, registry
from partita.engine.tile import Upstream

__all__ = ["backward", "forward", "no_autocast"]


def forward(request: Request) -> Sums:
    """The sums of a request."""
    return registry.choose(request, registry.current()).forward(request)


def backward(request: Request, peak: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> dict[str, Tensor]:
    """Gradients of (query, key, value, scale, bias), as far as needed, by name."""
    return registry.choose(request, registry.current()).backward(request, peak, upstream, needs)


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast has lowered the operands when the request was built; the sums are not its business."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()
