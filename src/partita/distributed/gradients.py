"""Gradients of replicated tensors: summed over ranks here, averaged by DDP, which is detected.

A loss over a group is one number, the same on every rank, and a rank's backward pass gives its parameters' part of the
gradient. DDP averages the parts, which gives 1 / world size of the gradient. So such a loss ends in a node of its own:
when a gradient arrives that no `for_ddp` has scaled, it follows the graph to parameters that DDP averages.
"""

from __future__ import annotations

import collections
import gc
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partita.collective import Collective

__all__ = ["checked", "for_ddp", "replicate"]

_REMEDIES = {
    "for_ddp": "call partita.distributed.for_ddp(loss, group).backward()",
    "replicate": "pass partita.distributed.replicate(input, group) as its input",
}
_SCALED: collections.deque[int] = collections.deque(maxlen=64)  # backward passes that for_ddp has scaled
_PASSES = itertools.count(1)  # backward passes that it has not; a look costs milliseconds, so 1, 2, 4, 8, ... get one
_warned = False


def replicate(tensor: Tensor, group: object) -> Tensor:
    """A tensor that is the same on every rank, whose gradient is summed over ranks.

        forward  x        backward  dL/dx = sum over ranks of the part that flowed back on each

    `linear_cross_entropy(..., group=)` gives the gradient of a replicated input in parts, one per slice of the classes.
    A model that is not sharded below its head wants the whole on every rank: pass `replicate(input, group)` instead.
    """
    out = Collective.of(group).sum_gradient(tensor)
    node: Any = out.grad_fn
    if node is not None:
        node.metadata[replicate] = True
    return out


def for_ddp(loss: Tensor, group: object) -> Tensor:
    """The same value with a gradient `world size` times as large: DDP then averages it to the sum it should be.

    DDP keeps (1/W) sum_r grad_r;  the gradient of a global value is sum_r grad_r
    """
    known = Collective.of(group)
    out = known.scale_gradient(loss, float(known.size))
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(lambda _: _SCALED.append(torch._C._current_graph_task_id()))
    return out


def checked(loss: Tensor, group: Collective, remedy: str) -> Tensor:
    """The loss; its backward pass warns, once, where DDP would average the parts of its gradient."""
    if group.size == 1 or not loss.requires_grad:
        return loss
    out: Tensor = _Checked.apply(loss, group, remedy)  # type: ignore[no-untyped-call]
    return out


class _Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: Collective, remedy: str) -> Tensor:
        ctx.group, ctx.remedy = group, remedy
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not _warned and torch._C._current_graph_task_id() not in _SCALED:
            count = next(_PASSES)
            if count & (count - 1) == 0 and _reaches(ctx, _averaged(ctx.group)):
                _warn(ctx.group, ctx.remedy)
        return grad, None, None


def _warn(group: Collective, remedy: str) -> None:
    global _warned
    _warned = True
    warnings.warn(
        f"the gradients of a loss with group= are parts that add up over its {group.size} ranks, and "
        f"DistributedDataParallel averages them: what it keeps is 1/{group.size} of the gradient. To mend it, "
        f"{_REMEDIES[remedy]}. If the factor is made up for elsewhere, leave it so, and silence this with "
        f"warnings.filterwarnings('ignore', message='the gradients of a loss with group=').",
        stacklevel=2,
    )


def _averaged(group: Collective) -> set[int]:
    """The ids of the parameters that DDP averages over more than one rank of the group."""
    ranks, found = set(dist.get_process_group_ranks(group.process_group)), set()
    for module in _instances(torch.nn.parallel.DistributedDataParallel):
        if len(ranks.intersection(dist.get_process_group_ranks(module.process_group))) > 1:
            found |= {id(p) for n, p in module.module.named_parameters() if n not in module.parameters_to_ignore}
    return found


def _instances(kind: type) -> Iterator[Any]:
    """The objects of a class that are alive: an object refers to its class, and nothing else keeps a list of them."""
    kinds = [kind]
    for one in kinds:
        kinds += one.__subclasses__()
    return (x for x in gc.get_referrers(*kinds) if issubclass(type(x), kind))


def _reaches(start: Any, leaves: set[int]) -> bool:
    """Whether this backward pass accumulates into one of these parameters, by a way that `replicate` has not mended."""
    known, todo = set(), [start] if leaves else []
    while todo:
        node = todo.pop()
        if node in known or replicate in node.metadata:
            continue
        known.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in leaves and _runs(node):
            return True
        todo += [after for after, _ in node.next_functions if after is not None]
    return False


def _runs(leaf: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad, which accumulates nowhere
        return False
