"""Ranks that disagree, and ranks that disappear."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import partita
from partita import distributed
from partita.distributed._ring import communication
from partita.errors import BackendError, PartitaError

F64 = torch.float64


def disagree(group: Any, what: str) -> str:
    """A call in which the last rank differs; the error's text, with the kind of the error."""
    odd = group.rank() == group.size() - 1
    n, dim = 4, 6
    x, y = torch.randn(n, dim), torch.randn(n, dim)
    token = torch.randint(5, (n,))
    token.zero_()

    def call() -> object:
        if what == "temperature":
            return partita.info_nce_loss(x, y, temperature=0.2 if odd else 0.1, group=group)
        if what == "learned temperature":
            return partita.clip_loss(x, y, torch.tensor(2.0 if odd else 1.0), group=group)
        if what == "dtype":
            return partita.info_nce_loss(x.double() if odd else x, y.double() if odd else y, group=group)
        if what == "dim":
            return partita.info_nce_loss(x[:, :5] if odd else x, y[:, :5] if odd else y, group=group)
        if what == "reduction":
            return partita.info_nce_loss(x, y, reduction="sum" if odd else "mean", group=group)
        if what == "function":
            face = partita.nt_xent_loss if odd else partita.info_nce_loss
            return face(x, y, group=group)
        if what == "gradient":
            return partita.info_nce_loss(x, y.requires_grad_(not odd), group=group)
        if what == "negatives":
            return partita.info_nce_loss(x, y, y if odd else None, group=group)
        if what == "softcap":
            return partita.attention(x, y, y, softcap=5.0 if odd else None, group=group)
        if what == "causal":
            return partita.attention(x, y, y, is_causal=odd, group=group)
        if what == "dim of value":
            return partita.attention(x, y, y[:, :3] if odd else y, group=group)
        if what == "smoothing":
            return partita.linear_cross_entropy(x, y, token, label_smoothing=0.1 if odd else 0.0, group=group)
        if what == "targets":
            return partita.linear_cross_entropy(x, y, token + odd, group=group)
        if what == "rows":
            return partita.linear_cross_entropy(x[: n - odd], y, token[: n - odd], group=group)
        if what == "own mistake":
            return partita.info_nce_loss(x, y[: n - odd], group=group)
        if what == "order":
            return partita.attention(x, y, y, group=distributed.zigzag(group) if odd else group)
        raise ValueError(what)

    try:
        call()
    except PartitaError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def still_in_step(group: Any) -> float:
    """After an error on all ranks the group can be used again."""
    x = torch.eye(3, dtype=F64)
    return float(partita.info_nce_loss(x, x, temperature=1.0, group=group))


def target_outside(group: Any) -> str:
    """A class that no rank has."""
    try:
        partita.linear_cross_entropy(
            torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([3 * group.size()]), group=group
        )
    except IndexError as error:
        return str(error)
    return "no error"


def vanish(group: Any, where: str) -> str:
    """Rank 2 dies in the middle of a ring: what the others see."""
    x, y = torch.randn(512, 64, requires_grad=True), torch.randn(512, 64, requires_grad=True)
    partita.info_nce_loss(x, y, group=group).backward()  # everything is connected
    hops = 0
    original = communication.send_receive

    def dying(*arguments: Any) -> Any:
        nonlocal hops
        hops += 1
        if group.rank() == 2 and hops == (2 if where == "forward" else 6):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    communication.send_receive = dying
    try:
        loss = partita.info_nce_loss(x, y, group=group)
        loss.backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(AttributeError):
            communication.send_receive = original
    return "no error"


def no_group(group: Any) -> list[str]:
    """What is said about things that are no group."""
    x = torch.eye(3)
    out = []
    for wrong in (1, "world", object()):
        try:
            partita.info_nce_loss(x, x, group=wrong)
        except BackendError as error:
            out.append(str(error))
    return out


def part_of_the_world(group: Any) -> tuple[float, str]:
    """All ranks but the first make a group of their own; a mesh is a group too."""
    x = torch.eye(3, dtype=F64)
    few = dist.new_group(list(range(1, group.size())))
    mesh = init_device_mesh("cpu", (group.size(),))
    whole = float(partita.info_nce_loss(x, x, temperature=1.0, group=mesh))
    if group.rank() == 0:
        try:
            partita.info_nce_loss(x, x, group=few)
        except BackendError as error:
            return whole, str(error)
        return whole, "no error"
    return whole, str(float(partita.info_nce_loss(x, x, temperature=1.0, group=few)))


def flat_mesh_only(group: Any) -> str:
    """A mesh of two dimensions names no group."""
    mesh = init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("a", "b"))
    x = torch.eye(3)
    partita.info_nce_loss(x, x, group=mesh["b"])
    try:
        partita.info_nce_loss(x, x, group=mesh)
    except BackendError as error:
        return str(error)
    return "no error"
