"""Context-parallel attention against one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import partita
from partita import distributed, scale, support
from partita.collective import Collective, even_sizes
from tests.distributed.checks import close, close_fields, leaf, split, total_gradient

F64 = torch.float64
B, H = 2, 4


def _support(name: str | None, n: int, m: int) -> partita.support.Support | None:
    ids = torch.arange(n) // 4
    lengths = torch.tensor([m - 3, m // 2])
    return {
        None: lambda: None,
        "causal": support.causal,
        "bottom-right": lambda: support.causal("bottom-right"),
        "window": lambda: support.window(3, 1),
        "causal window": lambda: support.window(5, None) & support.causal(),
        "lengths": lambda: support.lengths(lengths),
        "padded causal": lambda: support.causal() & support.lengths(lengths),
        "nothing seen": lambda: support.lengths(torch.tensor([0, m])),
        "segments": lambda: support.segments(ids.expand(B, n)),
        "packed causal": lambda: support.segments(ids) & support.causal(),
        "not self": support.not_self,
        "union": lambda: support.window(1, 1) | support.lengths(2),
        "mask": lambda: support.mask(torch.arange(n * m).view(n, m) % 3 != 0),
    }[name]()


def positions(sizes: list[int], zigzag: bool, rank: int) -> Tensor:
    """Where the rows of a rank are in the whole sequence."""
    return Collective(None, rank, len(sizes), zigzag, (tuple(sizes),)).positions(rank)


def attention(
    group: Any,
    how: str,
    seen: str | None = None,
    order: str = "rank",
    heads: int = H,
    policy: str | None = None,
    bias: str | None = None,
    attn_mask: str | None = None,
    sink: bool = False,
    cross: bool = False,
    return_stats: bool = True,
    **options: Any,
) -> None:
    torch.manual_seed(8)
    world, rank = group.size(), group.rank()
    n, dim = 22, 3
    m = 15 if cross else n
    sizes = split(n, world, how)
    key_sizes = split(m, world, how) if cross else sizes
    zig = order == "zigzag"
    if zig:
        group = distributed.zigzag(group)
        sizes, key_sizes = even_sizes(n, world, zig), even_sizes(m, world, zig)
    rows, keys = positions(sizes, zig, rank), positions(key_sizes, zig, rank)

    q, k, v = torch.randn(B, H, n, dim), torch.randn(B, heads, m, dim), torch.randn(B, heads, m, dim + 1)
    q, k, v = (t.to(F64) for t in (q, k, v))
    whole, own = [leaf(t) for t in (q, k, v)], [leaf(q[..., rows, :]), leaf(k[..., keys, :]), leaf(v[..., keys, :])]
    shared: dict[str, tuple[Tensor, Tensor]] = {}
    first: dict[str, Any] = {"support": _support(seen, n, m), "enable_gqa": heads != H, **options}
    second = dict(first)
    if bias is not None:
        matrix = torch.randn(H, n if bias != "per key" else 1, m, dtype=F64)
        matrix[..., 2] = -torch.inf
        a, b = leaf(matrix), leaf(matrix[..., rows, :] if bias == "rows" else matrix)
        first["bias"], second["bias"] = a, b
        if bias != "rows":
            shared["bias"] = (a, b)
    if attn_mask is not None:
        matrix = torch.rand(B, 1, n, m) > 0.3
        first["attn_mask"], second["attn_mask"] = matrix, matrix[..., rows, :] if attn_mask == "rows" else matrix
    if sink:
        shared["sink"] = (leaf(torch.randn(H, dtype=F64)), leaf(torch.zeros(H)))
        shared["sink"] = (shared["sink"][0], leaf(shared["sink"][0]))
        first["sink"], second["sink"] = shared["sink"]
    if policy == "log":
        first["scale"] = second["scale"] = scale.LogLength(reference=8)
    elif policy == "learned":
        one, other = scale.ScalableSoftmax(H).double(), scale.ScalableSoftmax(H).double()
        first["scale"], second["scale"] = one, other
        shared["scale"] = (next(one.parameters()), next(other.parameters()))
    elif policy == "number":
        first["scale"] = second["scale"] = 0.9

    expected = partita.attention(*whole, return_stats=return_stats, **first)
    found = partita.attention(*own, return_stats=return_stats, group=group, **second)
    out, truth = (found[0], expected[0]) if return_stats else (found, expected)
    close(out, truth[..., rows, :], "output")
    upstream = torch.randn(B, H, n, dim + 1, dtype=F64)
    total, goal = (out * upstream[..., rows, :]).sum(), (truth * upstream).sum()
    if return_stats:
        close_fields(found[1], expected[1], lambda field: field[..., rows])
        total, goal = total + found[1].entropy.sum(), goal + expected[1].entropy.sum()
        total, goal = total + found[1].score_variance.sum(), goal + expected[1].score_variance.sum()
    total.backward()
    goal.backward()
    for name, x, y, at in zip(("query", "key", "value"), own, whole, (rows, keys, keys), strict=True):
        close(x.grad, y.grad[..., at, :], f"gradient of {name}")
    for name, (y, x) in shared.items():
        close(total_gradient(x.grad, x), y.grad, f"gradient of {name}, summed")
    if bias == "rows":
        close(second["bias"].grad, first["bias"].grad[..., rows, :], "gradient of the bias of these rows")


def poisoned(group: Any) -> None:
    """nan and inf in padded keys and values, wherever they live, change nothing in rows that do not see them."""
    torch.manual_seed(9)
    n, world, rank = 12, group.size(), group.rank()
    sizes = split(n, world, "uneven")
    at = positions(sizes, False, rank)
    q, k, v = (torch.randn(2, n, 3, dtype=F64) for _ in range(3))
    seen = support.causal() & support.lengths(torch.tensor([5, 9]))
    clean = [leaf(t) for t in (q, k, v)]
    truth, stats = partita.attention(*clean, support=seen, return_stats=True)
    (truth.square().sum() + stats.entropy.sum()).backward()
    for i, length in enumerate((5, 9)):
        k[i, length:], v[i, length:] = torch.nan, torch.inf
    own = [leaf(t[:, at]) for t in (q, k, v)]
    found, own_stats = partita.attention(*own, support=seen, return_stats=True, group=group)
    close(found, truth[:, at], "output")
    (found.square().sum() + own_stats.entropy.sum()).backward()
    for x, y in zip(own, clean, strict=True):
        close(x.grad, y.grad[:, at], "gradient")


def lowered(group: Any) -> None:
    """Under autocast the products are in bfloat16, the output too, and the sums are not."""
    torch.manual_seed(10)
    q, k, v = (torch.randn(2, 16, 8) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, stats = partita.attention(q, k, v, is_causal=True, return_stats=True)
        at = positions(split(16, group.size(), "uneven"), False, group.rank())
        own = [leaf(t[:, at]) for t in (q, k, v)]
        found, own_stats = partita.attention(*own, is_causal=True, return_stats=True, group=group)
    assert found.dtype == whole.dtype == torch.bfloat16
    assert own_stats.entropy.dtype == torch.float32
    torch.testing.assert_close(found, whole[:, at], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(own_stats.entropy, stats.entropy[:, at], rtol=1e-4, atol=1e-4)
    found.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in own)


def pieces(group: Any) -> None:
    """`shard` cuts, `gather` puts together; in zigzag order too."""
    for layout in (group, distributed.zigzag(group)):
        for n in (0, 1, 7, 16):
            whole = torch.arange(2 * n * 3).view(2, n, 3)
            own = distributed.shard(whole, layout)
            assert torch.equal(distributed.gather(own, layout), whole)


def even_work(group: Any) -> list[int]:
    """How many pairs each rank computes under a causal support, in rank order and in zigzag order."""
    n, out = 480, []
    for layout in (group, distributed.zigzag(group)):
        zig = layout is not group
        at = positions(even_sizes(n, group.size(), zig), zig, group.rank())
        out.append(int(support.causal().visible(n, n)[at].sum()))
    return out
