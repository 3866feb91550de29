"""Work spread over ranks whose memory is measured: in a table by `benchmarks.distributed`, by tests against a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import partita

Work = Callable[[], object]


def pairs(group: Any, n: int, dim: int, *, symmetric: bool) -> Work:
    """A contrastive loss over this rank's n pairs, forward and backward: the gradients of both sides."""
    x, y = (torch.randn(n, dim, requires_grad=True) for _ in range(2))
    options = {"normalize": False, "temperature": 8.0, "symmetric": symmetric}
    return lambda: partita.info_nce_loss(x, y, group=group, **options).backward()


def sequence(group: Any, n: int) -> Work:
    """Causal attention of 32 heads over this rank's n positions: the output and three gradients."""
    shape = (1, 32, n, 64)
    x, upstream = [torch.randn(shape, requires_grad=True) for _ in range(3)], torch.randn(shape)

    def work() -> Tensor:
        out: Tensor = partita.attention(*x, is_causal=True, group=group)
        out.backward(upstream)
        return out

    return work


def classes(group: Any, rows: int, n: int, dim: int, *, return_stats: bool) -> Work:
    """Cross entropy of rows that every rank has over this rank's n classes: the gradient of the classes."""
    x, y = torch.randn(rows, dim, requires_grad=True), torch.arange(rows)
    w = torch.randn(n, dim, requires_grad=True)

    def work() -> None:
        out: Any = partita.linear_cross_entropy(x, w, y, group=group, return_stats=return_stats)
        (out[0] if return_stats else out).backward()

    return work
