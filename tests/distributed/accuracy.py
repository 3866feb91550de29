"""float32 across ranks: no worse than twice the plain torch formula, measured against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from partita import distributed
from partita.distributed.blocks import Cut
from tests.distributed.checks import leaf, part, split, total_gradient
from tests.tolerances import assert_no_worse_than_naive


def _graded(function: Any, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    out = function(*tensors)
    return out.detach(), *torch.autograd.grad(out.sum(), tensors)


def _compare(plain: Any, tensors: list[Tensor], found: Sequence[Tensor]) -> None:
    """Value and gradients against the plain formula of the same numbers, in float64 and as they are."""
    truth, naive = _graded(plain, [leaf(t.double()) for t in tensors]), _graded(plain, [leaf(t) for t in tensors])
    for one, other, exact in zip(found, naive, truth, strict=True):
        assert_no_worse_than_naive(one, other, exact)


def contrast(group: Any) -> None:
    torch.manual_seed(9)
    n, dim, scale = 96, 32, 1 / 0.07
    x, y = (F.normalize(torch.randn(n, dim, dtype=torch.float64), dim=-1).float() for _ in range(2))

    def plain(a: Tensor, b: Tensor) -> Tensor:
        logits, own = scale * (a @ b.T), torch.arange(n)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    sizes = split(n, group.size(), "uneven")
    own = [leaf(part(t, sizes)) for t in (x, y)]
    loss = partita.clip_loss(*own, scale, group=group)
    loss.backward()
    _compare(plain, [x, y], (loss.detach(), *(distributed.gather(t.grad, group, 0) for t in own)))


def classes(group: Any) -> None:
    torch.manual_seed(10)
    n, m, dim = 48, 211, 24
    x, w, y = torch.randn(n, dim), torch.randn(m, dim), torch.randint(m, (n,))

    def plain(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(a @ b.T, y, label_smoothing=0.1)

    a, b = leaf(x), leaf(part(w, split(m, group.size(), "uneven")))
    loss = partita.linear_cross_entropy(a, b, y, label_smoothing=0.1, group=group)
    loss.backward()
    _compare(plain, [x, w], (loss.detach(), total_gradient(a.grad, a), distributed.gather(b.grad, group, 0)))


def sequence(group: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    tensors = [torch.randn(2, 3, 64, 16).to(dtype) for _ in range(3)]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q @ k.mT) / 4
        s = s.masked_fill(~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf)
        return s.softmax(-1) @ v

    layout = distributed.zigzag(group)
    own = [leaf(distributed.shard(t, layout)) for t in tensors]
    out = partita.attention(*own, is_causal=True, group=layout)
    out.sum().backward()
    _compare(plain, tensors, (distributed.gather(out, layout), *(distributed.gather(t.grad, layout) for t in own)))


def deterministic(group: Any) -> bool:
    """The same call twice gives the same bits."""
    torch.manual_seed(12)
    x, y = torch.randn(64, 16), torch.randn(64, 16)
    results = []
    for _ in range(2):
        own = [leaf(part(t, split(64, group.size(), "uneven"))) for t in (x, y)]
        loss = partita.clip_loss(*own, 5.0, group=group)
        loss.backward()
        results.append((loss.detach(), *(t.grad for t in own)))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def for_ddp(group: Any) -> None:
    """Averaged as DDP does, the gradient of a replicated parameter is that of one process."""
    torch.manual_seed(13)
    x, y, w = (torch.randn(12, 5, dtype=torch.float64) for _ in range(3))
    w = w[:5]
    sizes = split(12, group.size(), "uneven")
    a, b = leaf(w), leaf(w)
    truth = partita.info_nce_loss(x @ a, y @ a)
    truth.backward()
    loss = partita.info_nce_loss(part(x, sizes) @ b, part(y, sizes) @ b, group=group)
    scaled = distributed.for_ddp(loss, group)
    scaled.backward()
    assert torch.equal(scaled, loss)
    torch.testing.assert_close(total_gradient(b.grad, b) / group.size(), a.grad, rtol=1e-10, atol=1e-10)


def bytes_sent(group: Any, n: int, dim: int) -> tuple[int, int, int]:
    """Bytes and messages of a pass and its backward, and the number of parts of a block."""
    own = [torch.randn(n, dim, requires_grad=True) for _ in range(2)]
    with distributed.traffic() as sent:
        partita.info_nce_loss(*own, group=group).backward()
    return sent.sent_bytes, sent.messages, len(Cut.of(own[1:], n))
