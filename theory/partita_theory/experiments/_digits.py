"""The 1,797 handwritten digits of scikit-learn: small networks on their pixels, and what held-out rows say of them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita import metrics
from partita.losses import LossStats, cross_entropy
from partita.nn import MultiheadAttention, TransformerEncoderLayer
from partita_theory.experiments._training import descend

__all__ = ["NEEDS", "PATCHES", "Reader", "Split", "fit", "network", "patches", "read_out", "split"]

NEEDS = ("sklearn",)
PATCHES = 16


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
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Any], steps: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:  # fmt: skip
    """Full-batch steps (Adam, 0.01, unless an optimizer is given); the loss before each."""
    return list(descend(optimizer or torch.optim.Adam(model.parameters(), lr=0.01), steps, lambda: loss(model(x), y)))


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


# ---- digits as sixteen patches of 2 x 2 pixels -----------------------------------------------------------------------


def patches(x: Tensor) -> Tensor:  # (n, 64) -> (n, 16, 4)
    """The pixels of each patch, patches row by row.

    >>> patches(torch.arange(64.0)[None])[0, :2].tolist()
    [[0.0, 1.0, 8.0, 9.0], [2.0, 3.0, 10.0, 11.0]]
    """
    return x.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, PATCHES, 4)


class Reader(nn.Module):
    """Patches with learned positions, layers of attention (norms first), their mean, ten classes."""

    causal = False

    def __init__(self, width: int, heads: int, layers: int, scale: float | None = None) -> None:
        super().__init__()
        self.patch, self.position = nn.Linear(4, width), nn.Parameter(torch.randn(PATCHES, width))
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(width, heads, width, 0.0, "gelu", batch_first=True, norm_first=True, scale=scale)
            for _ in range(layers)
        )
        self.classes = nn.Linear(width, 10)

    def attention(self, layer: int = 0) -> MultiheadAttention:
        found = self.layers[layer].self_attn
        assert isinstance(found, MultiheadAttention)
        return found

    def forward(self, x: Tensor) -> Tensor:  # (n, 64) -> (n, 10)
        """Logits."""
        tokens = self.patch(patches(x)) + self.position
        for layer in self.layers:
            tokens = layer(tokens)
        out: Tensor = self.classes(tokens.mean(1))
        return out

    def inputs(self, x: Tensor) -> list[Tensor]:  # (n, 16, width) each
        """What each attention is given, layer by layer."""
        tokens, found = self.patch(patches(x)) + self.position, []
        for layer in self.layers:
            found.append(layer.norm1(tokens))  # type: ignore[operator]
            tokens = layer(tokens)
        return found
