"""Memory for a large matrix that lives only within a call, kept for the next call.

Taken from the system anew each time, its pages would be cleared and mapped again, which is 4 % of a cross entropy over
a large vocabulary. One such memory is kept by the process, of at most KEPT bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

KEPT = 64 << 20
_LINE = 64  # bytes of a cache line
_spare: list[Tensor] = []  # empty or one; `pop` and `append` are atomic, so no two calls share it


@contextmanager
def workspace(rows: int, columns: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """An uninitialised (rows, columns) matrix; its rows lie an odd number of cache lines apart.

    With rows a power of two apart, all of a column would fall on the same few cache sets.

    >>> with workspace(2, 3, torch.float32) as matrix:
    ...     matrix.shape, matrix.stride()
    (torch.Size([2, 3]), (16, 1))
    """
    line = _LINE // dtype.itemsize
    apart = line * ((columns + line - 1) // line | 1)
    size = rows * apart * dtype.itemsize
    memory: Tensor | None = None
    with suppress(IndexError):
        memory = _spare.pop()
    if memory is None or memory.numel() < size:
        with torch.inference_mode(False):  # what is made in that mode can be written in no other
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    try:
        yield memory[:size].view(dtype).view(rows, apart)[:, :columns]
    finally:
        if not _spare and memory.numel() <= KEPT:
            _spare.append(memory)
