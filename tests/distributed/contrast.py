"""Contrast across ranks against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import partita
from partita.contrastive import Queue
from tests.distributed.checks import Rows, against_one_process, leaf, part, split

F64 = torch.float64


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=F64)


def info_nce(group: Any, how: str, n: int = 13, dim: int = 5, **options: Any) -> None:
    torch.manual_seed(1)
    world = group.size()
    sizes = split(n, world, how)
    q, k = draws(n, dim), draws(n, dim)
    k[3], q[3] = k[1], q[1]  # a tie that must not count as a higher rank
    rows: Rows = {"query": (q, sizes), "positive_key": (k, sizes)}
    once: dict[str, tuple[Any, Any]] = {}
    mode = options.pop("negatives", None)
    if mode == "unpaired":
        rows["negative_keys"] = draws(n + 4, dim), split(n + 4, world, "even" if how == "even" else "uneven")
    elif mode == "paired":
        rows["negative_keys"], options["negative_mode"] = (draws(n, 3, dim), sizes), "paired"
    if options.pop("labels", False):
        labels = torch.arange(n) % 4
        once["labels"] = labels, part(labels, sizes)
    if options.pop("queue", False):
        keys = draws(7, dim)
        once["queue"] = _queue(keys), _queue(part(keys, split(7, world, "even")))
    same = {"log_temperature": number(-1.2)}
    against_one_process(group, partita.info_nce_loss, rows, same, lambda x: part(x, sizes), once, **options)


def temperature_of_each_row(group: Any) -> None:
    """Rank 0 has a single row, whose temperature of shape (1,) is no less one of each row."""
    torch.manual_seed(3)
    sizes = [1, *[3] * (group.size() - 1)]
    n = sum(sizes)
    given = {"query": draws(n, 4), "positive_key": draws(n, 4), "temperature": torch.rand(n, dtype=F64) + 0.5}
    rows = {name: (x, sizes) for name, x in given.items()}
    against_one_process(group, partita.info_nce_loss, rows, {}, lambda x: part(x, sizes))


def _queue(keys: Tensor) -> Queue:
    queue = Queue(16, keys.shape[1], dtype=F64)
    queue.push(keys)
    return queue


def _towers(group: Any, how: str, n: int, dim: int, factor: float = 1.0) -> tuple[Rows, Callable[[Tensor], Tensor]]:
    torch.manual_seed(2)
    sizes = split(n, group.size(), how)
    rows = {f"{name}_features": (factor * draws(n, dim), sizes) for name in ("image", "text")}
    return rows, lambda x: part(x, sizes)


def clip(group: Any, how: str, bias: bool = False, return_stats: bool = False, n: int = 12) -> None:
    rows, cut = _towers(group, how, n, 4)
    once = {"logit_bias": (number(0.3), number(0.3))} if bias else {}
    same = {"logit_scale": number(1.7)}
    against_one_process(group, partita.clip_loss, rows, same, cut, once, return_stats=return_stats)


def siglip(group: Any, how: str, reduction: str = "mean", large: bool = False) -> None:
    rows, cut = _towers(group, how, *((2100, 300) if large else (12, 4)), 0.3)  # texts go in parts, images in blocks
    same = {"logit_scale": number(1.7), "logit_bias": number(-0.3)}
    against_one_process(group, partita.siglip_loss, rows, same, cut, reduction=reduction)


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


def nt_xent(group: Any, how: str, n: int = 9, **options: Any) -> None:
    """Anchors are out0 then out1 on every rank, and all of out0, then all of out1, in one process."""
    torch.manual_seed(3)
    sizes, first, order = split(n, group.size(), how), 0, []
    for size in sizes:
        order += [*range(first, first + size), *range(n + first, n + first + size)]
        first += size
    rows = {name: (draws(n, 4), sizes) for name in ("out0", "out1")}

    def cut(field: Tensor) -> Tensor:
        return part(field[torch.tensor(order, dtype=torch.int64)], [2 * s for s in sizes])

    against_one_process(group, partita.nt_xent_loss, rows, {"temperature": number(0.4)}, cut, **options)


def supcon(group: Any, how: str, labels: int = 3, reference: bool = False, n: int = 14, **options: Any) -> None:
    torch.manual_seed(4)
    sizes, refs = split(n, group.size(), how), split(n + 3, group.size(), "uneven")
    x, ref, y, ref_y = draws(n, 4), draws(n + 3, 4), torch.arange(n) % labels, torch.arange(n + 3) % (labels + 1)
    y[0] = 99  # an anchor without a positive
    rows, once = {"embeddings": (x, sizes)}, {"labels": (y, part(y, sizes))}
    if reference:
        rows["ref_emb"], once["ref_labels"] = (ref, refs), (ref_y, part(ref_y, refs))
    same = {"temperature": number(0.3)}
    against_one_process(group, partita.supcon_loss, rows, same, lambda x: part(x, sizes), once, **options)
