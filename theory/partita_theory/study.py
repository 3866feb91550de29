"""partita study list | run NAME... | show NAME: put the experiments to the machine, resume, read what came out.

Every finished cell is on disk before the next starts (see `store`), so a run that was stopped goes on where it was.
Next to the rows lie the figure of each experiment and verdicts.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import partita
from partita.cli import FINE, FOUND, UsageError
from partita.cli.doctor import OPTIONAL
from partita.monitor.files import replace_file
from partita_theory import experiments
from partita_theory.experiment import SIZES, Cell, Experiment
from partita_theory.figure import png, svg
from partita_theory.store import BusyError, Store, locked
from partita_theory.verdict import Verdict

__all__ = ["main"]

INSTALL = {"sklearn": "scikit-learn", "PIL": "pillow", "pytorch_metric_learning": "pytorch-metric-learning"}


def main(argv: Sequence[str]) -> int:
    """Run `partita study ARGV` and give its exit code: 0, or 1 if an experiment raised."""
    options = build().parse_args(list(argv))
    code: int = options.run(options)
    sys.stdout.flush()
    return code


def build() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partita study", description="Put the statements of the theory to the test.")
    commands = parser.add_subparsers(dest="command", metavar="list | run | show", required=True)
    commands.add_parser("list", help="every experiment and its question").set_defaults(run=_list)
    run = commands.add_parser("run", help="run experiments; what is finished is never repeated")
    run.add_argument("names", nargs="+", metavar="NAME", help="experiments by name, or all")
    run.add_argument("--size", choices=SIZES, default="quick", help="how large (quick)")
    run.add_argument("--seeds", type=int, metavar="N", help="seeds per setting (default: as the size says)")
    run.add_argument("--dry-run", action="store_true", help="print the cells still to run and the estimated time")
    run.set_defaults(run=_run)
    show = commands.add_parser("show", help="the verdict and the figure of what was run")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--size", choices=SIZES, help="default: the largest that was run")
    show.add_argument("--figure", type=Path, metavar="FILE", help="write the figure to FILE.svg or FILE.png")
    show.set_defaults(run=_show)
    for command in (run, show):
        command.add_argument("--out", type=Path, default=Path("out/studies"), metavar="DIR", help="(out/studies)")
    return parser


# ---- experiments and what they need --------------------------------------------------------------------------------


def _known(asked: Sequence[str]) -> list[str]:
    """The names asked for, each once; `all` is all of them."""
    there = experiments.names()
    if unknown := [name for name in asked if name != "all" and name not in there]:
        raise UsageError(f"no experiment is called {', '.join(unknown)}; there are {', '.join(there)}, and all.")
    return there if "all" in asked else list(dict.fromkeys(asked))


def _missing(needs: Sequence[str]) -> str:
    """What to install for these packages; empty if they are there."""
    absent = [name for name in needs if importlib.util.find_spec(name) is None]
    hints = [OPTIONAL[n][1] if n in OPTIONAL else f"pip install {INSTALL.get(n, n.replace('_', '-'))}" for n in absent]
    return f"needs {', '.join(absent)}: {' && '.join(hints)}" if absent else ""


def _find(name: str) -> tuple[Experiment | None, str]:
    """The experiment, if it loads, and what is missing to run it."""
    try:
        found = experiments.find(name)
    except ModuleNotFoundError as error:
        package = (error.name or "partita").partition(".")[0]
        if package in ("partita", "partita_theory"):
            raise
        return None, _missing([package]) or str(error)
    return found, _missing(found.needs)


def _list(options: argparse.Namespace) -> int:
    for name in experiments.names():
        found, lacking = _find(name)
        print(name)
        if found is not None:
            spent = (f"{size} {_clock(len(found.cells(size)) * found.sizes[size].seconds)}" for size in SIZES)
            more = f" and {len(found.ids) - 8} more" if len(found.ids) > 8 else ""
            print(f"    {found.question}\n    {', '.join(spent)}; {' '.join(found.ids[:8])}{more}")
        if lacking:
            print(f"    {lacking}")
    return FINE


# ---- run -----------------------------------------------------------------------------------------------------------


class Progress:
    """A bar in terminals, one line per finished cell elsewhere."""

    def __init__(self, name: str, total: int, done: int) -> None:
        self.name, self.total, self.done, self.ran = name, total, done, 0
        self.start, self.live = time.perf_counter(), sys.stderr.isatty()

    def begin(self, cell: Cell) -> None:
        if self.live:
            full = 24 * self.done // max(1, self.total)
            left = (time.perf_counter() - self.start) / self.ran * (self.total - self.done) if self.ran else None
            rest = f", about {_clock(left)} left" if left is not None else ""
            room = shutil.get_terminal_size().columns
            text = f"{self.name} [{'#' * full}{'.' * (24 - full)}] {self.done}/{self.total}{rest}  {_said(cell)}"
            print(f"\r\033[K{text[: room - 1]}", end="", file=sys.stderr, flush=True)

    def finish(self, cell: Cell, spent: float) -> None:
        self.done, self.ran = self.done + 1, self.ran + 1
        if not self.live:
            line = f"{self.name} {self.done}/{self.total}  {_said(cell)}  {spent:.1f} s"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _run(options: argparse.Namespace) -> int:
    names = _known(options.names)
    if options.seeds is not None and options.seeds < 1:
        raise UsageError(f"--seeds counts runs of each setting, so at least 1; got {options.seeds}.")
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"--out {options.out} is a file; a folder is needed.")
    if not options.dry_run:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(error) from None
    outcome: dict[str, list[str]] = {"holds": [], "holds within": [], "does not hold": [], "skipped": [], "failed": []}
    estimate, start = 0.0, time.perf_counter()
    for name in names:
        try:
            found, lacking = _find(name)
            if found is None or lacking:
                print(f"{name}: skipped, {lacking}", flush=True)
                outcome["skipped"].append(name)
            elif options.dry_run:
                estimate += _plan(found, options)
            else:
                verdict = _experiment(found, options)
                print(f"{name}: {verdict}", flush=True)
                outcome[verdict.answer].append(name)
        except BusyError as error:
            raise UsageError(str(error)) from None
        except BrokenPipeError:  # the reader has gone, which is no fault of a study
            raise
        except Exception as error:  # one that raises does not take the others with it
            if isinstance(error, OSError) and options.out in Path(str(error.filename)).parents:
                raise _unwritable(error) from None
            traceback.print_exc()
            print(f"{name}: failed, {type(error).__name__}: {error}", flush=True)
            outcome["failed"].append(name)
    counts = ", ".join(f"{len(found)} {answer}" for answer, found in outcome.items() if found)
    if options.dry_run:
        print(f"in all about {_clock(estimate)}" + (f"; {counts}" if counts else ""))
    else:
        print(f"{len(names)} asked: {counts}; {_clock(time.perf_counter() - start)}; rows and figures in {options.out}")
    return FOUND if outcome["failed"] else FINE


def _unwritable(error: OSError) -> UsageError:
    return UsageError(f"cannot write {error.filename}: {error.strerror}. Give another --out.")


def _plan(experiment: Experiment, options: argparse.Namespace) -> float:
    """Print the cells still to run; their estimated time, from finished cells where there are some."""
    plan = experiment.cells(options.size, options.seeds)
    store = Store(options.out, experiment.name, options.size)
    rest = store.missing(plan)
    each = store.seconds(plan)
    spent = len(rest) * (experiment.sizes[options.size].seconds if each is None else each)
    print(f"{experiment.name}: {len(rest)} of {len(plan)} cells to run, about {_clock(spent)}")
    for cell in rest:
        print(f"    {_said(cell)}")
    return spent


def _experiment(experiment: Experiment, options: argparse.Namespace) -> Verdict:
    """Run what is missing, then judge and draw everything."""
    import torch

    plan = experiment.cells(options.size, options.seeds)
    with Store(options.out, experiment.name, options.size) as store:
        rest = store.missing(plan)
        if len(rest) < len(plan):
            made = {store.records[cell.key]["partita"] for cell in plan if cell in store} - {partita.__version__}
            old = f", some by partita {', '.join(sorted(made))}; move {store.path} away to compute them anew"
            kept = f"{len(plan) - len(rest)} of {len(plan)} cells are on disk{old if made else ''}"
            print(f"{experiment.name}: {kept}", file=sys.stderr)
        progress = Progress(experiment.name, len(plan), len(plan) - len(rest))
        try:
            for cell in rest:
                progress.begin(cell)
                torch.manual_seed(cell.seed)
                start = time.perf_counter()
                rows = list(experiment.run(cell.settings, cell.seed))
                spent = time.perf_counter() - start
                store.add(cell, rows, elapsed_s=spent)
                progress.finish(cell, spent)
        finally:
            progress.close()
        rows = store.rows(plan)
        verdict = experiment.judge(rows)
        replace_file(store.path.with_suffix(".svg"), svg(experiment.figure(rows)))
        _remember(options.out, experiment, options.size, verdict, store, plan)
    return verdict


def _remember(out: Path, experiment: Experiment, size: str, verdict: Verdict, store: Store, plan: list[Cell]) -> None:
    """Put the verdict into verdicts.json, locked while it is read and replaced: several runs may judge at once."""
    path = out / "verdicts.json"
    said = {
        **asdict(verdict),
        "question": experiment.question,
        "expected": experiment.expected,
        "ids": list(experiment.ids),
        "cells": len(plan),
        "rows": len(store.rows(plan)),
        "partita": sorted({store.records[cell.key]["partita"] for cell in plan}),
    }
    with locked(out):
        try:
            known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            known = {}
        known.setdefault(experiment.name, {})[size] = said
        replace_file(path, json.dumps(known, indent=1, sort_keys=True, allow_nan=False) + "\n")


# ---- show ----------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    if options.name == "all":
        raise UsageError("show takes one experiment; `partita study list` names them.")
    (name,) = _known([options.name])
    kind = options.figure.suffix.lower() if options.figure else ".svg"
    if kind not in (".svg", ".png"):
        raise UsageError(f"--figure writes .svg or .png; got {options.figure}.")
    stores = {s: Store(options.out, name, s) for s in ([options.size] if options.size else reversed(SIZES))}
    size, store = next(((s, held) for s, held in stores.items() if held.records), (options.size or "quick", None))
    if store is None:
        raise UsageError(f"{options.out} holds no rows of {name}. Make some: partita study run {name} --size {size}")
    found, lacking = _find(name)
    if found is None:
        raise UsageError(f"{name} {lacking}")
    seeds = max([found.sizes[size].seeds, *(1 + int(r["seed"]) for r in store.records.values())])
    plan = found.cells(size, seeds)
    rows, done = store.rows(plan), len(plan) - len(store.missing(plan))
    if not rows:
        raise UsageError(f"the rows in {store.path} are of other settings than {name} has now. Move that file away.")
    print(f"{found.question}\n    expected: {found.expected}\n    {' '.join(found.ids)}")
    short = len(found.cells(size)) > done
    print(f"{size}: {done} of {len(plan)} cells, {len(rows)} rows{' (unfinished)' if short else ''}")
    try:
        print(found.judge(rows))
        figure = found.figure(rows)
    except Exception as error:
        why = "the run is unfinished; " if short else ""
        raise UsageError(f"these rows cannot be judged: {why}{type(error).__name__}: {error}") from error
    path = options.figure or store.path.with_suffix(".svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == ".svg":
        replace_file(path, svg(figure))
    else:
        png(figure, path)
    print(f"figure: {path}")
    return FINE


# ---- words ---------------------------------------------------------------------------------------------------------


def _said(cell: Cell) -> str:
    return " ".join([*(f"{k}={v}" for k, v in cell.settings.items()), f"seed={cell.seed}"])


def _clock(seconds: float) -> str:
    """A duration for people.

    >>> [_clock(s) for s in (0.4, 12, 200, 5400)]
    ['0.4 s', '12 s', '3.3 min', '1.5 h']
    """
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
