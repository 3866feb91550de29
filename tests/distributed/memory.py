"""How much memory a rank needs beyond its inputs, gradients included."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import partita


def _pairs(group: Any, symmetric: bool) -> Callable[[], object]:
    """8192 pairs of 512 features, 16 MB for each side: the gradients of both."""
    x, y = (torch.randn(8192 // group.size(), 512, requires_grad=True) for _ in range(2))
    options = {"normalize": False, "temperature": 8.0, "symmetric": symmetric}
    return lambda: partita.info_nce_loss(x, y, group=group, **options).backward()


def _sequence(group: Any) -> Callable[[], object]:
    """2048 positions of 32 heads, 16 MB for each of query, key and value: the output and three gradients."""
    shape = (1, 32, 2048 // group.size(), 64)
    x, upstream = [torch.randn(shape, requires_grad=True) for _ in range(3)], torch.randn(shape)

    def work() -> Tensor:
        out: Tensor = partita.attention(*x, is_causal=True, group=group)
        out.backward(upstream)
        return out

    return work


def _classes(group: Any, return_stats: bool) -> Callable[[], object]:
    """32768 classes of 256 features, 32 MB: their gradient. The 64 rows are on every rank."""
    x, y = torch.randn(64, 256, requires_grad=True), torch.arange(64)
    w = torch.randn(32768 // group.size(), 256, requires_grad=True)

    def work() -> None:
        out: Any = partita.linear_cross_entropy(x, w, y, group=group, return_stats=return_stats)
        (out[0] if return_stats else out).backward()

    return work


PROBES: dict[str, Callable[[Any], Callable[[], object]]] = {
    "contrast": lambda group: _pairs(group, False),
    "contrast, symmetric": lambda group: _pairs(group, True),
    "attention": _sequence,
    "classes": lambda group: _classes(group, False),
    "classes, statistics": lambda group: _classes(group, True),
}


def _status(field: str) -> int:
    found = re.search(field + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def peak(group: Any, probe: str) -> int:
    """Bytes by which the resident set rose above the inputs, at its highest."""
    rose = 0
    for _ in range(2):  # the first time loads libraries and gives threads their stacks
        work = PROBES[probe](group)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        kept = work()
        rose = _status("VmHWM") - before
        del kept, work
    return rose
