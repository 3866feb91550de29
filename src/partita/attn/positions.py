"""Positions that are added to, or turn, the vectors themselves.

sinusoidal   p_{i,2k} = sin(i w_k),  p_{i,2k+1} = cos(i w_k),  w_k = base^(-2k/dim)      (M-ATT-10)
rotary       the pair (x_k, x_{k + dim/2}) turned by the angle i w_k: scores then depend on i - j alone
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.errors import ShapeError
from partita.precision import finest

__all__ = ["rotary", "sinusoidal"]


def sinusoidal(
    n: int, dim: int, *, base: float = 10000.0, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Tensor:  # (n, dim)
    """Absolute position vectors, all of length sqrt(dim / 2); add them to embeddings before the projections.

    >>> sinusoidal(1, 4)
    tensor([[0., 1., 0., 1.]])
    """
    angle = _angles(torch.arange(n, device=device), dim, base)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(dtype or torch.get_default_dtype())


def rotary(
    x: Tensor,  # (..., n, dim)
    positions: Tensor | None = None,  # (..., n), default 0 to n-1
    *,
    base: float = 10000.0,
) -> Tensor:  # (..., n, dim)
    """Vectors turned by their position, halves paired as in Llama: <rotary(q)_i, rotary(k)_j> depends on i - j alone.

    >>> rotary(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # the second by one radian
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """
    where = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
    angle = _angles(where, x.shape[-1], base)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _angles(positions: Tensor, dim: int, base: float) -> Tensor:  # (..., n, dim / 2)
    """In float64 where there is one: a float32 angle at position 100,000 is wrong in the second digit of its sine."""
    if dim < 2 or dim % 2:
        raise ShapeError(f"positions need an even dim of at least 2; got {dim}.")
    wide = finest(positions.device)
    w = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=wide) / dim)
    return positions.to(wide)[..., None] * w
