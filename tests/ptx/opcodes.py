"""What an instruction of one thread computes, for all lanes at once: a function of its operands, made from its name.

`arithmetic(parts)` gives the dtypes of the operands and the function; registers are bits, seen as the dtype that the
instruction has for them. The PTX manual says what each computes; what it leaves to the hardware is in `Rounding`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["BITS", "NEAREST", "Rounding", "arithmetic", "from_bfloat16", "to_bfloat16"]

BITS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
_TYPES = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64,
    "s64": np.int64, "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "tf32": np.uint32,
    "f16x2": np.uint32, "bf16x2": np.uint32,
}  # fmt: skip
_WIDE = {"s32": np.int64, "u32": np.uint64, "s16": np.int32, "u16": np.uint32}
_TINY = np.float32(2.0**-126)
Made = tuple[tuple[Any, ...], Callable[..., Any]]  # dtypes of the sources, and what makes the result of them


@dataclass(frozen=True)
class Rounding:
    """What the manual leaves open.

    approximate: relative error of ex2.approx, lg2.approx, div.full, as a share of what is documented: 0 rounds to
        nearest, 1 and -1 are the worst cases, "scattered" has another for every argument.
    product: "nearest" adds the products of an mma exactly and rounds once; "truncated" adds eight at a time, each cut
        to the 24 bits of the largest, and cuts the sum: no more than the coarsest tensor core keeps.
    """

    approximate: float | str = 0.0
    product: str = "nearest"
    order: str = "together"  # of the warps between barriers: "together", or "apart", each alone in a random order
    seed: int = 0

    def off(self, exact: Any, argument: Any, error: float) -> Any:
        """A float64 result, rounded to float32 with that relative error."""
        share: Any = self.approximate
        if share == "scattered":
            mixed = argument.view(np.uint32) * np.uint32(2654435761)
            share = (mixed >> np.uint32(8)).astype(np.float64) / 2.0**23 - 1
        return (exact * (1 + share * error)).astype(np.float32)


NEAREST = Rounding()


def flushed(x: Any) -> Any:
    """Numbers too small for full digits are 0, with their sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def to_bfloat16(x: Any) -> Any:
    """Bits (uint16) of the nearest, ties to even; a nan is 0x7fff."""
    bits = x.view(np.uint32)
    near = ((bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), near)


