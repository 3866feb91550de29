"""Vocabulary-parallel cross entropy against one process."""

from __future__ import annotations

from typing import Any

import torch

import partita
from partita import distributed
from partita.processes import processes_of
from tests.distributed.checks import close, close_fields, leaf, part, split, total_gradient

F64 = torch.float64


def cross_entropy(
    group: Any,
    how: str,
    bias: bool = False,
    weight: bool = False,
    sample: bool = False,
    ignored: bool = False,
    learned_scale: bool = False,
    n: int = 7,
    classes: int = 17,
    dim: int = 4,
    lead: bool = False,
    **options: Any,
) -> None:
    torch.manual_seed(5)
    sizes = split(classes, group.size(), how)
    x, w = torch.randn(n, dim, dtype=F64), torch.randn(classes, dim, dtype=F64)
    w[5] = w[11]  # a tie that must not count as a higher rank
    y = torch.randint(classes, (n,))
    y[0], y[1] = 5, 11
    if ignored:
        y[3] = -100
    if lead:
        x, y = x[:6].view(2, 3, dim), y[:6].view(2, 3)
    sharded = {"linear_weight": w}
    if bias:
        sharded["linear_bias"] = torch.randn(classes, dtype=F64)
    if weight:
        sharded["weight"] = torch.rand(classes, dtype=F64) + 0.5
    shared = {"input": x}
    if sample:
        shared["sample_weight"] = torch.rand(y.shape, dtype=F64)
    if learned_scale:
        shared["scale"] = torch.rand(y.shape, dtype=F64) + 0.5
    whole = {name: leaf(t) for name, t in {**shared, **sharded}.items()}
    own = {name: leaf(t) for name, t in shared.items()} | {name: leaf(part(t, sizes)) for name, t in sharded.items()}
    expected = partita.linear_cross_entropy(target=y, **whole, **options)
    found = partita.linear_cross_entropy(target=y, group=group, **own, **options)
    stats = isinstance(expected, tuple)
    loss, truth = (found[0], expected[0]) if stats else (found, expected)
    close(loss, truth, "loss")
    if stats:
        assert isinstance(found[1], partita.ClassStats)
        close_fields(found[1], expected[1], lambda field: field)
        loss, truth = loss + found[1].entropy.sum(), truth + expected[1].entropy.sum()
        loss, truth = loss + found[1].score_variance.sum(), truth + expected[1].score_variance.sum()
    upstream = torch.linspace(0.5, 1.5, loss.numel(), dtype=F64).view(loss.shape)
    loss.backward(upstream)
    truth.backward(upstream)
    for name in sharded:
        close(own[name].grad, part(whole[name].grad, sizes), f"gradient of {name}")
    for name in shared:
        close(total_gradient(own[name].grad, own[name]), whole[name].grad, f"gradient of {name}, summed")


def ends(group: Any, how: str) -> None:
    """Both ends of a row, by their keys in the whole: ties go to the lowest, a nan is an end, products are exact."""
    torch.manual_seed(9)
    sizes = split(17, group.size(), how)
    x, w, y = torch.tensor([[1.0], [-1.0], [0.0]], dtype=F64), torch.randint(3, (17, 1)).to(F64), torch.zeros(3).long()
    for spoiled in (False, True):
        if spoiled:
            w[13] = torch.nan
        processes = processes_of(group).agree("ends", [sizes[group.rank()]], {})
        first = sum(sizes[: group.rank()])
        here = torch.full((3,), first <= 0 < first + sizes[group.rank()])
        found = processes.slices(partita.Gibbs(x, part(w, sizes)), y, here, rank=True, statistics=True)
        whole = partita.Gibbs(x, w)
        assert torch.equal(found.places, torch.stack([whole.argmax(), whole.argmin()])), found.places
        close(found.least, whole.min_score(), "min_score")


def replicated(group: Any) -> None:
    """`replicate` gives the whole gradient of the input on every rank."""
    torch.manual_seed(6)
    x, w, y = torch.randn(5, 3, dtype=F64), torch.randn(9, 3, dtype=F64), torch.randint(9, (5,))
    a, b = leaf(x), leaf(x)
    partita.linear_cross_entropy(a, w, y).backward()
    own = part(w, split(9, group.size(), "uneven"))
    partita.linear_cross_entropy(distributed.replicate(b, group), own, y, group=group).backward()
    close(b.grad, a.grad, "gradient of the replicated input")


def merged(group: Any, how: str) -> None:
    """States of slices of keys, merged: every number and every gradient."""
    torch.manual_seed(7)
    n, m, dim = 4, 11, 3
    sizes = split(m, group.size(), how)
    tensors = [torch.randn(n, dim, dtype=F64), torch.randn(m, dim, dtype=F64), torch.randn(m, 2, dtype=F64)]
    a = [leaf(t) for t in tensors]
    b = [leaf(tensors[0]), *(leaf(part(t, sizes)) for t in tensors[1:])]
    whole = partita.Gibbs(a[0], a[1], scale=0.7).state(a[2])
    found = distributed.merge(partita.Gibbs(b[0], b[1], scale=0.7).state(b[2]), group)
    close_fields(found.stats(), whole.stats(), lambda field: field)
    close(found.expectation(), whole.expectation(), "expectation")
    for state in (whole, found):
        total = state.expectation().square().sum() + sum((i + 1) * f.sum() for i, f in enumerate(state.stats()[:4]))
        total.backward()
    for x, y in zip(b[1:], a[1:], strict=True):
        close(x.grad, part(y.grad, sizes), "gradient of a slice")
    close(total_gradient(b[0].grad, b[0]), a[0].grad, "gradient of the query, summed")


def far_apart(group: Any) -> None:
    """Peaks of the ranks 95 apart, where float32 underflows: no statistic's gradient is lost, or infinite.

    A gradient is a sum of terms e^-g (g + 1)^2 < 1.5, so below 6 W, each made by some 20 roundings.
    """
    torch.manual_seed(8)
    world, rank = group.size(), group.rank()
    scores = torch.rand(3, 4 * world, dtype=F64) - 95.0 * (torch.arange(4 * world) // 4)
    own, s = leaf(scores[:, 4 * rank : 4 * rank + 4].float()), leaf(scores.float().double())
    found = distributed.merge(partita.State.of(own), group)
    p = s.softmax(-1)
    mean = (p * s).sum(-1)
    truth = s.logsumexp(-1), (p * (s - mean[:, None]) ** 2).sum(-1), -(p * s.log_softmax(-1)).sum(-1), mean
    sum(x.sum() for x in truth).backward()
    read = found.log_partition(), found.score_variance(), found.entropy(), found.mean_score()
    sum(x.sum() for x in read).backward()
    off = (own.grad.double() - s.grad[:, 4 * rank : 4 * rank + 4]).abs().max()
    assert off <= 20 * 6 * world * len(read) * torch.finfo(torch.float32).eps, off
