"""What flows back to the scores of a tile: one line serves every reader.

    ds = e (g_mass + g_first (1 + c) + g_second (2 c + c^2) + <g_moment, value>) + g_target [j = target]

LEVEL 0 has no g_first and g_second, LEVEL 1 no g_second. Legend and the other switches as in `forward`.
"""

import triton
import triton.language as tl

from partita.engine.backends.triton.kernels.common import LN2, LOG2E, LOWEST


@triton.jit
def upstream(
    peak, g_mass, g_first, g_second, g_moment, g_target, entry, rows, n_query,
    V: tl.constexpr, BLOCK_V: tl.constexpr, LEVEL: tl.constexpr, VALUE: tl.constexpr, TARGET: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Per row of a tile: its peak in base 2, the coefficients of 1, c2 and c2^2, g_target, and g_moment (M, V)."""
    there = rows < n_query
    at = entry.to(tl.int64) * n_query + rows
    high = tl.load(peak + at, mask=there, other=0.0)
    level = tl.where(high == float("-inf"), 0.0, high * LOG2E).to(ACC)
    a = tl.load(g_mass + at, mask=there, other=0.0)
    b = a
    c = a
    if LEVEL >= 1:
        b = tl.load(g_first + at, mask=there, other=0.0)
        a += b
        if LEVEL >= 2:
            c = tl.load(g_second + at, mask=there, other=0.0)
            b += 2 * c
            c = c * (LN2 * LN2)
        b = b * LN2
    aimed = a
    if TARGET:
        aimed = tl.load(g_target + at, mask=there, other=0.0)
    dv = tl.arange(0, BLOCK_V)
    toward = tl.zeros((1, 1), DOT)
    if VALUE:
        whole = there[:, None] & (dv < V)[None, :]
        toward = tl.load(g_moment + at[:, None] * V + dv[None, :], mask=whole, other=0.0).to(DOT)
    return level, a, b, c, aimed, toward


@triton.jit
def flow(
    s2, slope, along, cols, level, a, b, c, aim, aimed,
    LEVEL: tl.constexpr, VALUE: tl.constexpr, TARGET: tl.constexpr, SOFTCAP: tl.constexpr, CAP_BIAS: tl.constexpr,
):  # fmt: skip
    """e, ds as the bias gets it, and ds as the product of query and key gets it; `along` is <g_moment, value>."""
    hidden = s2 == float("-inf")
    x = s2 - level
    x = tl.where(x < LOWEST, LOWEST, x)
    e = tl.exp2(x)
    pull = a
    if LEVEL >= 2:
        pull += x * (b + x * c)
    elif LEVEL >= 1:
        pull += x * b
    if VALUE:
        pull += along
    ds = e * pull
    if TARGET:
        ds += tl.where(aim == cols, aimed, 0.0)
    ds = tl.where(hidden, 0.0, ds)
    inner = ds
    if SOFTCAP > 0.0:
        inner = tl.where(hidden, 0.0, ds * slope)
        if CAP_BIAS:
            ds = inner
    return tl.where(hidden, 0.0, e), ds, inner
