"""How large the tiles of a kernel are, and on how many warps they run."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["INTERPRETER", "Tile", "tile"]

INTERPRETER = "interpreter"  # the target where kernels run in Python, on the CPU


class Tile(NamedTuple):
    """Rows and keys of a tile, and how a GPU runs it."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile(kind: str, dim: int, dtype: torch.dtype, level: int, target: str) -> Tile:
    """The tile of a kernel.

    kind: forward, decode, backward_rows, backward_keys, backward_pairs. dim: the larger of the padded key and value
    dimensions. level: 0 output, 1 entropy, 2 variance. target: sm_80, sm_90, sm_100, gfx942, ... or interpreter.
    """
    if target == INTERPRETER:
        return Tile(16 if kind == "decode" else 32, 32, 1, 1)  # small: its problems are
    if kind == "decode":
        return Tile(16, 64, 4, 2)
    wide = dim > 128 or dtype == torch.float32
    if kind == "forward":
        return Tile(64, 32, 4, 2) if wide else Tile(128, 64, 8, 2)
    return Tile(32, 32, 4, 1) if wide else Tile(64, 64, 8, 2)
