"""What the lanes of a warp, and the warps of a block, do together, against the PTX manual; and what is a fault."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.memory import Fault
from tests.ptx.opcodes import Rounding
from tests.ptx.small import launch

RNG = np.random.default_rng(1)
APART = [Rounding(order="apart", seed=seed) for seed in range(3)]

# %r9 is the thread, %rd0, %rd1, ... its own four bytes of each array
HERE = "mov.u32 %r9, %tid.x;\nmov.u32 %r8, %ctaid.x;\nmov.u32 %r7, %ntid.x;\nmad.lo.s32 %r6, %r8, %r7, %r9;\n"


def own(n: int, size: int = 4) -> str:
    return HERE + "".join(
        f"ld.param.b64 %rd{i}, [p{i}];\nmad.wide.u32 %rd{i}, %r6, {size}, %rd{i};\n" for i in range(n)
    )


@pytest.mark.parametrize("mode", ["bfly", "idx", "up", "down"])
@pytest.mark.parametrize("c", [31, 0, 7 | 24 << 8])
def test_shuffles(mode, c):
    x, b, out = RNG.integers(0, 99, 32, np.uint32), RNG.integers(0, 32, 32, np.uint32), np.zeros(32, np.uint32)
    if mode != "idx":
        b[:] = b[0]
    launch(
        own(3) + "ld.global.b32 %r1, [%rd0];\nld.global.b32 %r2, [%rd1];\n"
        f"shfl.sync.{mode}.b32 %r3, %r1, %r2, {c}, -1;\nst.global.b32 [%rd2], %r3;", x, b, out,
    )  # fmt: skip
    clamp, segment = c & 31, c >> 8 & 31
    for lane in range(32):
        step, high, low = int(b[lane]), (lane & segment) | (clamp & ~segment), lane & segment
        j = {"bfly": lane ^ step, "idx": low | (step & ~segment), "up": lane - step, "down": lane + step}[mode]
        there = j >= high if mode == "up" else j <= high
        assert out[lane] == x[j if there else lane]


def test_reductions_of_a_warp():
    x, out = RNG.integers(-99, 99, 64).astype(np.int32), np.zeros(64, np.int32)
    for name, by_hand in (("max", np.max), ("min", np.min)):
        launch(
            own(2) + f"ld.global.b32 %r1, [%rd0];\nredux.sync.{name}.s32 %r2, %r1, -1;\nst.global.b32 [%rd1], %r2;",
            x,
            out,
            threads=64,
        )
        assert (out.reshape(2, 32) == by_hand(x.reshape(2, 32), 1)[:, None]).all()


@pytest.mark.parametrize(
    ("kind", "shape"), [("f16", "m16n8k16"), ("bf16", "m16n8k16"), ("tf32", "m16n8k8"), ("f16", "m16n8k8")]
)
def test_a_product_puts_every_element_where_the_manual_does(kind, shape):
    """Row groupID, + 8 in odd registers; columns 2 threadID and the next, + 8 in the upper half of the registers."""
    depth = int(shape.split("k")[1])
    a, b, c = RNG.integers(-8, 9, (16, depth)), RNG.integers(-8, 9, (depth, 8)), RNG.integers(-8, 9, (16, 8))

    def word(*numbers):
        if kind == "tf32":
            return np.array(numbers, np.float32).view(np.uint32)[0] | 0x1FFF  # bits that are not looked at
        if kind == "f16":
            return np.array(numbers, np.float16).view(np.uint32)[0]
        return (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)[0]

    half = 1 if kind == "tf32" else 2
    n_a, n_b = depth // (2 * half) // 1, depth // (4 * half)
    left, right, start = np.zeros((n_a, 32), np.uint32), np.zeros((n_b, 32), np.uint32), np.zeros((4, 32), np.float32)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(n_a):
            row, col = group + 8 * (i % 2), thread * half + 4 * half * (i // 2)
            left[i, lane] = word(*a[row, col : col + half])
        for i in range(n_b):
            row = thread * half + 4 * half * i
            right[i, lane] = word(*b[row : row + half, group])
        for i in range(4):
            start[i, lane] = c[group + 8 * (i // 2), 2 * thread + i % 2]
    out = np.zeros((4, 32), np.float32)
    text = own(4)
    names = {}
    for letter, n, at, first in (("a", n_a, 0, 10), ("b", n_b, 1, 20), ("c", 4, 2, 30)):
        names[letter] = ", ".join(f"%r{first + i}" for i in range(n))
        text += "".join(f"ld.global.b32 %r{first + i}, [%rd{at}+{128 * i}];\n" for i in range(n))
    text += f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{ %r40, %r41, %r42, %r43 }}, "
    text += ", ".join(f"{{ {names[x]} }}" for x in "abc") + ";\n"
    text += "".join(f"st.global.b32 [%rd3+{128 * i}], %r{40 + i};\n" for i in range(4))
    for rounding in (Rounding(), Rounding(product="truncated")):
        launch(text, left, right, start, out, rounding=rounding)
        want = a @ b + c
        for lane in range(32):
            for i in range(4):
                assert out[i, lane] == want[(lane >> 2) + 8 * (i // 2), 2 * (lane % 4) + i % 2]


def test_a_coarse_tensor_core_cuts_what_is_below_the_largest():
    """1 + 16 * 2^-25 is 1 where each product is cut to 24 bits of the largest, and 1 + 2^-21 where it is not."""
    from tests.ptx.warp import product

    one, small = np.full((1, 32), 0x3C003C00, np.uint32), np.array(2.0**-14, np.float16)
    tiny = np.full((1, 32), int(small.view(np.uint16)) * 0x10001, np.uint32)
    half = np.full((1, 32), int(np.array(2.0**-11, np.float16).view(np.uint16)) * 0x10001, np.uint32)
    c = np.ones((1, 32), np.float32).view(np.uint32)
    near = product("m16n8k16", "f16", [tiny] * 4, [half] * 2, [c] * 4, Rounding())
    cut = product("m16n8k16", "f16", [tiny] * 4, [half] * 2, [c] * 4, Rounding(product="truncated"))
    assert (near[0].view(np.float32) == 1 + 2.0**-21).all() and (cut[0].view(np.float32) == 1).all()
    nan = np.full((1, 32), 0x7E007E00, np.uint32)
    for rounding in (Rounding(), Rounding(product="truncated")):
        assert np.isnan(product("m16n8k16", "f16", [one] * 4, [nan] * 2, [c] * 4, rounding)[0].view(np.float32)).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("turned", ["", ".trans"])
def test_a_matrix_is_loaded_with_a_row_of_each_eight_lanes(count, turned):
    """Lane 8 m + r has the address of row r of matrix m; lane l gets elements 2 (l % 4) and the next of row l / 4."""
    x, out = np.arange(32 * 8, dtype=np.uint16), np.zeros((count, 32), np.uint32)
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    launch(
        own(2, 16) + "shl.b32 %r2, %r9, 4;\nmov.b32 %r3, global_smem;\nadd.s32 %r3, %r3, %r2;\n"
        "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd0];\n"
        "st.shared.v4.b32 [%r3], {%r10, %r11, %r12, %r13};\nbar.sync 0;\n"
        f"ldmatrix.sync.aligned.m8n8.x{count}{turned}.shared.b16 {{{registers}}}, [%r3];\n"
        "ld.param.b64 %rd5, [p1];\nmad.wide.u32 %rd5, %r9, 4, %rd5;\n"
        + "".join(f"st.global.b32 [%rd5+{128 * i}], %r{10 + i};\n" for i in range(count)),
        x, out, shared=512,
    )  # fmt: skip
    for m in range(count):
        matrix = x[64 * m : 64 * m + 64].reshape(8, 8)
        matrix = matrix.T if turned else matrix
        for lane in range(32):
            row, col = lane // 4, 2 * (lane % 4)
            assert out[m, lane] == int(matrix[row, col]) | int(matrix[row, col + 1]) << 16


# each thread writes its word, and reads that of the thread 32 further on: another warp's
EXCHANGE = (
    own(2)
    + """ld.global.b32 %r1, [%rd0];
