"""What a rank does in a test: its part of a problem that one process can solve whole, and the comparison of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Leaf = dict[str, Tensor]
Rows = dict[str, tuple[Tensor, list[int]]]  # a tensor of all ranks, and how many of its rows each has


def split(n: int, world: int, how: str) -> list[int]:
    """How many rows each rank gets: "even", "uneven", or "empty", where rank 0 (and every third) gets none."""
    if how == "even":
        return [n // world + (r < n % world) for r in range(world)]
    weight = [0 if how == "empty" and r % 3 == 0 else 1 + 2 * (r % 3) for r in range(world)]
    sizes = [n * w // sum(weight) for w in weight]
    sizes[-1] += n - sum(sizes)
    if how == "empty" and world > 3 and sizes[-1] and not weight[-1]:
        sizes[1], sizes[-1] = sizes[1] + sizes[-1], 0
    return sizes


def part(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """This rank's slice."""
    return tensor.split(list(sizes), dim)[dist.get_rank()]


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def close(actual: Tensor, expected: Tensor, what: str, dtype: torch.dtype = torch.float64) -> None:
    """Equal up to rounding: 1e-10 in float64."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    limit = 1e-10 if dtype == torch.float64 else 2e-5
    scale = max(1.0, float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 1.0)
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=limit, atol=limit * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def close_fields(actual: Any, expected: Any, cut: Callable[[Tensor], Tensor]) -> None:
    """Every field of the statistics, of this rank's rows."""
    assert type(actual) is type(expected), f"{type(actual)}, expected {type(expected)}"
    for name in expected._fields:
        one, other = getattr(actual, name), cut(getattr(expected, name))
        assert one.dtype == other.dtype, f"{name}: {one.dtype}, expected {other.dtype}"
        if one.is_floating_point():
            close(one, other, name)
        else:
            assert torch.equal(one, other), f"{name}: {one}, expected {other}"


def total_gradient(grad: Tensor | None, like: Tensor) -> Tensor:
    """The sum over ranks of the gradients of a replicated tensor."""
    out = torch.zeros_like(like) if grad is None else grad.clone()
    dist.all_reduce(out)
    return out


def error_of(call: Callable[[], object]) -> str:
    """What a call raises, with its kind."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def against_one_process(
    group: Any,
    loss: Callable[..., Any],
    rows: Rows,
    same: dict[str, Tensor],
    cut: Callable[[Tensor], Tensor],  # this rank's part of what one process gives for each row
    once: dict[str, tuple[Any, Any]] | None = None,  # of one process and of this rank, without a gradient
    also: Sequence[str] = (),  # statistics whose sums are added to the loss, for their gradients
    **options: Any,
) -> None:
    """Value, statistics and gradients; those of replicated tensors are summed over ranks."""
    whole = {name: leaf(x) for name, x in (same | {name: x for name, (x, _) in rows.items()}).items()}
    own = {name: leaf(part(x, rows[name][1]) if name in rows else x) for name, x in whole.items()}
    first, second = ({name: pair[i] for name, pair in (once or {}).items()} for i in range(2))
    expected, found = loss(**whole, **first, **options), loss(**own, **second, **options, group=group)
    if isinstance(expected, tuple):
        (expected, stats), (found, read) = expected, found
        close_fields(read, stats, cut)
    each = expected.dim() > 0
    close(found, cut(expected) if each else expected, "loss")
    for name in also:
        expected, found = (x + getattr(s, name).sum() for x, s in ((expected, stats), (found, read)))
    # different for every row, the same on whichever rank the row is
    weight = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64).view(expected.shape) if each else None
    expected.backward(weight)
    found.backward(None if weight is None else cut(weight))
    for name, x in own.items():
        mine = x.grad if name in rows else total_gradient(x.grad, x)
        truth = whole[name].grad
        close(mine, part(truth, rows[name][1]) if name in rows else truth, f"gradient of {name}")
