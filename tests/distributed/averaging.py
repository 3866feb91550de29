"""Losses over a group under DistributedDataParallel: the gradients that it keeps, and what it is warned of."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import partita
from partita import distributed
from partita.distributed import gradients
from tests.distributed.checks import part, split

N, DIM, CLASSES = 12, 5, 9


class Encoder(nn.Module):
    """Two towers and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.one(x), self.two(y), self.log_scale.exp()


def problem() -> tuple[Encoder, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x, y = torch.randn(N, DIM, dtype=torch.float64), torch.randn(N, DIM, dtype=torch.float64)
    weight = torch.randn(CLASSES, DIM, dtype=torch.float64)
    return Encoder().double(), x, y, torch.arange(N) // 2, weight


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor]
# of two towers, a scale and labels; global values, with and without a group
GLOBAL: dict[str, Loss] = {
    "info_nce_loss": lambda a, b, s, y, g: partita.info_nce_loss(a, b, temperature=1 / s, group=g),
    "info_nce_loss, sum": lambda a, b, s, y, g: partita.info_nce_loss(a, b, temperature=s, reduction="sum", group=g),
    "info_nce_loss, symmetric": lambda a, b, s, y, g: partita.info_nce_loss(a, b, symmetric=True, group=g),
    "info_nce_loss, labels": lambda a, b, s, y, g: partita.info_nce_loss(a, b, labels=y, decoupled=True, group=g),
    "info_nce_loss, statistics": lambda a, b, s, y, g: partita.info_nce_loss(a, b, return_stats=True, group=g)[0],
    "clip_loss": lambda a, b, s, y, g: partita.clip_loss(a, b, s, group=g),
    "siglip_loss": lambda a, b, s, y, g: partita.siglip_loss(a, b, s, s - 3, group=g),
    "nt_xent_loss": lambda a, b, s, y, g: partita.nt_xent_loss(a, b, temperature=s, group=g),
    "supcon_loss": lambda a, b, s, y, g: partita.supcon_loss(a + b, y, temperature=s, group=g),
}


@contextlib.contextmanager
def unwarned() -> Any:
    """The state of a process that has just begun, and the warnings that come."""
    gradients._warned, gradients._PASSES = False, iter(range(1, 1 << 30))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield (found := [])
    found += [str(w.message) for w in heard if "loss with group=" in str(w.message)]


def grads(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def encoders(group: Any, what: str) -> list[str]:
    """The warnings of a bare loss under DDP, of one through for_ddp, and of one whose factor is made up for by hand."""
    function, world = GLOBAL[what], group.size()
    model, x, y, labels, _ = problem()
    function(*model(x, y), labels, None).backward()
    whole = grads(model)
    heard = []
    for way in ("bare", "for_ddp", "by hand", "forward only", "another sum"):
        model, *_ = problem()
        ddp, sizes = DistributedDataParallel(model, find_unused_parameters=True), split(N, world, "even")
        with unwarned() as found:
            loss = function(*ddp(part(x, sizes), part(y, sizes)), part(labels, sizes), group)
            if way == "for_ddp":
                distributed.for_ddp(loss, group).backward()
            elif way == "another sum":
                distributed.for_ddp(loss / 2 + loss / 2, group).backward()
            elif way != "forward only":
                (loss * (world if way == "by hand" else 1)).backward()
        if way != "forward only":
            same(grads(model), [g / world for g in whole] if way == "bare" else whole)
        heard.append(" | ".join([way, *found]))
    return heard


def classes(group: Any) -> list[str]:
    """The same for a head of classes in slices, whose remedy is another one."""
    model, x, y, _, weight = problem()
    target, world, sizes = torch.arange(N) % CLASSES, group.size(), split(CLASSES, group.size(), "uneven")
    partita.linear_cross_entropy(model(x, y)[0], weight, target).backward()
    whole = grads(model)
    heard = []
    for way in ("bare", "replicate"):
        for reduction in ("mean", "none"):
            model, *_ = problem()
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            with unwarned() as found:
                hidden = ddp(x, y)[0]
                hidden = distributed.replicate(hidden, group) if way == "replicate" else hidden
                part_of = part(weight, sizes).requires_grad_()
                partita.linear_cross_entropy(
                    hidden, part_of, target, reduction=reduction, group=group
                ).mean().backward()
            same(grads(model), [g / world for g in whole] if way == "bare" else whole)
            heard.append(" | ".join([way, *found]))
    return heard


def right_without(group: Any) -> None:
    """Losses of a rank's own rows, groups across those that DDP averages over, and models that it does not hold."""
    model, x, y, _, _ = problem()
    world = group.size()
    sizes = [N // world] * world
    x, y = x[: sum(sizes)], y[: sum(sizes)]
    a, b, _ = model(x, y)
    (partita.info_nce_loss(a, b) + partita.attention(a[None], b[None], b[None]).square().mean()).backward()
    whole = grads(model)
    model, *_ = problem()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with unwarned() as found:
        a, b, _ = ddp(part(x, sizes), part(y, sizes))
        out = partita.attention(a[None], b[None], b[None], group=group)
        (partita.info_nce_loss(a, b, reduction="none", group=group).mean() + out.square().mean()).backward()
    same(grads(model), whole)
    assert not found, found

    alone = [dist.new_group([r]) for r in range(world)][dist.get_rank()]  # all ranks make all of them
    model, *_ = problem()
    with unwarned() as found:
        ddp = DistributedDataParallel(model, process_group=alone, find_unused_parameters=True)
        partita.info_nce_loss(*ddp(part(x, sizes), part(y, sizes))[:2], group=group).backward()
        free, *_ = problem()
        partita.info_nce_loss(*free(part(x, sizes), part(y, sizes))[:2], group=group).backward()
    assert not found, found

    model, *_ = problem()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with unwarned() as found:
        a, b, _ = ddp(part(x, sizes), part(y, sizes))
        leaves = [a.detach().requires_grad_(), b.detach().requires_grad_()]
        partita.info_nce_loss(*leaves, group=group).backward()  # reaches no parameter of it
        torch.autograd.grad(partita.info_nce_loss(a, b, group=group), [a, b])  # accumulates nowhere
    assert not found, found


def once(group: Any) -> list[str]:
    model, x, y, _, _ = problem()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with unwarned() as found:
        for _ in range(5):
            a, b, s = ddp(x, y)
            partita.clip_loss(a, b, s, group=group).backward()
    return found
