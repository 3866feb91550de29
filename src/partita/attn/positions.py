"""Positions that are added to, or turn, the vectors themselves.

sinusoidal   p_{i,2k} = sin(i w_k),  p_{i,2k+1} = cos(i w_k),  w_k = base^(-2k/dim)      (M-ATT-10)
rotary       the pair (x_k, x_{k + dim/2}) turned by the angle i w_k: scores then depend on i - j alone
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.errors import ShapeError
from partita.precision import finest

__all__ = ["frequencies", "rotary", "sinusoidal", "turned"]


def sinusoidal(
    n: int, dim: int, *, base: float = 10000.0, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Tensor:  # (n, dim)
    """Absolute position vectors, all of length sqrt(dim / 2); add them to embeddings before the projections.

    >>> sinusoidal(1, 4)
    tensor([[0., 1., 0., 1.]])
    """
    where = torch.arange(n, device=device)
    w = frequencies(dim, base, where.device)
    angle = where.to(w.dtype)[:, None] * w
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
    return turned(x, where, frequencies(x.shape[-1], base, x.device))


def turned(
    x: Tensor,  # (..., n, dim)
    positions: Tensor,  # broadcastable to (..., n)
    w: Tensor,  # (pairs,), 2 * pairs <= dim
    *,
    neighbours: bool = False,
) -> Tensor:  # (..., n, dim)
    """Pairs of features turned by positions times w; the features past the last pair stay as they are.

    neighbours: the pairs are (0, 1), (2, 3) and so on, instead of the two halves.
    """
    pairs = w.shape[0]
    angle = positions.to(w.dtype)[..., None] * w
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    moving, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    left, right = moving.unflatten(-1, (pairs, 2)).unbind(-1) if neighbours else moving.chunk(2, -1)
    both = left * cos - right * sin, right * cos + left * sin
    out = torch.stack(both, -1).flatten(-2) if neighbours else torch.cat(both, -1)
    return out if rest.shape[-1] == 0 else torch.cat([out, rest], -1)


def frequencies(dim: int, base: float, device: torch.device) -> Tensor:  # (dim / 2,)
    """base^(-2k/dim), in float64 where there is one.

    A float32 angle at position 100,000 is wrong in the second digit of its sine.
    """
    if dim < 2 or dim % 2:
        raise ShapeError(f"positions need an even dim of at least 2; got {dim}.")
    return base ** (-torch.arange(0, dim, 2, device=device, dtype=finest(device)) / dim)