mov.b32 %r2, global_smem;
shl.b32 %r3, %r9, 2;
add.s32 %r4, %r2, %r3;
st.shared.b32 [%r4], %r1;
bar.sync 0;
xor.b32 %r3, %r3, 128;
add.s32 %r4, %r2, %r3;
ld.shared.b32 %r5, [%r4];
st.global.b32 [%rd1], %r5;"""
)


@pytest.mark.parametrize("rounding", [Rounding(), *APART])
def test_a_barrier_makes_what_others_wrote_readable(rounding):
    x, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    launch(EXCHANGE, x, out, threads=64, grid=(2,), shared=256, rounding=rounding)
    assert (out == np.arange(128) ^ 32).all()


@pytest.mark.parametrize("rounding", [Rounding(), *APART])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("bar.sync 0;\n", ""), "race or uninitialised"),
        (("shl.b32 %r3, %r9, 2;", "and.b32 %r3, %r9, 15;\nshl.b32 %r3, %r3, 2;"), "race"),  # all to the same words
        (("xor.b32 %r3, %r3, 128", "add.s32 %r3, %r3, 128"), "out of bounds"),
        (("xor.b32 %r3, %r3, 128", "sub.s32 %r3, %r3, 4"), "out of bounds"),
        (("xor.b32 %r3, %r3, 128", "xor.b32 %r3, %r3, 130"), "misaligned"),
        (("st.shared.b32 [%r4], %r1;\n", ""), "uninitialised"),
        (("st.shared", "@%p1 st.shared"), "uninitialised"),  # of a register
        (("st.global.b32 [%rd1]", "st.global.b32 [%rd1+4]"), "out of bounds"),
        (("ld.global.b32 %r1, [%rd0]", "ld.global.b32 %r1, [%rd0-4]"), "out of bounds"),
        (("ld.global.b32 %r1, [%rd0]", "ld.global.b32 %r1, [%rd1]"), "uninitialised"),
        (("mad.wide.u32 %rd1, %r6, 4", "mad.wide.u32 %rd1, %r9, 4"), "race"),  # two blocks write the same
        (("bar.sync 0;", "bar.sync 0;\nsetp.lt.s32 %p1, %r9, 32;\n@%p1 ret;\nbar.sync 0;"), "barrier"),
        (("bar.sync 0;", "bar.sync 0;\nsetp.lt.s32 %p1, %r9, 5;\n@%p1 redux.sync.max.s32 %r1, %r1, -1;"), "divergence"),
        (("bar.sync 0;", "$L1:\nbra $L1;"), "no end"),
    ],
)  # fmt: skip
def test_what_is_a_fault(change, kind, rounding):
    x, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    assert change[0] in EXCHANGE
    with pytest.raises(Fault) as said:
        launch(EXCHANGE.replace(*change), x, out, threads=64, grid=(2,), shared=256, empty=1, rounding=rounding)
    assert said.value.kind in kind


# the same with a copy that needs no register; the first of two groups is what is read
COPY = (
    own(2, 16)
    + """mov.b32 %r2, global_smem;
