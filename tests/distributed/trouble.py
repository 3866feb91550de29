"""Ranks that disagree, and ranks that disappear."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import partita
from partita import distributed
from partita.distributed import blocks
from tests.distributed.checks import error_of

F64 = torch.float64


Call = Callable[[bool, Any, Tensor, Tensor], object]
INFO, CLASSES, NONE = partita.info_nce_loss, partita.linear_cross_entropy, torch.zeros(4, dtype=torch.int64)
# calls in which the last rank differs, and what the errors of all ranks name
DIFFERENT: dict[str, tuple[Call, str]] = {
    "temperature": (lambda odd, g, x, y: INFO(x, y, temperature=0.2 if odd else 0.1, group=g), "temperature"),
    "learned temperature": (lambda odd, g, x, y: partita.clip_loss(x, y, torch.tensor(1.0 + odd), group=g), "scale"),
    "dtype": (lambda odd, g, x, y: INFO(*((x.double(), y.double()) if odd else (x, y)), group=g), "dtype"),
    "dim": (lambda odd, g, x, y: INFO(x[:, odd:], y[:, odd:], group=g), "last dimension"),
    "reduction": (lambda odd, g, x, y: INFO(x, y, reduction="sum" if odd else "mean", group=g), "options"),
    "function": (lambda odd, g, x, y: (partita.nt_xent_loss if odd else INFO)(x, y, group=g), "different functions"),
    "gradient": (lambda odd, g, x, y: INFO(x, y.requires_grad_(not odd), group=g), "gradient"),
    "negatives": (lambda odd, g, x, y: INFO(x, y, y if odd else None, group=g), "negative_keys"),
    "softcap": (lambda odd, g, x, y: partita.attention(x, y, y, softcap=5.0 if odd else None, group=g), "softcap"),
    "causal": (lambda odd, g, x, y: partita.attention(x, y, y, is_causal=odd, group=g), "options"),
    "dim of value": (lambda odd, g, x, y: partita.attention(x, y, y[:, odd:], group=g), "value"),
    "smoothing": (lambda odd, g, x, y: CLASSES(x, y, NONE, label_smoothing=0.1 * odd, group=g), "label_smoothing"),
    "targets": (lambda odd, g, x, y: CLASSES(x, y, NONE + odd, group=g), "target"),
    "order of targets": (lambda odd, g, x, y: CLASSES(x, y, torch.arange(4).roll(int(odd)), group=g), "target"),
    "rows": (lambda odd, g, x, y: CLASSES(x[odd:], y, NONE[odd:], group=g), "rows"),
    "rows of states": (
        lambda odd, g, x, y: distributed.merge(partita.Gibbs(x[odd:], y).state(), g),
        "the rows of the state",
    ),
    "order": (lambda odd, g, x, y: partita.attention(x, y, y, group=distributed.zigzag(g) if odd else g), "options"),
    "own mistake": (lambda odd, g, x, y: INFO(x, y[odd:], group=g), ""),
}


def disagree(group: Any, what: str) -> str:
    """The error's text, with the kind of the error."""
    odd, (x, y) = group.rank() == group.size() - 1, torch.randn(2, 4, 6)
    return error_of(lambda: DIFFERENT[what][0](odd, group, x, y))


def still_in_step(group: Any) -> float:
    """After an error on all ranks the group can be used again."""
    x = torch.eye(3, dtype=F64)
    return float(partita.info_nce_loss(x, x, temperature=1.0, group=group))


def target_outside(group: Any) -> str:
    """A class that no rank has."""
    target = torch.tensor([3 * group.size()])
    return error_of(lambda: CLASSES(torch.zeros(1, 2), torch.zeros(3, 2), target, group=group))


def vanish(group: Any, where: str) -> str:
    """Rank 2 dies in the middle of a ring: what the others see."""
    x, y = torch.randn(512, 64, requires_grad=True), torch.randn(512, 64, requires_grad=True)
    partita.info_nce_loss(x, y, group=group).backward()  # everything is connected
    hops = 0
    original = blocks.send_receive

    def dying(*arguments: Any) -> Any:
        nonlocal hops
        hops += 1
        if group.rank() == 2 and hops == (2 if where == "forward" else 6):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    blocks.send_receive = dying
    try:
        INFO(x, y, group=group).backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(AttributeError):
            blocks.send_receive = original
    return "no error"


def no_group(group: Any) -> list[str]:
    """The errors for things that are no group."""
    x = torch.eye(3)
    return [error_of(lambda wrong=wrong: INFO(x, x, group=wrong)) for wrong in (1, "world", object())]  # type: ignore[misc]


def part_of_the_world(group: Any) -> tuple[float, str]:
    """All ranks but the first make a group of their own; a mesh is a group too."""
    x = torch.eye(3, dtype=F64)
    few = dist.new_group(list(range(1, group.size())))
    mesh = init_device_mesh("cpu", (group.size(),))
    whole = float(partita.info_nce_loss(x, x, temperature=1.0, group=mesh))
    if group.rank() == 0:
        return whole, error_of(lambda: INFO(x, x, group=few))
    return whole, str(float(partita.info_nce_loss(x, x, temperature=1.0, group=few)))


def flat_mesh_only(group: Any) -> str:
    """A mesh of two dimensions names no group."""
    mesh = init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("a", "b"))
    x = torch.eye(3)
    partita.info_nce_loss(x, x, group=mesh["b"])
    return error_of(lambda: INFO(x, x, group=mesh))
