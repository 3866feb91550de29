"""A line in the terminal while a run goes on: the loss, the worst head, and findings as they appear.

    step 120   loss 2.413   worst head 3.5  H/log n 0.031  largest score 58.2   2 findings

With rich installed the line stays in its place; without it, it is written over where there is a terminal, and now and
then where the output goes to a file.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from typing import Any, TextIO

from partita.monitor.findings import SEVERITIES, Finding, Thresholds, find, verdicts
from partita.monitor.record import Block, Record

__all__ = ["LiveLine"]

_SHARE = 0.02  # of the time, at most, goes into looking for findings
_APART_S = 5.0  # from line to line where there is no terminal
_MARKS = {"error": "●", "warning": "◐", "info": "○"}
_COLOURS = {"error": "red", "warning": "yellow", "info": "green"}


class LiveLine:
    """A sink. `close` ends the line; `watch` calls it when it lets the model go."""

    def __init__(self, thresholds: Thresholds | None = None, stream: TextIO | None = None, rich: bool | None = None):
        self.thresholds, self.stream = thresholds, stream
        self._rich = importlib.util.find_spec("rich") is not None if rich is None else rich
        self._screen: Any = None
        self._known: dict[tuple[str, str], Finding] = {}  # by code and layer: more heads of it are no news
        self._begin = self._written = 0.0
        self._spent = 0.0
        self._last = self._shown = ""

    def __call__(self, record: Record, step: int, blocks: list[Block], losses: list[dict[str, Any]]) -> None:
        now = time.perf_counter()
        self._begin = self._begin or now
        new: list[Finding] = []
        if self._spent <= _SHARE * (now - self._begin):
            found = find(record, self.thresholds)
            worth = {(f.code, str(f.heads[0][0]) if f.heads else f.where): f for f in found if f.severity != "info"}
            new = [f for key, f in worth.items() if key not in self._known]
            self._known = worth
            self._spent += time.perf_counter() - now
        self._last = line(step, blocks, losses, list(self._known.values()))
        self._show([f"step {step}  {_MARKS[f.severity]} {f.code} {f.where}: {f.evidence}" for f in new], new)

    def close(self) -> None:
        """Leave the last line where it is."""
        if self._screen is not None:
            screen, self._screen = self._screen, None
            screen.stop()
        elif self._last:
            out = self.stream or sys.stderr
            out.write("\n" if out.isatty() else "" if self._last == self._shown else f"{self._last}\n")
            out.flush()
        self._last = self._shown = ""

    def _show(self, notes: list[str], found: list[Finding]) -> None:
        if self._rich and self._screen is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self.stream or sys.stderr, highlight=False)
            self._rich = console.is_terminal
            if self._rich:
                self._screen = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
                self._screen.start()
        if self._screen is None:
            self._plain(notes)
            return
        from rich.text import Text

        for note, finding in zip(notes, found, strict=True):
            self._screen.console.print(Text(note, style=_COLOURS[finding.severity]))
        self._screen.update(Text(self._last, overflow="ellipsis", no_wrap=True), refresh=True)

    def _plain(self, notes: list[str]) -> None:
        out = self.stream or sys.stderr
        for note in notes:
            out.write(("\r\033[K" if out.isatty() else "") + note + "\n")
        now = time.perf_counter()
        if out.isatty():
            out.write(f"\r\033[K{self._last}")
        elif not self._shown or now - self._written >= _APART_S:
            out.write(f"{self._last}\n")
            self._shown, self._written = self._last, now
        out.flush()


def line(step: int, blocks: list[Block], losses: list[dict[str, Any]], findings: list[Finding]) -> str:
    """What is worth one line: the losses of the step, and of the heads with the gravest finding the sharpest one."""
    parts = [f"step {step}"]
    for row in losses[:2]:
        value = row.get("loss")
        if isinstance(value, (int, float)):
            parts.append(f"{'loss' if len(losses) == 1 else row['name']} {value:.4g}")
    head = _worst(blocks, findings)
    if head is not None:
        layer, number, row = head
        parts.append(f"worst head {layer}.{number}")
        parts[-1] += f"  H/log n {row['normalized_entropy']:.3f}  largest score {row['max_score']:.3g}"
    if findings:
        parts.append(f"{len(findings)} finding{'s' * (len(findings) > 1)}")
    return "   ".join(parts)


def _worst(blocks: list[Block], findings: list[Finding]) -> tuple[int, int, dict[str, float]] | None:
    rows = {(b.layer, h): b.row(h) for b in blocks for h in range(b.heads)}
    if not rows:
        return None
    judged = {where: SEVERITIES.index(found[0].severity) for where, found in verdicts(findings).items()}

    def badness(where: tuple[int, int]) -> tuple[int, float]:
        share = rows[where]["normalized_entropy"]
        return -judged.get(where, 0), share if math.isfinite(share) else math.inf

    worst = min(rows, key=badness)
    return (*worst, rows[worst])
