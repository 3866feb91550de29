"""Vocabulary-parallel cross entropy against one process."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch

import partita
from partita import distributed
from partita.collective import collective_of
from partita.engine.request import build
from tests.distributed.checks import Rows, against_one_process, close, close_fields, leaf, part, split, total_gradient

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
    rows: Rows = {"linear_weight": (w, sizes)}
    if bias:
        rows["linear_bias"] = torch.randn(classes, dtype=F64), sizes
    if weight:
        rows["weight"] = torch.rand(classes, dtype=F64) + 0.5, sizes
    shared = {"input": x}
    if sample:
        shared["sample_weight"] = torch.rand(y.shape, dtype=F64)
    if learned_scale:
        shared["scale"] = torch.rand(y.shape, dtype=F64) + 0.5
    also = ("entropy", "score_variance") if options.get("return_stats") else ()
    given = {"target": (y, y)}
    against_one_process(group, partita.linear_cross_entropy, rows, shared, lambda t: t, given, also, **options)


def tokens(
    group: Any,
    how: str,
    many: int = 0,
    kept: bool = False,
    temperature: bool = False,
    bias: bool = False,
    limits: dict[str, float] | None = None,
) -> None:
    """token_stats of a vocabulary in slices: every number and gradient of one process."""
    torch.manual_seed(6)
    sizes = split(17, group.size(), how)
    x, w, y = torch.randn(3, 4, 5, dtype=F64), torch.randn(17, 5, dtype=F64), torch.randint(17, (3, 4, many or 1))
    y[0, 1], y[2, 3, 0] = -100, -100
    w[5] = w[11]
    sharded = {"weight": w} | ({"bias": torch.randn(17, dtype=F64)} if bias else {})
    shared = {"hidden": x} | ({"temperature": torch.rand(3, 4, dtype=F64) + 0.5} if temperature else {})
    whole = {name: leaf(t) for name, t in {**shared, **sharded}.items()}
    own = {name: leaf(t) for name, t in shared.items()} | {name: leaf(part(t, sizes)) for name, t in sharded.items()}
    want = ["log_prob", "entropy", "varentropy", "log_sum_sq", "mean_logit", "logsumexp", "max_logit", "rank", "is_top"]
    options: dict[str, Any] = {"ids": y if many else y[..., 0], "want": [*want, "top_k:4"], **(limits or {})}
    if kept or limits:
        options["want"].append("kept_mass")
    if kept:
        options["kept"] = torch.randint(-1, 17, (3, 4, 6))
        options["kept"][1, 1] = -1  # nothing is kept of this row
    with mock.patch("partita.engine.listed._BEST", 2):  # more are exchanged where these have too little mass
        expected, found = partita.token_stats(**whole, **options), partita.token_stats(group=group, **own, **options)
    total, truth = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
    if kept or limits:
        assert torch.equal(found.outside, expected.outside) and found.outside
    for name in vars(expected):
        value, true = getattr(found, name), getattr(expected, name)
        if value.is_floating_point():
            close(value, true, name)
        else:
            assert torch.equal(value, true), name
        if true.requires_grad:
            seen = true.detach().isfinite()
            upstream = torch.linspace(0.5, 1.5, true.numel(), dtype=F64).view(true.shape)
            total = total + (torch.where(seen, value, 0.0) * upstream).sum()
            truth = truth + (torch.where(seen, true, 0.0) * upstream).sum()
    total.backward()
    truth.backward()
    for name in sharded:
        close(own[name].grad, part(whole[name].grad, sizes), f"gradient of {name}")
    for name in shared:
        close(total_gradient(own[name].grad, own[name]), whole[name].grad, f"gradient of {name}, summed")


def references(group: Any, how: str, kind: str, listed: str = "") -> None:
    """token_divergence of two vocabularies in slices, or to a teacher's list: one process's values and gradients."""
    torch.manual_seed(6)
    sizes = split(17, group.size(), how)
    shared = {"hidden": torch.randn(3, 4, 5, dtype=F64), "temperature": torch.rand(3, 4, dtype=F64) + 0.5}
    sharded = {"weight": torch.randn(17, 5, dtype=F64)}
    options: dict[str, Any] = {"kind": kind, "beta": 0.3}
    if listed:
        given, index = torch.randn(3, 4, 17, dtype=F64).log_softmax(-1).topk(4)
        index[0, 0, 2:] = -1
        options |= {"teacher_index": index, "teacher_log_prob": given, "tail": listed}
    else:
        shared["ref_hidden"], sharded["ref_weight"] = torch.randn(3, 4, 2, dtype=F64), torch.randn(17, 2, dtype=F64)
    whole = {name: leaf(t) for name, t in {**shared, **sharded}.items()}
    own = {name: leaf(t) for name, t in shared.items()} | {name: leaf(part(t, sizes)) for name, t in sharded.items()}
    true, found = partita.token_divergence(**whole, **options), partita.token_divergence(group=group, **own, **options)
    close(found, true, "divergence")
    for result in (true, found):
        (result * torch.linspace(0.5, 1.5, true.numel(), dtype=F64).view(true.shape)).sum().backward()
    for name in sharded:
        close(own[name].grad, part(whole[name].grad, sizes), f"gradient of {name}")
    for name in shared:
        close(total_gradient(own[name].grad, own[name]), whole[name].grad, f"gradient of {name}, summed")


def ends(group: Any, how: str) -> None:
    """The best key of a row, as named in the whole: ties go to the lowest, a nan is the best, products are exact."""
    torch.manual_seed(9)
    sizes = split(17, group.size(), how)
    x, w, y = torch.tensor([[1.0], [-1.0], [0.0]], dtype=F64), torch.randint(3, (17, 1)).to(F64), torch.zeros(3).long()
    for spoiled in (False, True):
        if spoiled:
            w[13] = torch.nan
        known = collective_of(group).check_same("ends", [sizes[group.rank()]], {})
        first = sum(sizes[: group.rank()])
        here = torch.full((3,), first <= 0 < first + sizes[group.rank()])
        ask = functools.partial(build, x, part(w, sizes))
        found = known.slices([ask], y, here, rank=True, statistics=True)
        whole = partita.Gibbs(x, w)
        assert torch.equal(found.argmax, whole.argmax()), found.argmax


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
