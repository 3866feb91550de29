"""The states of several parts of the keys, merged: the rule of `engine.state.State.merge`, in base 2.

Few rows against a long cache would leave most of a GPU idle. There `forward` runs with SPLIT, one program for each part
of the keys, and leaves raw sums (parts, B, Q); here a program owns a tile of rows and adds their parts in order.
"""

import triton
import triton.language as tl

from partita.engine.backends.triton.kernels.common import LOWEST
from partita.engine.backends.triton.kernels.forward import read_out


@triton.jit
def merge(
    peak_in, mass_in, count_in, first_in, spread_in, target_score_in, moment_in, offsets,
    peak_out, mass_out, count_out, first_out, spread_out, statistics_out, moment_out, target_score_out,
    moment_row, moment_col, n_batch, n_query, parts,
    V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
    LEVEL: tl.constexpr, VALUE: tl.constexpr, MEAN: tl.constexpr, TARGET: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    blocks = tl.cdiv(n_query, BLOCK_M)
    entry = program // blocks
    rows = (program % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_V)
    there = rows < n_query
    whole = there[:, None] & (dv < V)[None, :]
    peak = tl.full((BLOCK_M,), float("-inf"), ACC)
    mass = tl.zeros((BLOCK_M,), ACC)
    count = tl.zeros((BLOCK_M,), ACC)
    first = tl.zeros((BLOCK_M,), ACC)
    spread = tl.zeros((BLOCK_M,), ACC)
    score = tl.full((BLOCK_M,), float("-inf"), ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_V), ACC)
    for part in tl.range(0, parts):
        at = (part * n_batch + entry).to(tl.int64) * n_query + rows
        more = tl.load(peak_in + at, mask=there, other=float("-inf"))
        here = tl.load(mass_in + at, mask=there, other=0.0)
        count += tl.load(count_in + at, mask=there, other=0.0)
        top = tl.maximum(peak, more)
        level = tl.where(top == float("-inf"), 0.0, top)
        down = peak - level
        down = tl.where(down < LOWEST, LOWEST, down)
        aside = more - level
        aside = tl.where(aside < LOWEST, LOWEST, aside)
        shrink, fade = tl.exp2(down), tl.exp2(aside)
        before, after = shrink * mass, fade * here
        if LEVEL >= 1:
            first_here = tl.load(first_in + at, mask=there, other=0.0)
            if LEVEL >= 2:
                mean = first / tl.where(mass == 0, 1.0, mass) + down
                gap = mean - (first_here / tl.where(here == 0, 1.0, here) + aside)
                both = before + after
                between = before * (after / tl.where(both == 0, 1.0, both)) * gap * gap
                spread = shrink * spread + fade * tl.load(spread_in + at, mask=there, other=0.0) + between
            first = shrink * (first + down * mass) + fade * (first_here + aside * here)
        if TARGET:
            found = tl.load(target_score_in + at, mask=there, other=float("-inf"))
            score = tl.where(found == float("-inf"), score, found)
        if VALUE:
            moment = tl.load(moment_in + at[:, None] * V + dv[None, :], mask=whole, other=0.0)
            # an infinite value that a row sees stays infinite however little it weighs: 0 * inf would be nan
            own = tl.where(acc - acc == 0, acc * shrink[:, None], acc)
            acc = own + tl.where(moment - moment == 0, moment * fade[:, None], moment)
        mass = before + after
        peak = top
    total = tl.full((), 1, tl.int64) * n_query * n_batch
    at = entry.to(tl.int64) * n_query + rows
    read_out(
        at, there, peak, mass, first, spread, count, score, peak_out, mass_out, count_out, first_out, spread_out,
        statistics_out, target_score_out, total, LEVEL, TARGET,
    )  # fmt: skip
    if VALUE:
        if MEAN:
            acc = acc / tl.where(mass == 0, 1.0, mass)[:, None]
        moment_at = moment_out + tl.load(offsets + 11 * n_batch + entry)
        wide = rows.to(tl.int64)
        tl.store(moment_at + wide[:, None] * moment_row + dv[None, :] * moment_col, acc, mask=whole)
