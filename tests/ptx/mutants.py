"""Kernels with one thing wrong, made from what the compiler wrote."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["KINDS", "Mutant", "sites"]


class Mutant(NamedTuple):
    kernel: str
    kind: str
    place: int  # which of the lines that could have this mistake

    def __call__(self, name: str, ptx: str) -> str:
        """The kernel of that name with the mistake; others, and its careful form, as they are."""
        lines = ptx.splitlines()
        found = sites(ptx, self.kind) if name == self.kernel else []
        if self.place < len(found):
            at, line = found[self.place]
            lines[at] = line
        return "\n".join(lines)


# What a line looks like, and what it becomes.
KINDS = {
    "barrier dropped": [(r"bar\.sync\s+0;", "")],
    "wait dropped": [(r"cp\.async\.wait_group\s+\d+;", "")],
    "wrong mask": [
        (r"setp\.lt\.s32(\s+%p\d+, %r\d+, %r\d+;)", r"setp.le.s32\1"),
        (r"setp\.ge\.s32(\s+%p\d+, %r\d+, %r\d+;)", r"setp.gt.s32\1"),
        (r"selp\.f32(\s+%r\d+, )(%r\d+), 0fFF800000, (%p\d+);", r"selp.f32\1\2, 0f00000000, \3;"),
    ],
    "index swapped": [
        (r"(ldmatrix\S+\s+\{.*\}, \[%r\d+)(?:\+\d+)?\];", r"\1+16];"),
        (r"(mma\S+ \{.*?\}, \{) (%r\d+), (%r\d+)(.*)", r"\1 \3, \2\4"),
        (r"(ld\.shared\.\S+\s+.*\[%r\d+)(?:\+(\d+))?\];", r"\1+64];"),
        (r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 1,", r"\1, 4,"),
        (r"(mul\.lo\.s32\s+%r\d+, )(%r\d+), (%r\d+);", r"\1\2, 3;"),
    ],
    "predicate missing": [(r"@!?%p\d+ ((?:ld|st)\.global|st\.shared)", r"\1")],
}


def sites(ptx: str, kind: str) -> list[tuple[int, str]]:
    """Every line that can have this mistake, and what it becomes."""
    found = []
    for at, line in enumerate(ptx.splitlines()):
        for pattern, changed in KINDS[kind]:
            new = re.sub(pattern, changed, line)
            if new != line:
                found.append((at, new))
                break
    return found
