"""Batch dimensions in canonical form: as many on every tensor, of size 1 where it broadcasts.

`tail` is how many dimensions follow them: 1 for a vector over rows or keys, 2 for a matrix.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

__all__ = ["Sides", "align", "cut_entries", "offsets", "split_heads"]

_CACHED = 4096  # entries of an offset table that is kept for the next call


class Sides:
    """Abstract: whatever holds queries (..., n_query, dim) and keys (..., n_key, dim)."""

    query: Tensor
    key: Tensor

    @property
    def n_query(self) -> int:
        return self.query.shape[-2]

    @property
    def n_key(self) -> int:
        return self.key.shape[-2]


def align(tensor: Tensor, n_batch: int, tail: int) -> Tensor:
    """Left-pad the batch dimensions with ones up to n_batch."""
    missing = n_batch + tail - tensor.dim()
    return tensor.view(*[1] * missing, *tensor.shape) if missing > 0 else tensor


def split_heads(tensor: Tensor, tail: int, groups: int) -> Tensor:
    """The last batch dimension, of size heads (or 1), as (key heads, groups) (or (1, 1))."""
    at = tensor.dim() - tail - 1
    heads = tensor.shape[at]
    out: Tensor = tensor.unflatten(at, (1, 1) if heads == 1 else (heads // groups, groups))
    return out


def cut_entries(tensor: Tensor, axis: int, entries: slice) -> Tensor:
    """Some entries of one batch dimension, as a view; a tensor of size 1 there serves all."""
    if entries == slice(None) or tensor.shape[axis] == 1:
        return tensor
    return tensor.narrow(axis, entries.start, entries.stop - entries.start)


def offsets(batch: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Where each batch entry of an operand starts, in elements: int64 of length B, 0 steps where it broadcasts."""
    return (_kept_offsets if math.prod(batch) <= _CACHED else _offsets)(batch, shape, strides)


def _offsets(batch: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    cpu = torch.device("cpu")  # named: a default device is not ours to follow
    with torch.inference_mode(False):
        table = torch.zeros(batch, dtype=torch.int64, device=cpu)
        for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
            if size > 1:
                steps = torch.arange(size, dtype=torch.int64, device=cpu) * stride
                table += steps.view([-1 if i == dim else 1 for i in range(len(batch))])
        return table.reshape(-1).contiguous()


_kept_offsets = functools.lru_cache(maxsize=256)(_offsets)  # at most 8 MB
