"""A roofline on paper: how long each unit of a GPU is busy with one tile, by instructions counted in the binary.

    matrix     2 rows keys D operations per product, over what the tensor cores do in a clock
    exp        MUFU.EX2 of the loop, over 16 a clock
    float      additions, products, comparisons, selections, conversions of the loop, over the float32 lanes
    issue      every instruction of the loop, over 128 threads' a clock (four schedulers, 32 threads each)
    uncached   what the tile reads, over the memory's bytes a clock, as if no cache held it. It bounds nothing while the
               keys of a head fit into the second-level cache, which they do: 2 MB for 4096 keys of 128 features

The longest of the first four bounds the kernel: `matrix / longest` is the share of the peak it would reach if all units
worked side by side; the lower number is the share if products waited for everything else. Nothing here was timed on a
device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "explain" / "gpu.md"
MARKED = re.compile(r"(<!-- roofline -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN = {"dim": (64, 128), "level": (0, 2)}  # on the page
PRODUCTS = {"forward": 2, "backward_rows": 3, "backward_keys": 4}  # of a tile, of D features each


@dataclass(frozen=True)
class Chip:
    """What one multiprocessor does in a clock."""

    name: str
    target: str
    clock_hz: float
    processors: int
    matrix: float  # operations on 16-bit factors
    floats: float  # float32 lanes
    memory: float  # bytes per second, of the whole chip
    exponentials: float = 16.0
    issue: float = 128.0

    @property
    def bytes(self) -> float:
        return self.memory / self.processors / self.clock_hz


# From the vendor's white papers: A100 80 GB SXM and H100 SXM5, dense, at the boost clock their peak is given for.
CHIPS = (
    Chip("A100", "sm_80", 1.41e9, 108, 2048.0, 64.0, 2.039e12),
    Chip("H100", "sm_90", 1.83e9, 132, 4096.0, 128.0, 3.35e12),
)


@dataclass(frozen=True)
class Bound:
    """Clocks of one multiprocessor for one tile, unit by unit."""

    kernel: str
    level: int
    dim: int
    chip: str
    tile: str
    clocks: dict[str, float]

    uncached: float

    @property
    def bounding(self) -> str:
        return max(self.clocks, key=lambda unit: self.clocks[unit])

    @property
    def side_by_side(self) -> float:
        return self.clocks["matrix"] / max(self.clocks.values())

    @property
    def one_by_one(self) -> float:
        # the other units overlap by construction: what one executes is also issued
        matrix, *others = self.clocks.values()
        return matrix / (matrix + max(others))


def bound(record: dict[str, Any], chip: Chip) -> Bound:
    """Of one record of the resource table."""
    rows, keys, threads = record["rows"], record["keys"], 32 * record["warps"]
    dim, loop = record["dim"], record["loop"]
    clocks = {
        "matrix": 2.0 * PRODUCTS[record["kernel"]] * rows * keys * dim / chip.matrix,
        "exp": loop["exponentials"] * threads / chip.exponentials,
        "float": loop["floats"] * threads / chip.floats,
        "issue": loop["all"] * threads / chip.issue,
    }
    # keys and values; the backward of the keys reads queries and upstream gradients
    read = (rows if record["kernel"] == "backward_keys" else keys) * 2 * record["itemsize"]
    tile = f"{rows} x {keys}, {record['warps']}"
    return Bound(record["kernel"], record["level"], dim, chip.name, tile, clocks, read * dim / chip.bytes)


def bounds(records: Iterable[dict[str, Any]]) -> list[Bound]:
    """Of every kernel with products on 16-bit factors, chip by chip."""
    plain = [r for r in records if r["kind"] in ("forward", "backward") and not r["asks"]]
    wanted = [r for r in plain if r["kernel"] in PRODUCTS and r["dtype"] == "bfloat16" and r["loop"]]
    wanted.sort(key=lambda r: (list(PRODUCTS).index(r["kernel"]), r["dim"], r["level"]))
    return [bound(r, chip) for chip in CHIPS for r in wanted if r["device"] == chip.target]


def table(found: Iterable[Bound]) -> str:
    """Markdown; clocks per 1000 scores, so that tiles of different sizes can be compared."""
    lines = [
        "| chip | kernel | D | level | tile, warps | matrix | exp | float | issue | uncached | bound | share of peak |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for b in found:
        rows, keys = (int(x) for x in b.tile.split(",")[0].split(" x "))
        per = " | ".join(f"{1000 * c / rows / keys:.0f}" for c in (*b.clocks.values(), b.uncached))
        lines.append(
            f"| {b.chip} | {b.kernel} | {b.dim} | {b.level} | {b.tile} | {per} | {b.bounding} "
            f"| {b.one_by_one:.0%} to {b.side_by_side:.0%} |"
        )
    return "\n".join(lines) + "\n"


def with_roofline(page: str, records: Iterable[dict[str, Any]]) -> str:
    """The page with its marked table made anew."""
    shown = [b for b in bounds(records) if b.dim in SHOWN["dim"] and b.level in SHOWN["level"]]
    return MARKED.sub(lambda m: m.group(1) + "\n" + table(shown) + "\n" + m.group(2), page)
