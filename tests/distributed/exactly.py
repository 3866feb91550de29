"""Exact rows over a group: what each number of processes gives, as digests that the test compares to the bit."""

from __future__ import annotations

import functools
import hashlib
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import partita
from partita import distributed, support
from partita.distributed import tree

CLASSES, DIM, ROWS, ROW = 10248, 24, 5, 3
LENGTH, HEADS = 1357, 2
SIZES = {1: [1357], 2: [768, 589], 3: [512, 256, 589], 4: [256, 512, 256, 333]}  # slices of LENGTH
WANT = (
    "log_prob", "entropy", "varentropy", "log_sum_sq", "mean_logit", "logsumexp", "max_logit", "rank", "is_top",
    "top_k:4",
)  # fmt: skip


def _digests(found: dict[str, Tensor]) -> dict[str, str]:
    bits = {name: x.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for name, x in found.items()}
    return {name: hashlib.sha1(x.tobytes()).hexdigest()[:12] for name, x in bits.items()}


def _leaves(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype).requires_grad_() for name, x in given.items()}


def _slice(tensor: Tensor, group: Any) -> Tensor:
    """This rank's classes, evenly."""
    return tensor.chunk(group.size())[group.rank()].clone()


def _vocabulary(group: Any, dtype: torch.dtype, alone: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Rows, or one of them; slices of classes; ids."""
    torch.manual_seed(3)
    hidden, weight, bias = torch.randn(ROWS, DIM), torch.randn(CLASSES, DIM), torch.randn(CLASSES)
    other, ids, warmth = torch.randn(CLASSES, DIM), torch.randint(CLASSES, (ROWS,)), torch.rand(ROWS) + 0.5
    weight[77] = weight[9000]  # a tie
    ids[0], ids[1], ids[2], ids[ROW] = 9000, 77, 0, 5200
    rows = slice(ROW, ROW + 1) if alone else slice(None)
    cut = {"weight": weight, "bias": bias, "other": other}
    given = {"hidden": hidden[rows], "warmth": warmth[rows], **{name: _slice(x, group) for name, x in cut.items()}}
    return _leaves(given, dtype), ids[rows], torch.randn(ROWS, 16)[rows]


def _read(
    group: Any, found: dict[str, Tensor], operands: dict[str, Tensor], up: Tensor, alone: bool, label: str
) -> dict[str, Tensor]:
    """Of one row what was found and its gradients; of all rows everything, and the gradients of the classes."""
    total = torch.zeros(())
    for i, x in enumerate(x for x in found.values() if x.requires_grad):
        total = total + (x.double() * (up[:, i % 16, None] if x.dim() == 2 else up[:, i % 16])).sum()
    total.backward()
    at = 0 if alone else ROW
    out = {f"{label} {name}, row": x[at] for name, x in found.items()}
    for name in ("hidden", "warmth"):
        if operands[name].grad is not None:
            out[f"{label} gradient of {name}, row"] = operands[name].grad[at]
    if not alone:
        out |= {f"{label} {name}": x for name, x in found.items()}
        for name in ("weight", "bias", "other"):
            if operands[name].grad is not None:
                out[f"{label} gradient of {name}"] = distributed.gather(operands[name].grad, group, 0)
    return out


def mutated(group: Any, call: str, **given: Any) -> dict[str, str]:
    """A call where ranks, and leaves of a sequence, are joined in the order in which they come."""

    def in_turn(n: int, leaves: Any, join: Any, most: int) -> Any:
        return whole(n, leaves, join, most) if most > 1 else functools.reduce(join, leaves)

    def at_once(self: Any, start: int, stop: int, item: Any) -> None:
        known = self._nodes.get((20, 0))
        self._nodes[20, 0] = item if known is None else self._join(known, item)

    whole = tree.fold
    with (
        mock.patch.object(tree, "fold", in_turn),
        mock.patch.multiple(tree.Joining, add=at_once, result=lambda self: self._nodes.get((20, 0))),
    ):
        found: dict[str, str] = globals()[call](group, **given)
        return found


def cross_entropy(group: Any, dtype: torch.dtype, alone: bool = False) -> dict[str, str]:
    found = {}
    for label, options in {
        "plain": {},
        "regularised": {"z_loss": 0.01, "entropy_weight": 0.1, "softcap": 20.0},
    }.items():
        x, ids, up = _vocabulary(group, dtype, alone)
        with partita.exact_rows():
            hidden, warmth = (distributed.replicate(x[name], group) for name in ("hidden", "warmth"))
            nll, stats = partita.linear_cross_entropy(
                hidden, x["weight"], ids, linear_bias=x["bias"], scale=warmth, reduction="none", return_stats=True,
                group=group, **options,
            )  # fmt: skip
        found |= _read(group, {"loss": nll, **stats._asdict()}, x, up, alone, label)
    return _digests(found)


def tokens(group: Any, dtype: torch.dtype, alone: bool = False) -> dict[str, str]:
    found = {}
    for label, many in (("one id", False), ("three ids", True)):
        x, ids, up = _vocabulary(group, dtype, alone)
        ids = torch.stack([ids, (ids + 5000) % CLASSES, (ids + 1) % CLASSES], 1) if many else ids
        with partita.exact_rows():
            hidden, warmth = distributed.replicate(x["hidden"], group), x["warmth"].detach().float()
            stats = partita.token_stats(
                hidden, x["weight"], ids, bias=x["bias"], temperature=warmth, want=WANT, group=group
            )
        found |= _read(group, dict(vars(stats)), x, up, alone, label)
    return _digests(found)


def divergence(group: Any, dtype: torch.dtype, alone: bool = False) -> dict[str, str]:
    found = {}
    listed = torch.tensor([[5, 9000, 4000], [77, 1, -1], [2, 3, 8000], [10247, 6000, 2], [1, -1, -1]])
    for kind in ("forward", "reverse", "js", "hellinger", "cross_entropy", "list"):
        x, ids, up = _vocabulary(group, dtype, alone)
        with partita.exact_rows():
            hidden = distributed.replicate(x["hidden"], group)
            if kind == "list":
                teacher = {"teacher_index": listed[ids.new_tensor([ROW]) if alone else slice(None)], "kind": "reverse"}
                teacher["teacher_log_prob"] = torch.full(teacher["teacher_index"].shape, -2.0)
            else:
                teacher = {"ref_hidden": hidden.detach().flip(-1), "ref_weight": x["other"], "kind": kind}
            away = partita.token_divergence(hidden, x["weight"], group=group, **teacher)
        found |= _read(group, {"divergence": away}, x, up, alone, kind)
    return _digests(found)


SEEN = {
    "all": lambda: None,
    "causal": support.causal,
    "window": lambda: support.window(300, 100),
    "lengths": lambda: support.lengths(torch.tensor([1100, 700])),
    "holes": lambda: support.mask(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.3),
}


def attention(group: Any, dtype: torch.dtype, seen: str, zigzag: bool = False) -> dict[str, str]:
    """A slice of the sequence on every rank; the gradients of keys and values are sums over rows and not compared."""
    torch.manual_seed(4)
    n, world, rank = 2048 if zigzag else LENGTH, group.size(), group.rank()
    q, k, v = (torch.randn(2, HEADS, n, w) for w in (DIM, DIM, 12))
    column, up = torch.randn(2, HEADS, n, 1), torch.randn(2, HEADS, n, 16)
    known = distributed.zigzag(group) if zigzag else group

    def own(x: Tensor) -> Tensor:
        return distributed.shard(x, known) if zigzag else x.split(SIZES[world], -2)[rank].clone()

    x = _leaves({"query": own(q), "key": own(k), "value": own(v), "bias": own(column)}, dtype)
    with partita.exact_rows():
        out, stats = partita.attention(
            x["query"], x["key"], x["value"], support=SEEN[seen](), bias=x["bias"], scale=0.3, return_stats=True,
            group=known,
        )  # fmt: skip
    found = {"mean": out, **stats._asdict()}
    rows = torch.stack([f for f in stats if f.requires_grad], -1)
    total = (out.double() * own(up)[..., :12]).sum() + (rows.double() * own(up)[..., 12 : 12 + rows.shape[-1]]).sum()
    total.backward()
    found |= {"gradient of the query": x["query"].grad, "gradient of a column of bias": x["bias"].grad}
    whole = {name: f if f.dim() > 3 or f.dim() == 2 else f[..., None] for name, f in found.items()}
    return _digests({name: distributed.gather(f, known, -2) for name, f in whole.items()})


def behind(group: Any, dtype: torch.dtype) -> None:
    """What comes after a row does not change it, however many leaves it makes and wherever slices are cut."""
    torch.manual_seed(6)
    q, k, v, up = (torch.randn(2, 1100, w).to(dtype) for w in (DIM, DIM, 12, 12))
    found = []
    for n, first in ((600, 512), (1100, 768)):
        sizes = [first, n - first] if group.size() == 2 else [n]
        own = [x[:, :n].split(sizes, 1)[group.rank()].clone().requires_grad_() for x in (q, k, v)]
        with partita.exact_rows():
            out = partita.attention(*own, is_causal=True, group=group)
        (out * up[:, :n].split(sizes, 1)[group.rank()]).sum().backward()
        found.append([distributed.gather(x, group)[:, :600] for x in (out, own[0].grad)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
