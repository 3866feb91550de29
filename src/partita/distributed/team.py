"""The processes that share a problem: who they are, and sums over them.

    total       sum over ranks, for what every rank then uses alike          backward: the gradient as it is
    pooled      sum over ranks, for what every rank then uses in its own way   backward: the sum over ranks
    replicate   the tensor as it is, the same on every rank                    backward: the sum over ranks

Think of the global value as a function of every rank's own tensors; the gradient on a rank is the derivative with
respect to the tensors of that rank. What follows a `total` is the same computation on every rank, done many times over:
each already has the whole derivative, and adding those up would count it `world size` times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from partita.errors import BackendError

__all__ = ["Team", "Zigzag", "check_alone", "for_ddp", "replicate", "team_of", "zigzag"]


@dataclass(frozen=True)
class Zigzag:
    """A group whose ranks hold two pieces of a sequence each, so that causal work is even; see `zigzag`."""

    group: object


def zigzag(group: object) -> Zigzag:
    """The same group, for `attention` over a sequence in zigzag order: 2 W pieces, rank r holds pieces r, 2 W - 1 - r.

    A causal row sees all keys before it, so in rank order the last rank has almost twice the mean work; here every rank
    has a cheap and a costly piece. `shard` cuts a sequence this way and `gather` puts it together again.
    """
    return Zigzag(group)


@dataclass(frozen=True)
class Team:
    """A process group seen from one of its ranks."""

    group: dist.ProcessGroup
    rank: int
    size: int
    zigzag: bool = False

    @property
    def device(self) -> torch.device:
        """Where small messages live: NCCL moves nothing else than GPU memory."""
        if "gloo" in dist.get_backend(self.group):
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None else accelerator

    def peer(self, rank: int) -> int:
        """The global number of a rank of this group."""
        return dist.get_global_rank(self.group, rank % self.size)

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of what they then use alike."""
        out: Tensor = _Sum.apply(tensor, self, False)  # type: ignore[no-untyped-call]
        return out

    def pooled(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of what each then uses in its own way."""
        out: Tensor = _Sum.apply(tensor, self, True)  # type: ignore[no-untyped-call]
        return out

    def share(self, tensor: Tensor) -> Tensor:
        """A replicated tensor used alike on every rank: each gets an equal part of its gradient."""
        out: Tensor = _Times.apply(tensor, 1.0 / self.size)  # type: ignore[no-untyped-call]
        return out

    def all_reduce(self, tensor: Tensor, op: Any = None) -> Tensor:
        """The reduction over ranks, in place, without a gradient."""
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if op is None else op, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of one shape, of all ranks."""
        tensor = tensor.contiguous()
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(out, tensor, group=self.group)
        return out

    def gather_rows(self, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """Tensors whose first dimension differs from rank to rank, of all ranks; without a gradient."""
        most = max(sizes)
        padded = tensor.new_zeros(most, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        return (
            [part[:n] for part, n in zip(self.all_gather(padded), sizes, strict=True)] if most else [tensor] * self.size
        )


def team_of(group: object) -> Team:
    """The group, checked: a process group of torch.distributed, or a DeviceMesh of one dimension."""
    order = isinstance(group, Zigzag)
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
    return Team(given, rank, dist.get_world_size(given), order)


def check_alone(name: str, group: object | None) -> None:
    """Raise where a function has no form across processes."""
    if group is not None:
        raise BackendError(f"{name} has no form over a torch.distributed group; leave group None.")


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, team: Team, again: bool) -> Tensor:
        ctx.team, ctx.again = team, again
        return team.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.again:
            grad = ctx.team.all_reduce(grad.clone(memory_format=torch.contiguous_format))
        return grad, None, None


class _Times(torch.autograd.Function):
    """The tensor as it is; its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.team.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


def replicate(tensor: Tensor, group: object) -> Tensor:
    """A tensor that is the same on every rank, whose gradient is summed over ranks.

        forward  x        backward  dL/dx = sum over ranks of the part that flowed back on each

    `linear_cross_entropy(..., group=)` gives the gradient of a replicated input in parts, one per slice of the classes.
    A model that is not sharded below its head wants the whole on every rank: pass `replicate(input, group)` instead.
    """
    out: Tensor = _Replicate.apply(tensor, team_of(group))  # type: ignore[no-untyped-call]
    return out


def for_ddp(loss: Tensor, group: object) -> Tensor:
    """The same value with a gradient `world size` times as large: DDP then averages it to the sum it should be.

    DDP keeps (1/W) sum_r grad_r;  the gradient of a global value is sum_r grad_r
    """
    out: Tensor = _Times.apply(loss, float(team_of(group).size))  # type: ignore[no-untyped-call]
    return out
