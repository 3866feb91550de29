"""The 1,797 handwritten digits of scikit-learn, a small network on them, and what held-out rows say of it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita import metrics
from partita.losses import LossStats, cross_entropy

__all__ = ["NEEDS", "Split", "fit", "network", "read_out", "split"]

NEEDS = ("sklearn",)


class Split(NamedTuple):
    """1,000 rows to train on, 400 to tune with, 397 to judge by; pixels between 0 and 1."""

    x: Tensor
    y: Tensor
    x_tune: Tensor
    y_tune: Tensor
    x_test: Tensor
    y_test: Tensor


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    found = importlib.import_module("sklearn.datasets").load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def split(seed: int) -> Split:
    """Another seed, other rows to train on."""
    x, y = _digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    parts = order[:1000], order[1000:1400], order[1400:]
    return Split(*(t for part in parts for t in (x[part], y[part])))


def network(seed: int, width: int = 64) -> nn.Sequential:
    """One hidden layer; the seed gives the start."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def fit(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[..., Any],  # logits and labels to a scalar
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Full-batch steps (Adam, 0.01, unless told otherwise); the loss before each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if optimizer is None else optimizer
    seen = []
    for _ in range(steps):
        value = loss(model(x), y)
        assert isinstance(value, Tensor)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seen.append(value.item())
    return seen


@torch.no_grad()
def read_out(model: nn.Module, x: Tensor, y: Tensor) -> tuple[dict[str, float], LossStats]:
    """Accuracy, surprise, confidence, entropy and calibration error of the rows, and all their statistics."""
    _, stats = cross_entropy(model(x), y, return_stats=True)
    assert isinstance(stats, LossStats)
    return {
        "accuracy": metrics.top_k_accuracy(stats).item(),
        "nll": stats.nll.mean().item(),
        "confidence": stats.confidence.mean().item(),
        "entropy": stats.entropy.mean().item(),
        "calibration_error": metrics.expected_calibration_error(stats).item(),
    }, stats
