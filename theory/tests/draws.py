"""What the tests of the mathematics draw, and how they compare."""

from __future__ import annotations

import torch
from torch import Tensor

F64 = torch.float64
close = torch.testing.assert_close


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=gen(seed), dtype=dtype)


def vector(*entries) -> Tensor:
    return torch.tensor(entries, dtype=F64)


def law(*shape, seed=0, scale=1.0) -> Tensor:
    """Rows of random weights."""
    return torch.softmax(scale * randn(*shape, seed=seed), -1)


def autograd(f, x) -> Tensor:
    """The gradient of a scalar function."""
    return torch.autograd.functional.jacobian(f, x)


def rows(n, count, seed=0):
    """Scores of random unit-variance queries and keys in 64 dimensions, one query for each draw of keys."""
    g = gen(seed)
    q = torch.randn(count, 64, generator=g)
    # Given q, the scores of Gaussian keys are Gaussian of variance |q|^2: no keys need to be drawn.
    return q.norm(dim=-1, keepdim=True) * torch.randn(count, n, generator=g)
