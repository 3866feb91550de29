"""Equal in value and in every gradient, and a few ways to look at a failure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def assert_equal_with_gradients(
    ours: Tensor, theirs: Tensor, leaves: Sequence[Tensor], *, tolerance: float = 1e-10
) -> None:
    """Values and the gradients of a random weighting of them, so that rows cannot hide behind one another."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} and {tuple(theirs.shape)}"
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)
    weight = torch.randn(theirs.shape, dtype=torch.float64)
    got, want = (
        torch.autograd.grad((x.double() * weight).sum(), leaves, allow_unused=True, retain_graph=True)
        for x in (ours, theirs)
    )
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), f"leaf {i}: one of the gradients is absent"
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
