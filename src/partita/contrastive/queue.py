"""Keys of earlier batches, kept as negatives for the next ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize as to_unit

from partita import _checks
from partita.errors import ShapeError

__all__ = ["Queue"]


class Queue(nn.Module):
    """The last `size` keys, first in, first out; buffers, so that it moves and is saved with a model.

    Keys are kept without gradient. With `normalize` they are kept as unit vectors.

    >>> queue = Queue(size=3, dim=2)
    >>> queue.push(torch.eye(2))
    >>> len(queue), tuple(queue.keys.shape)
    (2, (2, 2))
    """

    _store: Tensor
    _labels: Tensor
    _filled: Tensor
    _next: Tensor

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        labelled: bool = False,
        normalize: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        for name, number in (("size", size), ("dim", dim)):
            _checks.check_whole(name, number, least=1)
        self.size, self.dim, self.labelled, self.normalize = size, dim, labelled, normalize
        self.register_buffer("_store", torch.zeros(size, dim, dtype=dtype, device=device))
        self.register_buffer("_labels", torch.zeros(size, dtype=torch.int64, device=device))
        self.register_buffer("_filled", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("_next", torch.zeros((), dtype=torch.int64, device=device))

    def __len__(self) -> int:
        return int(self._filled)

    def slots(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Keys, their labels if it keeps them, and which of them are in use: None means all.

        A graph, and a device whose numbers are not read, have no size that depends on how many there are: they take
        every slot, and a mask.
        """
        if self._store.is_cpu and not torch.compiler.is_compiling():
            return self.keys, self.labels, None
        used = torch.arange(self.size, device=self._store.device) < self._filled
        return self._store.clone(), self._labels.clone() if self.labelled else None, used

    @property
    def keys(self) -> Tensor:  # (len, dim)
        """What is in the queue, without gradient; a copy, so that a later push spoils no graph."""
        return self._store[: len(self)].clone()

    @property
    def labels(self) -> Tensor | None:  # (len,)
        """Labels of the keys, if the queue keeps them."""
        return self._labels[: len(self)].clone() if self.labelled else None

    @torch.no_grad()
    def push(self, keys: Tensor, labels: Tensor | None = None) -> None:
        """Put keys in; the oldest fall out."""
        _checks.check_float("keys", keys)
        if keys.dim() != 2 or keys.shape[-1] != self.dim:
            raise ShapeError(f"keys must have shape (n, {self.dim}); got {_checks.shape_text(keys)}.")
        if keys.is_meta:
            _checks.check_device(("the queue", "keys"), (self._store, keys))
        if (labels is None) == self.labelled or (labels is not None and labels.shape != keys.shape[:1]):
            raise ShapeError("a labelled queue takes one label per key, a plain one none.")
        keys = keys[-self.size :]
        slots = (self._next + torch.arange(len(keys), device=self._store.device)) % self.size
        self._store[slots] = (to_unit(keys, dim=-1) if self.normalize else keys).to(self._store)
        if labels is not None:
            self._labels[slots] = labels[-self.size :].to(self._labels)
        self._next.copy_((self._next + len(keys)) % self.size)
        self._filled.copy_((self._filled + len(keys)).clamp(max=self.size))

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, filled={len(self)}"
