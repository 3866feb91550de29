"""Batch dimensions in canonical form: as many on every tensor, of size 1 where it broadcasts.

`tail` is how many dimensions follow them: 1 for a vector over rows or keys, 2 for a matrix.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["align", "cut_entries", "split_heads"]


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
