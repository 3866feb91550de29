"""The ends of each row: its smallest score, and the first keys of its largest and of its smallest."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Extremes"]


class Extremes:
    """Of the tiles seen so far, which come in the order of their keys; a nan is both ends of its row, as for torch."""

    def __init__(self, like: Tensor):  # (*b, q)
        self._largest = torch.full_like(like, -torch.inf)
        self.least = torch.full_like(like, torch.inf)
        self._highest = torch.full_like(like, -1, dtype=torch.int64)
        self._lowest = self._highest

    @property
    def places(self) -> Tensor:  # (2, *b, q)
        return torch.stack([self._highest, self._lowest])

    def add(self, s: Tensor, first: int) -> None:
        """A tile of scores, -inf where not visible, whose keys begin at `first`."""
        s = s.expand(*self.least.shape, s.shape[-1])
        top, at = s.max(-1)
        better = (top > self._largest) | (top.isnan() & ~self._largest.isnan())
        self._largest = torch.where(better, top, self._largest)
        self._highest = torch.where(better, at + first, self._highest)
        low, at = torch.where(s.isneginf(), torch.inf, s).min(-1)
        better = (low < self.least) | (low.isnan() & ~self.least.isnan())
        self.least = torch.where(better, low, self.least)
        self._lowest = torch.where(better, at + first, self._lowest)
