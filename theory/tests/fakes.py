"""Small experiments for tests of the studies; `python fakes.py ARGV` is `partita study ARGV` with them."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from partita.cli import main
from partita_theory import experiments
from partita_theory.experiment import Experiment, Size, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, points
from partita_theory.verdict import Verdict


def measure(seed: int, n: int) -> Iterator[Row]:
    """Random numbers of the cell; each call leaves a line in the file LOG names, and takes as long as PAUSE says."""
    if log := os.environ.get("LOG"):
        with Path(log).open("a") as file:
            file.write(f"{n} {seed}\n")
    time.sleep(float(os.environ.get("PAUSE", "0")))
    source = torch.Generator().manual_seed(1000 * n + seed)
    for k in range(3):
        value = float(torch.randn((), generator=source))
        yield {"k": k, "value": value, "odd": math.nan if k else math.inf}


def judge(rows: list[Row]) -> Verdict:
    mean = sum(row["value"] for row in rows) / len(rows)
    return Verdict("holds" if mean > -9 else "does not hold", f"mean {mean:.3f} over {len(rows)} rows")


def panels(rows: list[Row]) -> list[Panel]:
    return [Panel("values", "n", "value", [points(rows, "value", "n", "value")])]


def broken(seed: int, n: int) -> Iterator[Row]:
    if seed == 1:
        raise ArithmeticError("the second cell breaks")
    yield from measure(seed, n)


SIZES = {name: Size(grid(n=[4, 8, 16]), seeds=2, seconds=2.0) for name in ("tiny", "quick", "full")}


def experiment(name: str, **change: Any) -> Experiment:
    given = {"measure": measure, "judge": judge, "panels": panels, "sizes": SIZES, "ids": ("M-GIB-1",)}
    return Experiment(name, **{"question": "Are they random?", "expected": "they are", **given, **change})


FAKES = {
    "sound": experiment("sound"),
    "broken": experiment("broken", measure=broken),
    "lacking": experiment("lacking", needs=("torch", "no_such_package", "sklearn_of_another_world")),
    "last": experiment("last"),
}


def names() -> list[str]:
    return list(FAKES)


def find(name: str) -> Experiment:
    return FAKES[name]


if __name__ == "__main__":
    experiments.names, experiments.find = names, find
    sys.exit(main(["study", *sys.argv[1:]]))
