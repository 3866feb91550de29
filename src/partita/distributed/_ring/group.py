"""A process group seen from one of its ranks, and sums over its ranks.

    total       sum over ranks, for what every rank then uses alike            backward: the gradient as it is
    pooled      sum over ranks, for what every rank then uses in its own way   backward: the sum over ranks
    replicated  the tensor as it is, the same on every rank                    backward: the sum over ranks

Think of the global value as a function of every rank's own tensors; the gradient on a rank is the derivative with
respect to the tensors of that rank. What follows a `total` is the same computation on every rank, done many times over:
each already has the whole derivative, and adding those up would count it `world size` times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from partita.errors import BackendError

__all__ = ["Group", "Zigzag", "group_of"]


@dataclass(frozen=True)
class Zigzag:
    """A group whose ranks hold two pieces of a sequence each, so that causal work is even."""

    group: object


@dataclass(frozen=True)
class Group:
    """Who takes part, and which of them this is."""

    process_group: dist.ProcessGroup
    rank: int
    size: int
    zigzag: bool = False

    @property
    def device(self) -> torch.device:
        """Where small messages live: NCCL moves nothing else than GPU memory."""
        if "gloo" in dist.get_backend(self.process_group):
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None else accelerator

    def peer(self, rank: int) -> int:
        """The global number of a rank of this group."""
        return dist.get_global_rank(self.process_group, rank % self.size)

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of what they then use alike."""
        return _through(tensor, self.added, _same)

    def pooled(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of what each then uses in its own way."""
        return _through(tensor, self.added, self.added)

    def replicated(self, tensor: Tensor) -> Tensor:
        """A tensor that is the same on every rank, whose gradient is summed over ranks."""
        return _through(tensor, _same, self.added)

    def scaled_gradient(self, tensor: Tensor, factor: float) -> Tensor:
        """The tensor as it is; its gradient times a number."""
        return _through(tensor, _same, lambda grad: grad * factor)

    def added(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, without a gradient."""
        return self.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format))

    def all_reduce(self, tensor: Tensor, op: Any = None) -> Tensor:
        """The reduction over ranks, in place, without a gradient."""
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if op is None else op, group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of one shape, of all ranks."""
        tensor = tensor.contiguous()
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(out, tensor, group=self.process_group)
        return out

    def gather_rows(self, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """Tensors whose first dimension differs from rank to rank, of all ranks; without a gradient."""
        most = max(sizes)
        if not most:
            return [tensor] * self.size
        padded = tensor.new_zeros(most, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        return [part[:n] for part, n in zip(self.all_gather(padded), sizes, strict=True)]


def group_of(group: object) -> Group:
    """The group, checked: a process group of torch.distributed, or a DeviceMesh of one dimension."""
    zigzag = isinstance(group, Zigzag)
    given = group.group if isinstance(group, Zigzag) else group
    if torch.compiler.is_compiling():
        raise BackendError(
            "group= cannot be traced by torch.compile: a torch.distributed group meets outside of graphs. "
            "Mark the function that makes this call with torch.compiler.disable."
        )
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError(
            "group= needs torch.distributed to be initialised; call torch.distributed.init_process_group, "
            "or start the program with torchrun. Leave group None for one process."
        )
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise BackendError(
                f"group= takes a DeviceMesh of torch.distributed with one dimension; this one has {given.ndim}. "
                f"Choose one of its dimensions by name: mesh['cp']."
            )
        given = given.get_group()
    if not isinstance(given, dist.ProcessGroup):
        raise BackendError(
            f"group= takes a process group of torch.distributed or a DeviceMesh; got {type(given).__name__}. "
            f"This process may not be in the group; torch.distributed.group.WORLD is that of all processes."
        )
    rank = dist.get_rank(given)
    if rank < 0:
        raise BackendError("this process is not in the torch.distributed group it was given.")
    return Group(given, rank, dist.get_world_size(given), zigzag)


class _Through(torch.autograd.Function):
    """One function of the tensor, another of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return forth(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _through(tensor: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    out: Tensor = _Through.apply(tensor, forth, back)  # type: ignore[no-untyped-call]
    return out


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)
