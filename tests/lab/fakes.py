"""Small experiments for tests of the studies; `python -m tests.lab.fakes ARGV` is `partita study ARGV` with them."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from partita.lab.cli import main
from partita.lab.figure import Figure, Line, Panel
from partita_studies import experiments
from partita_studies.experiment import Experiment, Row, Size, Verdict, grid


def run(settings: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Random numbers of the cell; each call leaves a line in the file LOG names, and takes as long as PAUSE says."""
    if log := os.environ.get("LOG"):
        with Path(log).open("a") as file:
            file.write(f"{settings['n']} {seed}\n")
    time.sleep(float(os.environ.get("PAUSE", "0")))
    source = torch.Generator().manual_seed(1000 * settings["n"] + seed)
    for k in range(3):
        value = float(torch.randn((), generator=source))
        yield {"n": settings["n"], "seed": seed, "k": k, "value": value, "odd": math.nan if k else math.inf}


def judge(rows: list[Row]) -> Verdict:
    mean = sum(row["value"] for row in rows) / len(rows)
    return Verdict("holds" if mean > -9 else "does not hold", f"mean {mean:.3f} over {len(rows)} rows")


def figure(rows: list[Row]) -> Figure:
    line = Line("value", [r["n"] for r in rows], [r["value"] for r in rows], kind="points")
    return Figure("Are they random?", [Panel("values", "n", "value", [line])], f"{len(rows)} rows")


def broken(settings: Mapping[str, Any], seed: int) -> Iterator[Row]:
    if seed == 1:
        raise ArithmeticError("the second cell breaks")
    yield from run(settings, seed)


SIZES = {name: Size(grid(n=[4, 8, 16]), seeds=2, seconds=2.0) for name in ("tiny", "quick", "full")}


def experiment(name: str, **change: Any) -> Experiment:
    given = {
        "question": "Are they random?",
        "expected": "they are",
        "ids": ("M-GIB-1",),
        "sizes": SIZES,
        "run": run,
        "judge": judge,
        "figure": figure,
    }
    return Experiment(name=name, **{**given, **change})


FAKES = {
    "sound": experiment("sound"),
    "broken": experiment("broken", run=broken),
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