def from_bfloat16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32, rounded once: the float64 sum is exact, or is made odd where float32 lies half way."""
    product = a.astype(np.float64) * b
    total = product + c
    bits = total.view(np.int64)
    close = ((bits & 0x1FFFFFFF) == 0x10000000) | (np.abs(total) < _TINY)
    if close.any():
        part = total - product
        error = (product - (total - part)) + (c - part)
        odd = close & (error != 0) & np.isfinite(error) & ((bits & 1) == 0)
        total = np.where(odd, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return total.astype(np.float32)


def _halves(x: Any, kind: str) -> Any:
    """The two numbers of a packed word, as float32."""
    return x.view(np.float16).astype(np.float32) if kind == "f16x2" else from_bfloat16(x.view(np.uint16))


def _packed(x: Any, kind: str) -> Any:
    return x.astype(np.float16).view(np.uint32) if kind == "f16x2" else to_bfloat16(x).view(np.uint32)


_SIMPLE: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.fmax, "min": np.fmin,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative,
    "abs": np.abs, "fma": fused,
}  # fmt: skip
_ARITY = {"not": 1, "neg": 1, "abs": 1, "fma": 3}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a != b) & (a == a) & (b == b), "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal, "neu": lambda a, b: a != b, "equ": lambda a, b: ~((a < b) | (a > b)),
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b), "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip
# What may stand between a name and its type without changing what is computed here.
_SILENT = {"rn", "ftz", "approx", "full", "lo", "wide"}


def arithmetic(parts: list[str], rounding: Rounding) -> Made | None:
    """The instruction with this name, or None where there is none here."""
    name, kind, rest = parts[0], parts[-1], parts[1:-1]
    if name == "setp" and len(rest) == 1 and rest[0] in _COMPARISONS and kind in _TYPES:
        return _setp(_COMPARISONS[rest[0]], kind)
    if name == "cvt":
        return _convert(rest[-1], kind, rest[:-1])
    if kind not in _TYPES or not set(rest) <= _SILENT:
        return None
    t, ftz = _TYPES[kind], "ftz" in rest
    floating = kind in ("f32", "f64")
    if name in _SIMPLE and kind in ("f16x2", "bf16x2"):
        return _on_halves(_SIMPLE[name], _ARITY.get(name, 2), kind)
    if name == "mad" or (name == "mul" and ("wide" in rest or not floating)):
        return _whole_product(name, kind, "wide" in rest)
    if name in _SIMPLE and (floating or name != "fma"):
        if name == "fma" and kind == "f64":
            return None
        made = _SIMPLE[name]
        if ftz:
            plain = made
            made = lambda *xs: flushed(plain(*(flushed(x) for x in xs)))  # noqa: E731
        return (t,) * _ARITY.get(name, 2), made
    bits = 8 * np.dtype(t).itemsize
    if name == "shl":
        return (t, np.uint32), lambda a, n: np.where(n < bits, a << np.minimum(n, bits - 1).astype(t), t(0))
    if name == "shr" and kind[0] == "s":
        return (t, np.uint32), lambda a, n: a >> np.minimum(n, bits - 1).astype(t)
    if name == "shr":
        return (t, np.uint32), lambda a, n: np.where(n < bits, a >> np.minimum(n, bits - 1).astype(t), t(0))
    if name == "selp":
        return (t, t, np.bool_), lambda a, b, p: np.where(p, a, b)
    if name in ("div", "rem") and kind in ("s32", "u32", "s64", "u64"):
        return (t, t), _quotient if name == "div" else lambda a, b: a - _quotient(a, b) * b
    if (name, kind) in (("bfe", "u32"), ("bfe", "s32")):
        return (t, np.uint32, np.uint32), _field(kind == "s32")
    return _special(name, kind, rest, rounding)


def _special(name: str, kind: str, rest: list[str], rounding: Rounding) -> Made | None:
    f = np.float32
    if (name, kind) == ("popc", "b32"):
        return (np.uint32,), lambda a: np.unpackbits(a.view(np.uint8)).reshape(-1, 32).sum(1).astype(np.uint32)
    if (name, kind) == ("prmt", "b32"):
        return (np.uint32,) * 3, _permuted
    if kind != "f32" or not {"approx", "full", "rn"} & set(rest):
        return None
    if name == "ex2" and "approx" in rest:

        def ex2(a: Any) -> Any:
            a = flushed(a) if "ftz" in rest else a
            out = rounding.off(np.exp2(a.astype(np.float64)), a, 2.0**-22)
            out = np.where(a == 0, f(1), out)  # the manual's table
            return flushed(out) if "ftz" in rest else out

        return (f,), ex2
    if name == "lg2" and "approx" in rest:
        return (f,), lambda a: rounding.off(np.log2(a.astype(np.float64)), a, 2.0**-22)
    if name == "div" and "full" in rest:  # 2 units; what is divided by 2^126 or more may be 0, and is here

        def div(a: Any, b: Any) -> Any:
            a, b = (flushed(a), flushed(b)) if "ftz" in rest else (a, b)
            out = rounding.off(a / b.astype(np.float64), b, 2.0**-22)
            out = np.where((np.abs(b) > 2.0**126) & np.isfinite(b) & np.isfinite(a), f(0), out)
            return flushed(out) if "ftz" in rest else out

        return (f, f), div
    if name == "div" and "rn" in rest:
        return (f, f), np.divide
    return None


def _setp(compare: Callable[..., Any], kind: str) -> Made:
    t = _TYPES[kind]
    if kind not in ("f16x2", "bf16x2"):
        return (t, t), compare

    def both(a: Any, b: Any) -> Any:
        found = compare(_halves(a, kind), _halves(b, kind)).reshape(-1, 2)
        return np.ascontiguousarray(found[:, 0]), np.ascontiguousarray(found[:, 1])

    return (t, t), both


def _on_halves(made: Callable[..., Any], arity: int, kind: str) -> Made:
    def halves(*xs: Any) -> Any:
        wide = [_halves(x, kind) for x in xs]
        if made is not fused:  # twice the digits and two: rounding twice is rounding once
            return _packed(made(*wide), kind)
        a, b, c = (x.astype(np.float64) for x in wide)
        total = a * b + c
        near = total.astype(np.float32)  # made odd where it is not exact, so that it is rounded once, below
        bits = near.view(np.uint32)
        odd = np.isfinite(near) & (near != total) & ((bits & np.uint32(1)) == 0)
        toward = np.where(total > near, np.float32(np.inf), np.float32(-np.inf))
        return _packed(np.where(odd, np.nextafter(near, toward), near), kind)

    return (np.uint32,) * arity, halves


def _whole_product(name: str, kind: str, wide: bool) -> Made | None:
    if wide and kind not in _WIDE:
        return None
    t = _TYPES[kind]
    w = _WIDE[kind] if wide else t
    if name == "mul":
        return (t, t), lambda a, b: a.astype(w) * b.astype(w)
    return (t, t, w), lambda a, b, c: a.astype(w) * b.astype(w) + c


def _quotient(a: Any, b: Any) -> Any:
    """Toward zero; what a division by zero gives is not said, and is all ones here."""
    b1 = np.where(b == 0, b.dtype.type(1), b)
    down = a // b1
    toward = down + ((down < 0) & (down * b1 != a)).astype(a.dtype) if a.dtype.kind == "i" else down
    return np.where(b == 0, np.invert(np.zeros_like(a)), toward)


def _field(signed: bool) -> Callable[..., Any]:
    def bfe(a: Any, start: Any, length: Any) -> Any:
        start, length = (start & np.uint32(255)).astype(np.int64), (length & np.uint32(255)).astype(np.int64)
        wide = a.astype(np.int64) >> np.minimum(start, 32 if not signed else 31)
        length = np.minimum(length, 32)
        kept = wide & ((np.int64(1) << length) - 1)
        if signed:
            sign = np.where(length > 0, np.int64(1) << np.maximum(length - 1, 0), 0)
            kept = (kept ^ sign) - sign
        return kept.astype(a.dtype)

    return bfe


def _permuted(a: Any, b: Any, how: Any) -> Any:
    """Each byte of the result is one of the eight of a and b, or, with the highest bit of its choice, its sign."""
    pool = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1)
    choice = (how[:, None] >> (4 * np.arange(4, dtype=np.uint32))) & np.uint32(15)
    found = np.take_along_axis(pool, (choice & np.uint32(7)).astype(np.int64), 1)
    sign = np.where(found & np.uint8(128), np.uint8(255), np.uint8(0))
    return np.where(choice & np.uint32(8), sign, found).astype(np.uint8).view(np.uint32).ravel()


def _convert(to: str, source: str, how: list[str]) -> Made | None:
    """cvt.HOW.TO.SOURCE"""
    if to in ("bf16x2", "f16x2") and source == "f32" and how == ["rn"]:  # the first operand is the upper half
        return (np.float32,) * 2, lambda a, b: _packed(np.stack([b, a], 1).ravel(), to)
    if to == "bf16" and source == "f32" and how == ["rn"]:
        return (np.float32,), to_bfloat16
    if to == "f32" and source == "bf16" and not how:
        return (np.uint16,), from_bfloat16
    if to == "tf32" and source == "f32" and how == ["rna"]:
        return (np.uint32,), lambda a: (a + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    if to not in _TYPES or source not in _TYPES or "bf16" in (to, source) or "x2" in to + source:
        return None
    t, s = _TYPES[to], _TYPES[source]
    floats = (to[0] == "f") + (source[0] == "f")
    if floats == 0 and not how:
        return (s,), lambda a: a.astype(t)
    if to[0] == "f" and (how == ["rn"] or (not how and np.dtype(t).itemsize > np.dtype(s).itemsize)):
        return (s,), lambda a: a.astype(t)  # numpy rounds to nearest
    if floats == 1 and to[0] in "su" and how == ["rzi"]:
        ends = np.iinfo(t)
        return (s,), lambda a: np.clip(np.nan_to_num(np.trunc(a.astype(np.float64))), ends.min, ends.max).astype(t)
    return None
