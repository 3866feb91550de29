"""Normalisations of a vector, with the epsilon without which a constant one is 0/0; neither knows the length n."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import Number, number

__all__ = ["layer_norm", "qk_norm_width", "rms_norm"]


def layer_norm(x: Tensor, eps: float = 1e-5) -> Tensor:  # (..., dim)
    """Subtract the mean, divide by the standard deviation; the result has length close to sqrt(dim).

        (x - mean) / sqrt(var + eps),       var divided by dim, not dim - 1

    Equal to ``F.layer_norm(x, x.shape[-1:], eps=eps)``. A constant vector gives 0. Spec: M-RMK-2.
    From Ba, Kiros and Hinton (2016), Layer normalization.

    >>> layer_norm(torch.full((4,), 3.0))
    tensor([0., 0., 0., 0.])
    """
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:  # (..., dim)
    """Divide by the root mean square.

        x / sqrt(mean(x^2) + eps)

    Equal to ``F.rms_norm(x, x.shape[-1:], eps=eps)``. The zero vector gives 0. Spec: M-RMK-2.
    From Zhang and Sennrich (2019), Root mean square layer normalization.

    >>> rms_norm(torch.zeros(3))
    tensor([0., 0., 0.])
    """
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def qk_norm_width(dim: Number, scale: Number) -> Tensor:
    """The interval in which logits lie when query and key are normalised to length sqrt(dim).

        |s| <= dim,    width = 2 * scale * dim

    Feed it to `information.max_weight` and `information.entropy_floor_of_width`. Spec: M-RMK-2, M-SCL-18.
    From Henry, Dachapally, Pawar and Chen (2020), Query-key normalization for transformers.

    >>> qk_norm_width(64, 0.125).item()  # 1/sqrt(dim): 2 sqrt(dim)
    16.0
    """
    return 2 * number(scale) * number(dim)
