"""How much memory a rank needs beyond its inputs, gradients included."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from benchmarks.held import Work, classes, pairs, sequence
from benchmarks.peak import peak_of

# 16 MB for each side of the contrast and for each of query, key and value; 32 MB of classes
PROBES: dict[str, Callable[[Any], Work]] = {
    "contrast": lambda group: pairs(group, 8192 // group.size(), 512, symmetric=False),
    "contrast, symmetric": lambda group: pairs(group, 8192 // group.size(), 512, symmetric=True),
    "attention": lambda group: sequence(group, 2048 // group.size()),
    "classes": lambda group: classes(group, 64, 32768 // group.size(), 256, return_stats=False),
    "classes, statistics": lambda group: classes(group, 64, 32768 // group.size(), 256, return_stats=True),
}


def peak(group: Any, probe: str) -> int:
    """Bytes by which the resident set rose above the inputs, at its highest."""
    rose = 0
    for _ in range(2):  # the first time loads libraries and gives threads their stacks
        work = PROBES[probe](group)
        gc.collect()
        rose, _ = peak_of(work)
        del work
    return rose
