"""Each opcode against the PTX manual: another computation of the same, a number at a time."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.memory import Fault
from tests.ptx.opcodes import Rounding
from tests.ptx.small import each_lane, launch

RNG = np.random.default_rng(0)
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3e38, 2.0**-126, 0.1]


def f32(n=32):
    bits = RNG.integers(0, 2**32, n, np.uint32).view(np.float32)
    some = (RNG.standard_normal(n) * 4).astype(np.float32)
    found = np.where(RNG.random(n) < 0.5, bits, some)
    found[: len(SPECIAL)] = RNG.permutation(SPECIAL)
    return found.astype(np.float32)


def whole(kind):
    ends = np.iinfo(kind)
    found = RNG.integers(ends.min, ends.max, 32, kind, endpoint=True)
    found[:5] = [ends.min, ends.max, 0, 1, ends.max // 3]
    return RNG.permutation(found)


def rounded(x: Fraction, digits: int, least: int) -> Fraction:
    """To nearest, ties to even, with this number of digits and no unit below 2^least."""
    if x == 0:
        return x
    exponent = max(math.frexp(float(abs(x)))[1] - digits, least)
    if abs(x) >= Fraction(2) ** (exponent + digits):
        exponent += 1
    unit = Fraction(2) ** exponent
    return round(x / unit) * unit


WRAP = {np.uint16: 16, np.uint32: 32, np.int32: 32, np.uint64: 64, np.int64: 64}


def wrapped(x: int, kind):
    bits = WRAP[kind]
    x %= 1 << bits
    return x - (1 << bits) if kind in (np.int32, np.int64) and x >> (bits - 1) else x


def towards_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


i32, u32, i64, u64, u16 = np.int32, np.uint32, np.int64, np.uint64, np.uint16
WHOLE = {
    "add.s32 $d, $a, $b": (i32, [i32, i32], lambda a, b: a + b),
    "sub.s32 $d, $a, $b": (i32, [i32, i32], lambda a, b: a - b),
    "add.s64 $d, $a, $b": (i64, [i64, i64], lambda a, b: a + b),
    "mul.lo.s32 $d, $a, $b": (i32, [i32, i32], lambda a, b: a * b),
    "mul.lo.s64 $d, $a, $b": (i64, [i64, i64], lambda a, b: a * b),
    "mul.wide.s32 $d, $a, $b": (i64, [i32, i32], lambda a, b: a * b),
    "mul.wide.u32 $d, $a, $b": (u64, [u32, u32], lambda a, b: a * b),
    "mad.lo.s32 $d, $a, $b, $c": (i32, [i32] * 3, lambda a, b, c: a * b + c),
    "mad.lo.s64 $d, $a, $b, $c": (i64, [i64] * 3, lambda a, b, c: a * b + c),
    "mad.wide.s32 $d, $a, $b, $c": (i64, [i32, i32, i64], lambda a, b, c: a * b + c),
    "mad.wide.u32 $d, $a, 8, $b": (u64, [u32, u64], lambda a, b: a * 8 + b),
    "div.s32 $d, $a, $b": (i32, [i32, i32], lambda a, b: towards_zero(a, b) if b else -1),
    "rem.s32 $d, $a, $b": (i32, [i32, i32], lambda a, b: a - towards_zero(a, b) * b if b else a),
    "div.s32 $d, $a, 7": (i32, [i32], lambda a: towards_zero(a, 7)),
    "max.s32 $d, $a, $b": (i32, [i32, i32], max),
    "min.s32 $d, $a, $b": (i32, [i32, i32], min),
    "neg.s32 $d, $a": (i32, [i32], lambda a: -a),
    "and.b32 $d, $a, $b": (u32, [u32, u32], lambda a, b: a & b),
    "or.b64 $d, $a, $b": (u64, [u64, u64], lambda a, b: a | b),
    "xor.b32 $d, $a, -32": (u32, [u32], lambda a: a ^ 0xFFFFFFE0),
    "not.b32 $d, $a": (u32, [u32], lambda a: ~a),
    "and.b16 $d, $a, $b": (u16, [u16, u16], lambda a, b: a & b),
    "shl.b32 $d, $a, 5": (u32, [u32], lambda a: a << 5),
    "shl.b32 $d, $a, 32": (u32, [u32], lambda a: 0),
    "shl.b64 $d, $a, 33": (u64, [u64], lambda a: a << 33),
    "shl.b16 $d, $a, 12": (u16, [u16], lambda a: a << 12),
    "shr.u32 $d, $a, 27": (u32, [u32], lambda a: a >> 27),
    "shr.s32 $d, $a, 31": (i32, [i32], lambda a: a >> 31),
    "shr.s32 $d, $a, 77": (i32, [i32], lambda a: a >> 31),
    "bfe.u32 $d, $a, 3, 5": (u32, [u32], lambda a: a >> 3 & 31),
    "bfe.s32 $d, $a, 2, 1": (i32, [u32], lambda a: -(a >> 2 & 1)),
    "bfe.u32 $d, $a, 28, 9": (u32, [u32], lambda a: a >> 28),
    "popc.b32 $d, $a": (u32, [u32], lambda a: a.bit_count()),
    "prmt.b32 $d, $a, $b, 0x3340U": (u32, [u32, u32], lambda a, b: bytes_of(a, b, 0x3340)),
    "prmt.b32 $d, $a, $b, 0x7F1C": (u32, [u32, u32], lambda a, b: bytes_of(a, b, 0x7F1C)),
    "cvt.u32.u16 $d, $a": (u32, [u16], lambda a: a),
    "cvt.s64.s32 $d, $a": (i64, [i32], lambda a: a),
    "cvt.u64.u32 $d, $a": (u64, [u32], lambda a: a),
    "cvt.u32.u64 $d, $a": (u32, [u64], lambda a: a),
    "mov.b32 $d, -7": (i32, [], lambda: -7),
    "mov.u32 $d, %tid.x": (u32, [], None),
}  # fmt: skip


def bytes_of(a, b, how):
    pool, found = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")], 0
    for i in range(4):
        choice = how >> 4 * i & 15
        byte = pool[choice & 7]
        found |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * i
    return found


@pytest.mark.parametrize("line", WHOLE)
def test_whole_numbers(line):
    made, kinds, by_hand = WHOLE[line]
    sources = [whole(kind) for kind in kinds]
    found = each_lane(line, sources, made)
    for lane in range(32):
        want = lane if by_hand is None else by_hand(*(int(x[lane]) for x in sources))
        assert int(found[lane]) == wrapped(want, made), (lane, [int(x[lane]) for x in sources])


@pytest.mark.parametrize(
    ("name", "by_hand"), [("add", lambda a, b: a + b), ("sub", lambda a, b: a - b), ("mul", lambda a, b: a * b)]
)
def test_floats_round_once(name, by_hand):
    a, b = f32(), f32()
    found = each_lane(f"{name}.f32 $d, $a, $b", [a, b], np.float32)
    with np.errstate(all="ignore"):
        want = by_hand(a.astype(np.float64), b.astype(np.float64)).astype(
            np.float32
        )  # exact, or twice the digits and two
    np.testing.assert_array_equal(found, want)
    flat = each_lane(f"{name}.ftz.f32 $d, $a, $b", [a, b], np.float32)
    assert not ((np.abs(flat) < 2.0**-126) & (flat != 0)).any()


def test_fma_rounds_once():
    """Also where the sum of the exact product lies half way between two numbers but for a bit far below."""
    a, b, c = f32(), f32(), f32()
    a[:4], b[:4], c[:4] = 1 + 2.0**-12, 1 + 2.0**-12, [2.0**-60, -(2.0**-60), 0, 2.0**24]
    a[4:6], b[4:6], c[4:6] = 1 + 2.0**-23, 2.0**-24, [1, -1]
    found = each_lane("fma.rn.f32 $d, $a, $b, $c", [a, b, c], np.float32)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        if np.isfinite([x, y, z]).all() and np.isfinite(got):
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            assert Fraction(float(got)) == rounded(exact, 24, -149)
        elif np.isnan([x, y, z]).any():
            assert np.isnan(got)


def test_fma_of_pairs_rounds_once():
    x = [RNG.standard_normal(64).astype(np.float32).view(np.uint32) >> 16 for _ in range(3)]
    packed = [(a[::2] | a[1::2] << 16).astype(np.uint32) for a in x]
    found = each_lane("fma.rn.bf16x2 $d, $a, $b, $c", packed, np.uint32)
    a, b, c = ((v.astype(np.uint32) << 16).view(np.float32) for v in x)
    for i in range(64):
        got = np.array([found[i // 2] >> 16 * (i % 2) << 16], np.uint32).view(np.float32)[0]
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        assert Fraction(float(got)) == rounded(exact, 8, -133)


def test_largest_and_smallest_leave_nan_out():
    a, b = f32(), f32()
    found = each_lane("max.f32 $d, $a, $b", [a, b], np.float32), each_lane("min.f32 $d, $a, $b", [a, b], np.float32)
    for x, y, high, low in zip(a, b, *found, strict=True):
        if np.isnan(x) or np.isnan(y):
            other = y if np.isnan(x) else x
            assert (high == low == other) or (np.isnan(other) and np.isnan(high))
        else:
            assert (high, low) == (max(x, y), min(x, y))


COMPARED = {
    "eq": lambda a, b: a == b, "neu": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "num": lambda a, b: a == a and b == b,
    "nan": lambda a, b: a != a or b != b, "ne": lambda a, b: a < b or a > b, "ltu": lambda a, b: not a >= b,
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARED)
def test_comparisons_of_floats(name):
    a, b = f32(), f32()
    b[::3] = a[::3]
    out = np.zeros(32, np.uint32)
    text = (
        "mov.u32 %r9, %tid.x;\n"
        + "".join(f"ld.param.b64 %rd{i}, [p{i}];\nmad.wide.u32 %rd{i}, %r9, 4, %rd{i};\n" for i in range(3))
        + "ld.global.b32 %r1, [%rd0];\nld.global.b32 %r2, [%rd1];\n"
        + f"setp.{name}.f32 %p1, %r1, %r2;\nnot.pred %p2, %p1;\nselp.b32 %r3, 1, 0, %p1;\n@%p2 mov.b32 %r3, 2;\n"
        + "st.global.b32 [%rd2], %r3;"
    )  # fmt: skip
    launch(text, a, b, out)
    assert out.tolist() == [1 if COMPARED[name](x, y) else 2 for x, y in zip(a, b, strict=True)]


def test_halves_and_brain_floats():
    a, b = f32(), f32()
    bits = each_lane("cvt.rn.bf16x2.f32 $d, $a, $b", [a, b], np.uint32)
    halves = each_lane("cvt.rn.f16x2.f32 $d, $a, $b", [a, b], np.uint32)
    one = each_lane("cvt.rn.bf16.f32 $d, $a", [a], np.uint16)
    back = each_lane("cvt.f32.bf16 $d, $a", [one], np.float32)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        for number, word in ((x, bits[i] >> 16), (y, bits[i] & 0xFFFF), (x, one[i])):
            got = np.array([word], np.uint32) << np.uint32(16)
            if np.isnan(number):
                assert word == 0x7FFF
            elif np.isfinite(number) and abs(number) < 3e38:
                assert Fraction(float(got.view(np.float32)[0])) == rounded(Fraction(float(number)), 8, -133)
        with np.errstate(over="ignore"):
            want = np.array([y, x]).astype(np.float16)
        np.testing.assert_array_equal(halves[i : i + 1].view(np.float16), want)
    np.testing.assert_array_equal(back.view(np.uint32), one.astype(np.uint32) << 16)


def test_between_sizes_of_floats():
    a = f32()
    wide = each_lane("cvt.f64.f32 $d, $a", [a], np.float64)
    np.testing.assert_array_equal(wide, a.astype(np.float64))
    b = RNG.standard_normal(32)
    found = each_lane("cvt.rn.f32.f64 $d, $a", [b], np.float32)
    assert [Fraction(float(x)) for x in found] == [rounded(Fraction(float(x)), 24, -149) for x in b]
    n = whole(np.int32)
    found = each_lane("cvt.rn.f32.s32 $d, $a", [n], np.float32)
    assert [Fraction(float(x)) for x in found] == [rounded(Fraction(int(x)), 24, -149) for x in n]


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, "scattered"])
def test_an_exponential_is_as_near_as_documented(share):
    a = (RNG.random(32) * 40 - 30).astype(np.float32)
    a[:5] = [0.0, -0.0, -np.inf, np.inf, -140.0]
    found = each_lane("ex2.approx.ftz.f32 $d, $a", [a], np.float32, Rounding(approximate=share))
    assert found[:5].tolist() == [1.0, 1.0, 0.0, np.inf, 0.0]
    error = found[5:] / np.exp2(a[5:].astype(np.float64)) - 1
    assert np.abs(error).max() <= 2.0**-22 * 1.3  # what is documented, and the rounding of the result
    if share in (1.0, -1.0):
        assert (np.sign(error) == share).all()
    elif share == "scattered":
        again = each_lane("ex2.approx.ftz.f32 $d, $a", [a], np.float32, Rounding(approximate=share))
        assert (again == found).all() and error.min() < 0 < error.max()
    else:
        assert np.abs(error).max() <= 2.0**-24 * 1.01


def test_a_division_is_as_near_as_documented():
    a, b = (RNG.standard_normal(32).astype(np.float32) for _ in range(2))
    for share in (0.0, 1.0, -1.0):
        found = each_lane("div.full.f32 $d, $a, $b", [a, b], np.float32, Rounding(approximate=share))
        assert np.abs(found / (a / b.astype(np.float64)) - 1).max() <= 2.0**-22 * 1.3


def test_registers_are_packed_and_opened():
    a, b = whole(u16), whole(u16)
    found = each_lane("mov.b32 $d, {$a, $b}", [a, b], np.uint32)
    assert (found == a | b.astype(np.uint32) << 16).all()
    w = whole(u64)
    assert (each_lane("mov.b64 {_, $d}, $a", [w], np.uint32) == w >> 32).all()


def test_a_pair_of_halves_is_compared_by_each():
    a = RNG.integers(0, 2, 64).astype(np.float16).view(np.uint32)
    out = np.zeros(32, np.uint32)
    launch(
        """mov.u32 %r9, %tid.x;
        ld.param.b64 %rd1, [p0]; // of halves
        mad.wide.u32 %rd1, %r9, 4, %rd1;
        ld.param.b64 %rd2, [p1];
        mad.wide.u32 %rd2, %r9, 4, %rd2;
        ld.global.b32 %r1, [%rd1];
        sub.f16x2 %r2, %r1, %r1;
        setp.eq.f16x2 %p1|%p2, %r1, %r2;
        selp.b32 %r3, 1, 0, %p1;
        @%p2 or.b32 %r3, %r3, 2;
        st.global.b32 [%rd2], %r3;""",
        a, out,
    )  # fmt: skip
    zero = a.view(np.float16).reshape(-1, 2) == 0
    assert (out == zero[:, 0] + 2 * zero[:, 1]).all()


@pytest.mark.parametrize(
    "line",
    [
        "sin.approx.f32 %r1, %r1",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1}",
        "ld.global.nc.b32 %r1, [%rd1]",
        "add.sat.s32 %r1, %r1, %r1",
        "bar.red.popc.u32 %r1, 0, %p1",
    ],
)
def test_an_unknown_opcode_is_named(line):
    with pytest.raises(Fault, match=line.split()[0].replace(".", r"\.")) as said:
        launch(f"mov.b32 %r1, 0;\n{line};", np.zeros(4, np.uint32))
    assert said.value.kind == "unknown opcode"
