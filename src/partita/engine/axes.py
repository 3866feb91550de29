"""Batch dimensions in canonical form: the same number on every tensor, of size 1 where it broadcasts.

`tail` is how many dimensions follow them: 1 for a vector over rows or keys, 2 for a matrix.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

__all__ = ["align", "cut_entries", "is_mapped", "mapped_first", "offsets", "parts", "split_heads"]

_CACHED = 4096  # entries of an offset table that is kept for the next call


def align(tensor: Tensor, n_batch: int, tail: int) -> Tensor:
    """Left-pad the batch dimensions with ones up to n_batch."""
    missing = n_batch + tail - tensor.dim()
    return tensor.view(*[1] * missing, *tensor.shape) if missing > 0 else tensor


def mapped_first(tensor: Tensor | None, dim: int | None, size: int | None = None) -> Tensor | None:
    """The dimension that vmap maps first; a tensor without one broadcasts, or is spread to `size`."""
    if tensor is None:
        return None
    if dim is not None:
        return tensor.movedim(dim, 0)
    return tensor.unsqueeze(0) if size is None else tensor.unsqueeze(0).expand(size, *tensor.shape)


def is_mapped(tensor: Tensor) -> bool:
    """Whether vmap has hidden a dimension of it, under other transforms perhaps: what holds for one holds for no if.

    While compiling this is False: a tracer cannot look, and a graph sees operators with batching rules of their own.
    """
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


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


def parts(n: int, step: int) -> list[slice]:
    """Slices of a dimension; one while tracing, where nothing can be cut by a size that is not known."""
    if torch.compiler.is_compiling():
        return [slice(0, n)]
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


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
