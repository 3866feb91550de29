"""What a rank does in a test: its part of a problem that one process can solve whole, and the comparison of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Leaf = dict[str, Tensor]


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
