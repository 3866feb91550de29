"""Contrast across ranks against one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import partita
from partita.contrastive import Queue
from tests.distributed.checks import close, close_fields, leaf, part, split, total_gradient

F64 = torch.float64


def _weights(out: Tensor) -> Tensor:
    """Upstream gradients of rows: different for every row, the same wherever the row lives."""
    return torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)


def info_nce(group: Any, how: str, n: int = 13, dim: int = 5, **options: Any) -> None:
    torch.manual_seed(1)
    world = group.size()
    sizes = split(n, world, how)
    q, k = torch.randn(n, dim, dtype=F64), torch.randn(n, dim, dtype=F64)
    k[3], q[3] = k[1], q[1]  # a tie that must not count as a higher rank
    log_t = torch.tensor(-1.2, dtype=F64)
    more: dict[str, Tensor] = {}
    shares: dict[str, list[int]] = {}
    mode = options.pop("negatives", None)
    if mode == "unpaired":
        shares["negative_keys"] = split(n + 4, world, "even" if how == "even" else "uneven")
        more["negative_keys"] = torch.randn(n + 4, dim, dtype=F64)
    elif mode == "paired":
        shares["negative_keys"] = sizes
        more["negative_keys"] = torch.randn(n, 3, dim, dtype=F64)
        options["negative_mode"] = "paired"
    labels = torch.arange(n) % 4 if options.pop("labels", False) else None
    queue_keys = torch.randn(7, dim, dtype=F64) if options.pop("queue", False) else None
    reduction = options.get("reduction", "mean")

    whole = {"query": leaf(q), "positive_key": leaf(k), **{name: leaf(x) for name, x in more.items()}}
    whole_t = leaf(log_t)
    queue = _queue(queue_keys, dim)
    expected = partita.info_nce_loss(**whole, log_temperature=whole_t, labels=labels, queue=queue, **options)

    own = {name: leaf(part(x, shares.get(name, sizes))) for name, x in {"query": q, "positive_key": k, **more}.items()}
    own_t = leaf(log_t)
    mine = None if queue_keys is None else part(queue_keys, split(7, world, "even"))
    found = partita.info_nce_loss(
        **own,
        log_temperature=own_t,
        labels=None if labels is None else part(labels, sizes),
        queue=_queue(mine, dim),
        group=group,
        **options,
    )
    _compare(found, expected, reduction, sizes)
    _backward(found, reduction, sizes)
    _backward(expected, reduction, None)
    for name, x in own.items():
        assert x.grad is not None
        close(x.grad, part(whole[name].grad, shares.get(name, sizes)), f"gradient of {name}")
    close(total_gradient(own_t.grad, own_t), whole_t.grad, "gradient of the temperature")


def temperature_of_each_row(group: Any) -> None:
    """Rank 0 has a single row, whose temperature of shape (1,) is no less one of each row."""
    torch.manual_seed(3)
    sizes = [1, *[3] * (group.size() - 1)]
    n = sum(sizes)
    q, k, t = torch.randn(n, 4, dtype=F64), torch.randn(n, 4, dtype=F64), torch.rand(n, dtype=F64) + 0.5
    whole, own = leaf(t), leaf(part(t, sizes))
    expected = partita.info_nce_loss(q, k, temperature=whole)
    found = partita.info_nce_loss(part(q, sizes), part(k, sizes), temperature=own, group=group)
    close(found, expected, "loss")
    found.backward()
    expected.backward()
    close(own.grad, part(whole.grad, sizes), "gradient of the temperatures")


def _queue(keys: Tensor | None, dim: int) -> Queue | None:
    if keys is None:
        return None
    queue = Queue(16, dim, dtype=F64)
    queue.push(keys)
    return queue


def _compare(found: Any, expected: Any, reduction: str, sizes: list[int]) -> None:
    stats = isinstance(expected, tuple)
    loss, truth = (found[0], expected[0]) if stats else (found, expected)
    close(loss, part(truth, sizes) if reduction == "none" else truth, "loss")
    if stats:
        close_fields(found[1], expected[1], lambda x: part(x, sizes))


def _backward(out: Any, reduction: str, sizes: list[int] | None) -> None:
    loss = out[0] if isinstance(out, tuple) else out
    if reduction != "none":
        loss.backward()
        return
    n = loss.numel() if sizes is None else sum(sizes)
    weight = _weights(torch.empty(n, dtype=loss.dtype))
    loss.backward(weight if sizes is None else part(weight, sizes))


def clip(group: Any, how: str, bias: bool = False, return_stats: bool = False, n: int = 12, dim: int = 4) -> None:
    torch.manual_seed(2)
    sizes = split(n, group.size(), how)
    image, text = torch.randn(n, dim, dtype=F64), torch.randn(n, dim, dtype=F64)
    scale, shift = torch.tensor(1.7, dtype=F64), torch.tensor(0.3, dtype=F64)
    a = [leaf(x) for x in (image, text, scale)]
    b = [leaf(part(x, sizes)) for x in (image, text)] + [leaf(scale)]
    extra = (shift,) if bias else ()
    expected = partita.clip_loss(*a, *extra, return_stats=return_stats)
    found = partita.clip_loss(*b, *extra, return_stats=return_stats, group=group)
    _compare(found, expected, "mean", sizes)
    _backward(expected, "mean", None)
    _backward(found, "mean", sizes)
    for x, y, name in zip(b[:2], a[:2], ("image", "text"), strict=True):
        close(x.grad, part(y.grad, sizes), f"gradient of {name}")
    close(total_gradient(b[2].grad, b[2]), a[2].grad, "gradient of the scale")


def siglip(group: Any, how: str, reduction: str = "mean", large: bool = False, n: int = 12, dim: int = 4) -> None:
    torch.manual_seed(2)
    n, dim = (2100, 300) if large else (n, dim)  # texts go in parts, images in blocks
    sizes = split(n, group.size(), how)
    image, text = (0.3 * torch.randn(n, dim, dtype=F64) for _ in range(2))
    scale, bias = torch.tensor(1.7, dtype=F64), torch.tensor(-0.3, dtype=F64)
    a = [leaf(x) for x in (image, text, scale, bias)]
    b = [leaf(part(x, sizes)) for x in (image, text)] + [leaf(scale), leaf(bias)]
    expected = partita.siglip_loss(*a, reduction=reduction)
    found = partita.siglip_loss(*b, reduction=reduction, group=group)
    _compare(found, expected, reduction, sizes)
    _backward(expected, reduction, None)
    _backward(found, reduction, sizes)
    for x, y, name in zip(b[:2], a[:2], ("image", "text"), strict=True):
        close(x.grad, part(y.grad, sizes), f"gradient of {name}")
    for x, y, name in zip(b[2:], a[2:], ("scale", "bias"), strict=True):
        close(total_gradient(x.grad, x), y.grad, f"gradient of the {name}")


def siglip_halves(group: Any) -> None:
    """bfloat16: gradients are summed in float32 on their way and rounded once."""
    torch.manual_seed(4)
    sizes = split(40, group.size(), "uneven")
    image, text = (torch.randn(40, 8).bfloat16() for _ in range(2))
    a, b = [leaf(x) for x in (image, text)], [leaf(part(x, sizes)) for x in (image, text)]
    partita.siglip_loss(*a, 2.0, -1.0).backward()
    partita.siglip_loss(*b, 2.0, -1.0, group=group).backward()
    for x, y in zip(b, a, strict=True):
        torch.testing.assert_close(x.grad, part(y.grad, sizes), rtol=2**-7, atol=1e-4)


def _interleaved(sizes: list[int]) -> Tensor:
    """Where this world's anchors (out0 then out1 on every rank) are among those of one process (out0, then out1)."""
    n, first, order = sum(sizes), 0, []
    for size in sizes:
        order += [*range(first, first + size), *range(n + first, n + first + size)]
        first += size
    return torch.tensor(order, dtype=torch.int64)


