"""Biases that are a rule rather than a matrix: made a block of rows at a time, never whole.

    b_ij = table[head, j - i]          (M-ATT-9)

A bias is added to scaled scores and is itself not scaled. Its effect on the entropy has no fixed sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partita.errors import ShapeError, ValueRangeError
from partita.precision import accumulation_dtype

__all__ = ["ALiBi", "Bias", "Gumbel", "RelativeBias", "alibi_slopes"]


@dataclass(frozen=True, eq=False)
class Bias:
    """Abstract: numbers added to scores that can be made for a few rows at a time; joined by + and scaled by *."""

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:  # (..., rows, n_key)
        """The bias of these rows, on the device of `like` and in its dtype, float32 at least.

        In half precision it could not tell position 256 from 257.
        """
        raise TypeError("Bias is abstract; use ALiBi(slopes) or RelativeBias(table).")

    def dense(self, n_query: int, n_key: int, like: Tensor) -> Tensor:  # (..., n_query, n_key)
        """The whole matrix, for small sizes and for looking at."""
        return self.rows(slice(0, n_query), n_query, n_key, like)

    def __add__(self, other: Bias) -> Bias:
        return _Sum(self, other)

    def __mul__(self, factor: float) -> Bias:
        return _Times(self, factor)


@dataclass(frozen=True, eq=False)
class _Sum(Bias):
    a: Bias
    b: Bias

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        return self.a.rows(rows, n_query, n_key, like) + self.b.rows(rows, n_query, n_key, like)


@dataclass(frozen=True, eq=False)
class _Times(Bias):
    a: Bias
    factor: float

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        return self.a.rows(rows, n_query, n_key, like) * self.factor


def _offsets(rows: slice, n_query: int, n_key: int, align: str, device: torch.device) -> Tensor:  # (rows, n_key)
    """j - i, with the first query at key 0, or the last query at the last key."""
    shift = n_key - n_query if align == "bottom-right" else 0
    i = torch.arange(rows.start, rows.stop, device=device) + shift
    return torch.arange(n_key, device=device) - i[:, None]


def _check_align(align: str) -> None:
    if align not in ("top-left", "bottom-right"):
        raise ValueRangeError(f"align must be 'top-left' or 'bottom-right'; got {align!r}.")


def alibi_slopes(
    heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:  # (heads,)
    """The slopes of the ALiBi paper: 2^(-8 h / heads), and every second one of the next power of two in between.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if heads < 1:
        raise ValueRangeError(f"heads must be at least 1; got {heads}.")
    near = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / near) for h in range(near)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / near) for h in range(heads - near)]
    return torch.tensor(slopes, device=device, dtype=dtype)


@dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """A penalty linear in distance: b_ij = -slope_head * |i - j|; the slopes may learn.

    >>> ALiBi(torch.tensor([0.5])).dense(2, 3, torch.zeros(()))
    tensor([[[-0.0000, -0.5000, -1.0000],
             [-0.5000, -0.0000, -0.5000]]])
    """

    slopes: Tensor  # (heads,)
    align: str = "top-left"

    def __post_init__(self) -> None:
        _check_align(self.align)

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        dtype = accumulation_dtype(like.dtype)
        distance = _offsets(rows, n_query, n_key, self.align, like.device).abs().to(dtype)
        return -self.slopes.to(device=like.device, dtype=dtype)[..., None, None] * distance


@dataclass(frozen=True, eq=False)
class RelativeBias(Bias):
    """A learned number per head and clipped distance: b_ij = table[head, clamp(j - i, -reach, reach) + reach].

    table is (..., 2 * reach + 1); its gradient sums over the diagonals.

    >>> RelativeBias(torch.tensor([-1.0, 0.0, 1.0])).dense(2, 3, torch.zeros(()))  # reach 1: the sign of j - i
    tensor([[ 0.,  1.,  1.],
            [-1.,  0.,  1.]])
    """

    table: Tensor  # (..., 2 * reach + 1)
    align: str = "top-left"

    def __post_init__(self) -> None:
        _check_align(self.align)
        if self.table.dim() < 1 or self.table.shape[-1] % 2 == 0:
            raise ShapeError(
                f"table must end in an odd number of entries, one per distance from -reach to reach; "
                f"got {tuple(self.table.shape)}."
            )

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        reach = self.table.shape[-1] // 2
        at = _offsets(rows, n_query, n_key, self.align, like.device).clamp(-reach, reach) + reach
        return self.table.to(device=like.device, dtype=accumulation_dtype(like.dtype))[..., at]


@dataclass(frozen=True, eq=False)
class Gumbel(Bias):
    """Standard Gumbel noise, remade from its seed for any block of rows: adding it makes the argmax a sample."""

    seed: int | None  # None inside a graph, which has one block of rows and torch's own random numbers
    batch: tuple[int, ...]

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        source = None if self.seed is None else torch.Generator(like.device).manual_seed(self.seed + rows.start)
        shape, dtype = (*self.batch, rows.stop - rows.start, n_key), accumulation_dtype(like.dtype)
        waiting = torch.empty(shape, dtype=dtype, device=like.device).exponential_(generator=source)
        return -waiting.clamp(min=torch.finfo(dtype).tiny).log()
