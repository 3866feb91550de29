"""The demonstration: a real encoder watched, a small language model trained three ways, a few experiments, two pages.

What is finished is on disk before the next part starts: Ctrl-C ends the run, and the pages show what there is.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from partita.cli import FINE, INTERRUPTED, UsageError
from partita.monitor import Record
from partita.monitor.findings import Finding, find
from partita.monitor.report.studies import KIND, gather
from partita_theory import lab, study
from partita_theory.demo_encoder import load_text, watch_encoder
from partita_theory.demo_model import Sizes, train_policies

# experiments of a few seconds each, the most telling first
STUDIES = (
    *("infonce_gradients", "head_entropy", "positions", "condensation"),
    *("spectra", "entropy_floor", "loss_geometry", "lipschitz"),
)
MINUTES = 2.75  # of training, at most
QUIET = 8.0  # seconds without output, after which it prints what it is doing
SMALL = Sizes(replace(Sizes.plan, length=32, batch=2, steps=6), lengths=(32, 64), every=1)


class Progress:
    """A line per stage, a moving one in terminals, and a line whenever nothing was printed for a while."""

    def __init__(self) -> None:
        self.start = self.said = time.perf_counter()
        self.out = sys.stderr  # `sys.stderr` is redirected while a study runs
        self.live = self.out.isatty()
        self.doing = "starting"
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Progress:
        self._pulse.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._pulse.join()

    def _beat(self) -> None:
        while not self._over.wait(QUIET / 8):
            if time.perf_counter() - self.said > QUIET:
                self.stage(f"still at it: {self.doing}")

    def begin(self, text: str) -> None:
        """What comes now, printed before it is done."""
        self.doing = text
        self.stage(text)

    def stage(self, text: str) -> None:
        """What was done."""
        self.said = time.perf_counter()
        clear = "\r\033[K" if self.live else ""
        print(f"{clear}[{self.said - self.start:5.1f} s] {text}", file=self.out, flush=True)

    def tick(self, text: str) -> None:
        self.doing = text
        if self.live:
            self.said = time.perf_counter()
            print(f"\r\033[K          {text}", end="", file=self.out, flush=True)


class _Lines(io.TextIOBase):
    """A stream that shows the last line written to it as progress."""

    def __init__(self, tick: Callable[[str], None]) -> None:
        self.tick = tick

    def write(self, text: str) -> int:
        if text.strip():
            self.tick(text.strip().splitlines()[-1])
        return len(text)


def demo(out: Path, *, minutes: float = MINUTES, seed: int = 0, quick: bool = False) -> int:
    """Write out/report.html, out/training.html and out/lab.html, and the records and rows behind them."""
    threads = torch.get_num_threads()
    # Models this small gain little from a second thread, and wait many times their work for it where a core is busy.
    torch.set_num_threads(1)
    try:
        with Progress() as progress:
            return _demo(out, progress, minutes=minutes, seed=seed, quick=quick)
    finally:
        torch.set_num_threads(threads)


def _demo(out: Path, progress: Progress, *, minutes: float, seed: int, quick: bool) -> int:
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    lab.write(out / "lab.html")
    encoder, trained = Record(), []
    interrupted = False
    try:
        progress.begin("reading the text")
        text, pairs = load_text(progress)
        progress.begin("loading the encoder and watching it read")
        encoder = watch_encoder(text, pairs, progress, quick=quick)
        encoder.save(out / "encoder.jsonl")
        sizes = SMALL if quick else Sizes()
        progress.begin(f"training a small language model three ways, {minutes:g} minutes at most")
        for record in train_policies(text, sizes, minutes=minutes, seed=seed, progress=progress):
            trained.append(record)
            record.save(out / f"training-{len(trained)}.jsonl")
        run_studies(out / "studies", progress, quick=quick)
    except KeyboardInterrupt:
        interrupted = True
        progress.stage("interrupted; writing what is finished")
    experiments = gather(out / "studies", ("tiny",) if quick else ("quick",))
    experiments.sort(key=lambda r: STUDIES.index(r["name"]) if r["name"] in STUDIES else len(STUDIES))
    policies = [row for record in trained for row in record.studies]
    encoder.studies = [*policies, *experiments]
    write_pages(out, encoder, trained)
    if encoder.sites:
        encoder.save(out / "encoder.jsonl")  # once more, with the studies: `partita report` makes the same page of it
    progress.stage("pages written")
    print(f"report:   {out / 'report.html'}")
    if trained:
        print(f"training: {out / 'training.html'}")
    print(f"lab:      {out / 'lab.html'}")
    for line in interesting(find(encoder), policies, experiments):
        print(f"- {line}")
    return INTERRUPTED if interrupted else FINE


def run_studies(folder: Path, progress: Progress, *, quick: bool) -> None:
    """The chosen experiments, one after the other; what an earlier run finished is not repeated."""
    size = "tiny" if quick else "quick"
    for name in STUDIES[:2] if quick else STUDIES:
        progress.begin(f"study {name}")
        started, said = time.perf_counter(), io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(_Lines(progress.tick)):
                study.main(["run", name, "--size", size, "--out", str(folder)])
        except UsageError as error:  # another run writes there: the page shows what is finished
            progress.stage(f"study {name}: {error}")
            continue
        first = said.getvalue().partition("\n")[0]
        progress.stage(f"study {_short(first, 110)} ({time.perf_counter() - started:.0f} s)")


def write_pages(out: Path, encoder: Record, trained: list[Record]) -> None:
    links = {"softmax lab": "lab.html", **({"training run": "training.html"} if trained else {})}
    if encoder.sites or not trained:
        encoder.report(out / "report.html", links=links)
    if trained:
        first, other = trained[0], trained[1] if len(trained) > 1 else None
        own, first.studies = first.studies, encoder.studies
        if not encoder.sites:
            first.report(out / "report.html", links=links)
        # the experiments stand on one page
        first.studies = [row for row in encoder.studies if row.get("study") != KIND]
        first.report(out / "training.html", other, links={"softmax lab": "lab.html", "encoder": "report.html"})
        first.studies = own


def interesting(
    findings: list[Finding], policies: list[dict[str, Any]], experiments: list[dict[str, Any]]
) -> list[str]:
    """Three lines: how the policies fared, what an experiment found, what the encoder does."""
    worth = [_policies(policies)] if policies else []
    told = [f"{r['question']} The expected answer {r['answer']}: {_short(r['evidence'], 320)}" for r in experiments]
    worth += told[:1]
    seen: set[str] = set()
    for finding in sorted(findings, key=lambda f: f.code in ("SINK_HEAD", "COVERAGE")):
        if finding.code not in seen:
            seen.add(finding.code)
            worth.append(f"{finding.where}: {finding.evidence} ({finding.code})")
    return [*worth, *told[1:]][:3] or ["no findings"]


def _policies(rows: list[dict[str, Any]]) -> str:
    """What happens beyond the training length, under the best and the worst policy there."""
    longest, trained_at = max(r["length"] for r in rows), rows[0]["training_length"]
    near = {r["policy"]: r for r in rows if r["length"] == trained_at}
    far = sorted((r for r in rows if r["length"] == longest), key=lambda r: float(r["loss"]))

    def said(row: dict[str, Any]) -> str:
        start = f"{near[row['policy']]['loss']:.3f} to " if row["policy"] in near else ""
        return f"{start}{row['loss']:.3f} under {row['policy']} (width {row['width']:.1f} keys)"

    shown = far[:1] + far[1:][-1:]
    where = f"a language model trained at length {trained_at} and read at {longest}: nats per byte go from "
    return where + ", ".join(said(row) for row in shown) + "; one seed"


def _short(text: str, most: int) -> str:
    """Whole words up to `most` characters.

    >>> _short("one two three", 8)
    'one two ...'
    """
    if len(text) <= most:
        return text
    return text[: most + 1].rpartition(" ")[0].rstrip(" ,;:") + " ..."
