"""What flows back to the scores of a tile: one line serves every reader.

    ds = e (g_mass + g_first (1 + c) + g_second (2 c + c^2) + <g_moment, value>) + g_target [j = target]

LEVEL 0 has no g_first and g_second, LEVEL 1 no g_second. Legend and the other switches as in `forward`.
"""

from collections import namedtuple

import triton
import triton.language as tl

from partita.engine.backends.triton.kernels.common import LN2, LOG2E, LOWEST, beside

# Per row of a tile: its peak in base 2, the coefficients of 1, c2 and c2^2, g_target, and g_moment (M, V).
Pull = namedtuple("Pull", "level a b c aimed toward")


@triton.jit
def upstream(g, entry, rows, n_query, S: tl.constexpr):
    """The pull on the rows with these indices, from the gradients `g` of their sums."""
    there = rows < n_query
    at = entry.to(tl.int64) * n_query + rows
    high = tl.load(g.peak + at, mask=there, other=0.0)
    level = tl.where(high == float("-inf"), 0.0, high * LOG2E).to(S.ACC)
    a = tl.load(g.mass + at, mask=there, other=0.0)
    b = a
    c = a
    if S.LEVEL >= 1:
        b = tl.load(g.first + at, mask=there, other=0.0)
        a += b
        if S.LEVEL >= 2:
            c = tl.load(g.second + at, mask=there, other=0.0)
            b += 2 * c
            c = c * (LN2 * LN2)
        b = b * LN2
    aimed = a
    if S.TARGET:
        aimed = tl.load(g.target + at, mask=there, other=0.0)
    dv = tl.arange(0, S.BLOCK_V)
    toward = tl.zeros((1, 1), S.DOT)
    if S.VALUE:
        whole = there[:, None] & (dv < S.V)[None, :]
        toward = tl.load(g.moment + at[:, None] * S.V + dv[None, :], mask=whole, other=0.0).to(S.DOT)
    return Pull(level, a, b, c, aimed, toward)


@triton.jit
def flow(s2, slope, along, rows, pull, cols, S: tl.constexpr, ACROSS: tl.constexpr):
    """e, ds as the bias gets it, and ds as the product of query and key gets it; `along` is <g_moment, value>."""
    level, a = beside(pull.level, ACROSS), beside(pull.a, ACROSS)
    b, c = beside(pull.b, ACROSS), beside(pull.c, ACROSS)
    aim, aimed = beside(rows.aim, ACROSS), beside(pull.aimed, ACROSS)
    hidden = s2 == float("-inf")
    x = s2 - level
    x = tl.where(x < LOWEST, LOWEST, x)
    e = tl.exp2(x)
    total = a
    if S.LEVEL >= 2:
        total += x * (b + x * c)
    elif S.LEVEL >= 1:
        total += x * b
    if S.VALUE:
        total += along
    ds = e * total
    if S.TARGET:
        ds += tl.where(aim == cols, aimed, 0.0)
    ds = tl.where(hidden, 0.0, ds)
    inner = ds
    if S.SOFTCAP > 0.0:
        inner = tl.where(hidden, 0.0, ds * slope)
        if S.CAP_BIAS:
            ds = inner
    return tl.where(hidden, 0.0, e), ds, inner
