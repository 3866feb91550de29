"""What several studies train with: one loop, and texts that come with installed packages."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

__all__ = ["descend", "reference", "verses", "warm", "windows"]


def descend(
    optimizer: torch.optim.Optimizer, steps: int, loss: Callable[[], Any], rate: Callable[[int], float] | None = None
) -> Iterator[float]:
    """Steps of the optimizer down a loss, which draws its own batch; after each step, the loss before it.

    rate: of learning, by step.
    """
    for step in range(steps):
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate(step)
        value = loss()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        yield value.item()


def warm(rate: float, steps: int) -> Callable[[int], float]:
    """A rate that rises over the first tenth of the steps and falls to 0 at their end."""
    return lambda step: rate * min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)


def windows(data: Tensor, count: int, length: int, source: torch.Generator) -> Tensor:  # (count, length)
    """Pieces of running text, drawn."""
    start = torch.randint(len(data) - length, (count, 1), generator=source)
    return data[start + torch.arange(length)]


@functools.cache
def reference() -> str:
    """The language reference that comes with Python."""
    return " ".join(topics[name] for name in sorted(topics))


@functools.cache
def verses(package: str) -> dict[int, str]:
    """The verses of one of the packages pythonbible_*, by their number."""
    book = importlib.import_module(f"{package}.plain_text_readers_bible").bible
    text, starts, ends = book.scripture_content, book.verse_start_indices, book.verse_end_indices
    return {int(i): str(text[starts[i] : ends[i]]) for i in starts}
