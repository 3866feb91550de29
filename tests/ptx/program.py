"""PTX text, read once: instructions with decoded operands, in the order of the file."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Address", "Instruction", "Number", "Program", "Register", "Special", "Symbol", "read"]


class Register(NamedTuple):
    name: str  # %r12; %p3
    kind: str  # p, rs, r, rd


class Number(NamedTuple):
    """An immediate: its bits, and how many of them say what it is; 0 for a plain whole number."""

    bits: int
    width: int = 0


class Special(NamedTuple):
    name: str  # tid.x, ctaid.y


class Symbol(NamedTuple):
    name: str


class Address(NamedTuple):
    base: Any  # a register or a symbol
    offset: int


@dataclass(frozen=True)
class Instruction:
    op: str  # with all its modifiers
    operands: tuple[Any, ...]  # of the above; a list of them where braces hold a vector; None for `_`
    guard: tuple[Register, bool] | None  # runs where this predicate is the bool
    line: int
    text: str

    @property
    def parts(self) -> list[str]:
        return re.sub(r"::\w+", "", self.op).split(".")


@dataclass
class Program:
    name: str = ""
    params: list[tuple[str, int]] = field(default_factory=list)  # names and bytes
    threads: int = 0
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def narrowest(self, space: str) -> int:
        """Bytes of the narrowest access of a state space: what its shadow has to tell apart."""
        used = [x.parts for x in self.code if x.parts[0] in ("ld", "st") and space in x.parts]
        return min(4, *(int(re.sub(r"\D", "", parts[-1])) // 8 for parts in used), 4)


_REGISTER = re.compile(r"%(p|rs|rd|r|fd|f)(\d+)$")
_KINDS = {"f": "r", "fd": "rd"}
_SIZES = {"u64": 8, "b64": 8, "s64": 8, "u32": 4, "b32": 4, "s32": 4, "f32": 4, "f64": 8, "u16": 2, "b8": 1, "u8": 1}


def operand(text: str) -> Any:
    text = text.strip()
    if text == "_":
        return None
    if text.startswith("{"):
        return [operand(x) for x in split(text[1:-1])]
    if text.startswith("["):
        inside = text[1:-1].strip()
        base, sign, offset = re.fullmatch(r"([%$\w.]+)\s*(?:([+-])\s*(-?\w+))?", inside).groups()  # type: ignore[union-attr]
        return Address(operand(base), int(offset or "0", 0) * (-1 if sign == "-" else 1))
    if "|" in text:
        return [operand(x) for x in text.split("|")]
    found = _REGISTER.match(text)
    if found:
        return Register(text, _KINDS.get(found.group(1), found.group(1)))
    if text.startswith("%"):
        return Special(text[1:])
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return Number(int(text[2:], 16), 32)
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return Number(int(text[2:], 16), 64)
    if re.match(r"-?\d", text):
        return Number(int(text.rstrip("U"), 0))
    return Symbol(text)


def split(text: str) -> list[str]:
    """At the commas that no bracket holds."""
    found, depth = [""], 0
    for c in text:
        depth += (c in "[{") - (c in "]}")
        if c == "," and depth == 0:
            found.append("")
        else:
            found[-1] += c
    return [x for x in (part.strip() for part in found) if x]


_LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?)\s*;$")


@functools.lru_cache(maxsize=32)
def read(text: str) -> Program:
    """The one kernel of a file."""
    made, inside = Program(), False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("//")[0].strip()
        if not line or line.startswith(".loc"):
            continue
        if not inside:
            if ".entry" in line:
                made.name = line.split(".entry")[1].strip(" (")
            elif line.startswith(".param"):
                words = line.rstrip(",").split()
                made.params.append((words[-1], _SIZES[words[1].lstrip(".")]))
            elif line.startswith((".reqntid", ".maxntid")):
                made.threads = int(line.split()[1].rstrip(","))
            inside = line == "{"
        elif line == "}":
            return made
        elif line.startswith("$") and line.endswith(":"):
            made.labels[line[:-1]] = len(made.code)
        elif not line.startswith((".reg", ".pragma")):
            found = _LINE.match(line)
            if found is None:
                raise SyntaxError(f"line {number} is no instruction: {line}")
            negated, predicate, op, rest = found.groups()
            guard = None if predicate is None else (Register(predicate, "p"), not negated)
            operands = tuple(operand(x) for x in split(rest))
            made.code.append(Instruction(op, operands, guard, number, line))
    raise SyntaxError("no kernel, or one without an end")


def as_bits(value: float, width: int) -> int:
    """Of a floating-point number of 32 or 64 bits."""
    return int.from_bytes(struct.pack("<f" if width == 32 else "<d", value), "little")
