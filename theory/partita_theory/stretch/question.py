"""The question: the same tokens at every length, in windows that do not share one; and its finished cells on disk."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.cli import UsageError

__all__ = ["Cells", "Question"]

_HIDDEN = 7  # of a masked model's span every seventh token is hidden
_TOGETHER = 8192  # tokens in a batch
_FEWEST = 8  # windows, half of which choose and half of which judge


@dataclass(frozen=True)
class Question:
    """What is asked: tokens, where the windows lie, which lengths."""

    ids: Tensor
    trained: int
    longest: int
    starts: list[int]  # of the longest passage of each window
    causal: bool

    @staticmethod
    def of(ids: Tensor, trained: int, longest: int, targets: int, causal: bool) -> Question:
        span = _span(trained)
        each = span if causal else max(1, span // _HIDDEN)
        room = len(ids) - longest
        most = 1 + room // span
        if room < 0 or most < _FEWEST:
            raise UsageError(
                f"the text has {len(ids)} tokens; {_FEWEST} windows with different tokens to score need "
                f"{longest + (_FEWEST - 1) * span}. Give a longer text, or a smaller --to."
            )
        count = max(_FEWEST, min(most, math.ceil(targets / each)))
        starts = [round(i * room / (count - 1)) for i in range(count)]
        return Question(ids, trained, longest, starts, causal)

    @property
    def lengths(self) -> list[int]:
        found = [self.trained]
        while found[-1] * 2 < self.longest:
            found.append(found[-1] * 2)
        return [*found, self.longest]

    @property
    def targets(self) -> int:
        return sum(len(self.places(k, self.longest)) for k in range(len(self.starts)))

    def passage(self, window: int, length: int) -> Tensor:
        """Text around the scored tokens: what stands before them, or as much on both sides."""
        start = self.starts[window]
        spare = self.longest - length
        cut = spare if self.causal else spare // 2
        return self.ids[start + cut : start + cut + length]

    def places(self, window: int, length: int) -> list[int]:
        """Of the scored tokens, in the passage of this length."""
        span = _span(self.trained)
        if self.causal:
            return list(range(length - span, length))
        spare = self.longest - length
        first = (self.longest - span) // 2 - spare // 2
        return list(range(first + window % min(_HIDDEN, span), first + span, _HIDDEN))

    def asked(self, windows: range, length: int) -> tuple[Tensor, list[list[int]]]:
        """Passages of some windows, and the places to score in each."""
        return torch.stack([self.passage(k, length) for k in windows]), [self.places(k, length) for k in windows]

    def batches(self, length: int) -> list[range]:
        """Windows that are read together: of as many scored tokens each, and of not too many tokens in all."""
        step, found = max(1, _TOGETHER // length), list[range]()
        for k in range(len(self.starts)):
            fits = found and len(found[-1]) < step
            alike = fits and len(self.places(found[-1][0], length)) == len(self.places(k, length))
            found[-1:] = [range(found[-1].start, k + 1)] if alike else [*found[-1:], range(k, k + 1)]
        return found


def _span(trained: int) -> int:
    return max(1, trained // 2)


class Cells:
    """Loss of every window by setting and length; the first line says of what."""

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path = path
        self.known: dict[tuple[str, int], list[float]] = {}
        if path.exists():
            self._read(about)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"about": about}, sort_keys=True) + "\n", encoding="utf-8")

    def _read(self, about: dict[str, Any]) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(_row, lines) if row is not None]
        if not rows or rows[0].get("about") != about:
            raise UsageError(
                f"{self.path} holds cells of another model, text or question. Give another --out, or remove that file."
            )
        self.known = {(row["setting"], row["length"]): row["losses"] for row in rows[1:]}
        if lines and _row(lines[-1]) is None:  # the last line was cut short: the next one must not be joined to it
            kept = [line for line in lines if _row(line) is not None]
            self.path.write_text("\n".join(kept) + "\n", encoding="utf-8")

    def add(self, setting: str, length: int, losses: list[float]) -> None:
        self.known[setting, length] = losses
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"setting": setting, "length": length, "losses": losses}) + "\n")


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