shl.b32 %r3, %r9, 4;
add.s32 %r4, %r2, %r3;
mov.b32 %r5, 16;
cp.async.cg.shared.global [%r4], [%rd0], 0x10, %r5;
cp.async.commit_group;
cp.async.cg.shared.global [%r4+1024], [%rd0], 0x10, %r5;
cp.async.commit_group;
cp.async.wait_group 1;
bar.sync 0;
xor.b32 %r3, %r3, 512;
add.s32 %r4, %r2, %r3;
ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r4];
st.global.v4.b32 [%rd1], {%r10, %r11, %r12, %r13};"""
)


@pytest.mark.parametrize("rounding", [Rounding(), *APART])
def test_an_asynchronous_copy_is_there_when_it_was_waited_for(rounding):
    x, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    launch(COPY, x, out, threads=64, shared=2048, rounding=rounding)
    assert (out.reshape(64, 4) == x.reshape(64, 4)[np.arange(64) ^ 32]).all()
    launch(COPY.replace("mov.b32 %r5, 16", "mov.b32 %r5, 0").replace("p0", "p1"), x, out, threads=64, shared=2048)
    assert not out.any()  # none of sixteen bytes is read: zeros


@pytest.mark.parametrize("rounding", [Rounding(), *APART])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("cp.async.wait_group 1;\n", ""), {"race", "uninitialised"}),
        (("wait_group 1", "wait_group 2"), {"race", "uninitialised"}),
        (("bar.sync 0;\n", ""), {"race", "uninitialised"}),
        (("cp.async.wait_group 1;\nbar.sync 0;", "bar.sync 0;\ncp.async.wait_group 1;"), {"race", "uninitialised"}),
        (("[%r4+1024]", "[%r4]"), {"race", "uninitialised"}),  # the second group is not waited for
        (("[%r4+1024]", "[%r4+1032]"), {"misaligned"}),
        (("[%r4+1024]", "[%r4+1040]"), {"out of bounds"}),
    ],
)  # fmt: skip
def test_a_copy_that_is_used_too_early_is_a_fault(change, kind, rounding):
    x, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    assert change[0] in COPY
    with pytest.raises(Fault) as said:
        launch(COPY.replace(*change), x, out, threads=64, shared=2048, rounding=rounding)
    assert said.value.kind in kind


def test_lanes_part_and_meet_again():
    """A loop of i rounds in lane i, then a shuffle of all."""
    out = np.zeros(64, np.uint32)
    launch(
        own(1) + """and.b32 %r1, %r9, 31;
        mov.b32 %r2, 0;
        setp.eq.b32 %p1, %r1, 0;
        @%p1 bra $L_done;
        $L_more:
        add.s32 %r2, %r2, %r1;
        sub.s32 %r1, %r1, 1;
        setp.gt.s32 %p1, %r1, 0;
        @%p1 bra $L_more;
        $L_done:
        shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
        st.global.b32 [%rd0], %r3;""", out, threads=64,
    )  # fmt: skip
    lane = (np.arange(64) % 32) ^ 1
    assert (out == lane * (lane + 1) // 2).all()
