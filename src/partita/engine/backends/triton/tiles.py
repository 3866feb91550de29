"""How large the tiles of a kernel are, and on how many warps they run.

Chosen by what kernels need when they are compiled ahead of time (every number: tests/triton/resources.json), without a
device. The reasons, the most important first:

- It must fit: no spill up to 128 features, and shared memory that the device has (MI300: 64 KiB).
- 16 rows to a warp (sm_80), 64 to four (sm_90): eight warps on 64 rows would compute every exponential twice.
- Then the larger tile: work per row and tile is shared by more keys, and a tile of keys is read by more rows.
- Backward passes hold two sums and two products at once: 16 to 64 keys at a time over rows, 64 by 64 over keys.
- A mask, segments, a bias or a target take registers for every score: `_CROWDED`.
- float32 products are unrolled into registers at NVIDIA (tf32 would not be float32): small tiles, eight warps.

PARTITA_TRITON_AUTOTUNE=1 measures instead: the first call of each kind times the candidates, and the process keeps the
fastest; another tile rounds otherwise. It is not Triton's own autotuner, which sets arguments of a kernel: here a tile
also decides the grid, and how many programs leave a flag for the careful pass.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from partita.engine.request import Request

__all__ = ["INTERPRETER", "Key", "Tile", "autotuned", "candidates", "careful", "tabled", "tile"]

_Result = TypeVar("_Result")

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
# Where a device has no row of its own: the most similar, smaller one.
_ALIKE = {"sm_100": "sm_90", "sm_90": "sm_80", "gfx942": "sm_80"}
_OTHERS = (
    Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(128, 64, 4, 3), Tile(128, 32, 4, 3), Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(32, 32, 4, 1),
)  # fmt: skip  # to try on a device

_tuned: dict[Key, Tile] = {}
_taken: set[Key] = set()  # since it was cleared


def tile(kind: str, dim: int, dtype: torch.dtype, level: int, target: str, crowded: bool = False) -> Tile:
    """The tile of a kernel: the fastest on the device, where that was measured, or the table's.

    >>> tile("forward", 64, torch.bfloat16, 0, "sm_80")
    Tile(rows=128, keys=64, warps=8, stages=3)
    """
    key = Key(kind, dim, dtype, level, target, crowded)
    _taken.add(key)
    return _tuned.get(key) or tabled(key)


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
    return (tabled(key), *(t for t in _OTHERS if t.rows in rows and t != tabled(key)))


def autotuned(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """A pass, or its backward, that measures the candidates of its tiles before it first runs, where that is on."""

    @functools.wraps(function)
    def call(request: Request, *rest: Any) -> _Result:
        if os.environ.get("PARTITA_TRITON_AUTOTUNE", "0") == "1":
            _taken.clear()
            function(request, *rest)
            for key in _taken - _tuned.keys():
                times = {}
                for each in candidates(key):
                    _tuned[key] = each
                    # triton has errors of its own: too much shared memory, a shape that it cannot multiply
                    with contextlib.suppress(Exception):
                        times[each] = _seconds(lambda: function(request, *rest), request.query.device)
                _tuned[key] = min(times, key=times.__getitem__, default=tabled(key))
        return function(request, *rest)

    return call


_ROUNDS = 5  # of which the fastest counts; one before them compiles


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(1 + _ROUNDS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