def nt_xent(
    group: Any, how: str, reduction: str = "mean", return_stats: bool = False, n: int = 9, dim: int = 4
) -> None:
    torch.manual_seed(3)
    sizes = split(n, group.size(), how)
    x, y = torch.randn(n, dim, dtype=F64), torch.randn(n, dim, dtype=F64)
    t = torch.tensor(0.4, dtype=F64)
    a, b = [leaf(z) for z in (x, y, t)], [*(leaf(part(z, sizes)) for z in (x, y)), leaf(t)]
    options = {"reduction": reduction, "return_stats": return_stats}
    expected = partita.nt_xent_loss(a[0], a[1], temperature=a[2], **options)
    found = partita.nt_xent_loss(b[0], b[1], temperature=b[2], group=group, **options)
    order, doubled = _interleaved(sizes), [2 * s for s in sizes]

    def cut(field: Tensor) -> Tensor:
        return part(field[order], doubled)

    loss, truth = (found[0], expected[0]) if return_stats else (found, expected)
    close(loss, cut(truth) if reduction == "none" else truth, "loss")
    if return_stats:
        close_fields(found[1], expected[1], cut)
    weight = _weights(torch.empty(2 * n, dtype=F64))
    truth.backward(weight if reduction == "none" else None)
    loss.backward(cut(weight) if reduction == "none" else None)
    for one, other in zip(b[:2], a[:2], strict=True):
        close(one.grad, part(other.grad, sizes), "gradient")
    close(total_gradient(b[2].grad, b[2]), a[2].grad, "gradient of the temperature")


def supcon(group: Any, how: str, labels: int = 3, reference: bool = False, n: int = 14, **options: Any) -> None:
    torch.manual_seed(4)
    world, dim = group.size(), 4
    sizes, refs = split(n, world, how), split(n + 3, world, "uneven")
    x, ref = torch.randn(n, dim, dtype=F64), torch.randn(n + 3, dim, dtype=F64)
    y, ref_y = torch.arange(n) % labels, torch.arange(n + 3) % (labels + 1)
    y[0] = 99  # an anchor without a positive
    t = torch.tensor(0.3, dtype=F64)
    a, b = [leaf(z) for z in (x, ref, t)], [leaf(part(x, sizes)), leaf(part(ref, refs)), leaf(t)]
    first = {"ref_emb": a[1], "ref_labels": ref_y} if reference else {}
    second = {"ref_emb": b[1], "ref_labels": part(ref_y, refs)} if reference else {}
    reduction = options.get("reduction", "mean")
    expected = partita.supcon_loss(a[0], y, temperature=a[2], **first, **options)
    found = partita.supcon_loss(b[0], part(y, sizes), temperature=b[2], group=group, **second, **options)
    _compare(found, expected, reduction, sizes)
    _backward(expected, reduction, None)
    _backward(found, reduction, sizes)
    close(b[0].grad, part(a[0].grad, sizes), "gradient of the embeddings")
    if reference:
        close(b[1].grad, part(a[1].grad, refs), "gradient of the references")
    close(total_gradient(b[2].grad, b[2]), a[2].grad, "gradient of the temperature")
