"""How large the tiles of a kernel are, and on how many warps they run.

Chosen by what kernels need when they are compiled ahead of time (docs/gpu-resources.md has every number), since no
device was at hand. The reasons, in the order in which they count:

- It must fit: no spill on sm_80 and sm_90 up to 128 features whatever is asked, and shared memory that the device has
  (MI300: 64 KiB).
- Rows are shared out over warps, 16 to a warp (sm_80) or 64 to four (sm_90). Eight warps on 64 rows would compute
  every exponential twice: 64 rows get 4 warps, 128 get 8. On MI300, 8 warps have half as many registers each.
- Then the larger tile: what is done once per row and tile (peaks, shrinking sums) is shared by more keys, and a tile
  of keys is read by more rows. The variance costs registers; the tiles are those that it allows.
- Backward passes hold two sums and two products at once: over rows 16 to 64 keys at a time, since a warp's 16 rows of
  query and upstream gradient already take a quarter of its registers; over keys 64 by 64 on eight warps.
- A mask, segments, a bias or a target lie beside every score: such requests have rows of their own where it matters.
- float32 products are made of ordinary multiplications at NVIDIA (tf32 would not be float32): small tiles, since all of
  it is unrolled into registers, on eight warps, and two stages: without a pipeline the compiler spills.

PARTITA_TRITON_AUTOTUNE=1 asks the device instead (`autotune`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

__all__ = ["INTERPRETER", "Key", "Tile", "candidates", "careful", "keep", "tabled", "tile", "tuning"]

INTERPRETER = "interpreter"  # the target where kernels run in Python, on the CPU


class Tile(NamedTuple):
    """Rows and keys of a tile, and how a GPU runs it."""

    rows: int
    keys: int
    warps: int
    stages: int


class Key(NamedTuple):
    """What a tile depends on."""

    kind: str  # forward, decode, backward_rows, backward_keys, backward_pairs
    dim: int  # the larger of the padded key and value dimensions
    dtype: torch.dtype
    level: int  # 0 output, 1 entropy, 2 variance
    target: str  # sm_80, sm_90, sm_100, gfx942, ... or interpreter
    crowded: bool = False  # more than intervals to look at for every score: segments, a mask, a bias, a target


# (kind, bits, target): tiles up to 64, 128 and 256 features, at every level.
_TABLE = {
    ("forward", 16, "sm_80"): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("forward", 16, "sm_90"): (Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("forward", 16, "sm_100"): (Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    ("forward", 16, "gfx942"): (Tile(128, 64, 8, 2), Tile(128, 32, 4, 2), Tile(64, 32, 4, 2)),
    ("forward", 32, "sm_80"): (Tile(64, 32, 8, 2), Tile(16, 64, 8, 2), Tile(32, 32, 8, 1)),
    ("forward", 32, "sm_90"): (Tile(64, 32, 8, 2), Tile(16, 32, 8, 2), Tile(32, 32, 8, 1)),
    ("forward", 32, "gfx942"): (Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("backward_rows", 16, "sm_80"): (Tile(128, 32, 8, 2), Tile(128, 16, 8, 2), Tile(32, 32, 4, 1)),
    ("backward_rows", 16, "sm_90"): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 32, 4, 1)),
    ("backward_rows", 16, "gfx942"): (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("backward_keys", 16, "sm_80"): (Tile(32, 64, 4, 1), Tile(64, 64, 8, 1), Tile(32, 32, 4, 1)),
    ("backward_keys", 16, "sm_90"): (Tile(64, 64, 4, 1), Tile(32, 64, 4, 1), Tile(32, 32, 4, 1)),
    ("backward_keys", 16, "gfx942"): (Tile(32, 64, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("backward_rows", 32, "sm_80"): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
    ("backward_rows", 32, "sm_90"): (Tile(32, 16, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
    ("backward_rows", 32, "gfx942"): (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("backward_keys", 32, "sm_80"): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
    ("backward_keys", 32, "gfx942"): (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("backward_pairs", 16, "sm_80"): (Tile(64, 32, 8, 1), Tile(64, 32, 8, 1), Tile(32, 32, 4, 1)),
    ("backward_pairs", 32, "sm_80"): (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    ("decode", 16, "sm_80"): (Tile(16, 64, 4, 2), Tile(16, 64, 4, 2), Tile(16, 32, 4, 2)),
    ("decode", 32, "sm_80"): (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(16, 32, 4, 1)),
}
# The same for crowded requests, where those tiles would spill.
_CROWDED = {
    ("forward", 16, "sm_80"): (Tile(128, 32, 8, 2), Tile(128, 16, 8, 2), Tile(64, 32, 8, 2)),
    ("forward", 16, "sm_90"): (Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("forward", 16, "sm_100"): (Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("forward", 32, "sm_90"): (Tile(64, 32, 8, 2), Tile(16, 64, 8, 2), Tile(32, 32, 8, 1)),
    ("backward_rows", 16, "sm_90"): (Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(32, 32, 4, 1)),
    ("backward_keys", 16, "sm_90"): (Tile(32, 64, 4, 1), Tile(16, 64, 4, 1), Tile(32, 32, 4, 1)),
}
# Where a device has no row of its own: the most alike, smaller one.
_ALIKE = {"sm_100": "sm_90", "sm_90": "sm_80", "gfx942": "sm_80"}
_BESIDE = (
    Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(128, 64, 4, 3), Tile(128, 32, 4, 3), Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(32, 32, 4, 1),
)  # fmt: skip  # to try on a device

_tuned: dict[Key, Tile] = {}
_asked: list[dict[Key, Tile]] = []


def tile(kind: str, dim: int, dtype: torch.dtype, level: int, target: str, crowded: bool = False) -> Tile:
    """The tile of a kernel: what the device was found to like, or the table's.

    >>> tile("forward", 64, torch.bfloat16, 0, "sm_80")
    Tile(rows=128, keys=64, warps=8, stages=3)
    """
    key = Key(kind, dim, dtype, level, target, crowded)
    found = _tuned.get(key) or tabled(key)
    for wanted in _asked:
        wanted[key] = found
    return found


def tabled(key: Key) -> Tile:
    """The table's tile."""
    if key.target == INTERPRETER:
        return Tile(16 if key.kind == "decode" else 32, 32, 1, 1)  # small: its problems are
    bits, target = 8 * key.dtype.itemsize, _family(key.target)
    place = 0 if key.dim <= 64 else 1 if key.dim <= 128 else 2
    while (key.kind, bits, target) not in _TABLE:
        target = _ALIKE[target]
    row = (key.kind, bits, target)
    return (_CROWDED if key.crowded and row in _CROWDED else _TABLE)[row][place]


