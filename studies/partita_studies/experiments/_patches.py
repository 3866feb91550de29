"""Handwritten digits as sixteen patches of 2 x 2 pixels, and a small encoder that reads them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.nn import MultiheadAttention, TransformerEncoderLayer

__all__ = ["PATCHES", "Reader", "patches"]

PATCHES = 16


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
            assert isinstance(layer, TransformerEncoderLayer)
            found.append(layer.norm1(tokens))  # type: ignore[operator]
            tokens = layer(tokens)
        return found