def careful(kind: str, found: Tile, target: str) -> Tile:
    """For the pass that runs only where something is not finite, and holds more: small, and never larger than usual."""
    if target == INTERPRETER:
        return found
    keys = min(found.keys, 16 if kind == "forward" else 32)
    return Tile(min(found.rows, 32), keys, 4 if target.startswith("gfx") or found.rows < 32 else 8, 2)


def _family(target: str) -> str:
    """The architecture of the table that a device is at least as large as: sm_86 and sm_89 have less than sm_80."""
    if target.startswith("gfx"):
        return "gfx942"
    number = int(target.removeprefix("sm_") or 80)
    return "sm_100" if 100 <= number < 120 else "sm_90" if 90 <= number < 100 else "sm_80"


def candidates(key: Key) -> tuple[Tile, ...]:
    """The table's tile first, then others that a device may like better."""
    if key.target == INTERPRETER:
        return (tabled(key), Tile(16, 16, 1, 1))
    rows = (16,) if key.kind == "decode" else (32, 64, 128)
    return (tabled(key), *(t for t in _BESIDE if t.rows in rows and t != tabled(key)))


def keep(key: Key, found: Tile) -> None:
    """From now on, this is the tile."""
    _tuned[key] = found


@contextmanager
def tuning() -> Iterator[dict[Key, Tile]]:
    """Collects the tiles that are asked for inside, and were not tuned before."""
    wanted: dict[Key, Tile] = {}
    before = set(_tuned)
    _asked.append(wanted)
    try:
        yield wanted
    finally:
        _asked.remove(wanted)
        for key in before & set(wanted):
            del wanted[key]
