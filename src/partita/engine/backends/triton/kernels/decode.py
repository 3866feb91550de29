"""The states of several parts of the keys, merged: the rule of `engine.state.State.merge`, in base 2.

Few rows against a long cache would leave most of a GPU idle. There `forward` runs with SPLIT, one program for each part
of the keys, and leaves `raw` sums (parts, B, Q); here a program owns a tile of rows and adds their parts in order.
"""

import triton
import triton.language as tl

from partita.engine.backends.triton.kernels.common import LOWEST
from partita.engine.backends.triton.kernels.forward import nothing, read_out


@triton.jit
def merge(raw, out, offsets, n_batch, n_query, parts, S: tl.constexpr):
    program = tl.program_id(0)
    blocks = tl.cdiv(n_query, S.BLOCK_M)
    entry = program // blocks
    rows = (program % blocks) * S.BLOCK_M + tl.arange(0, S.BLOCK_M)
    dv = tl.arange(0, S.BLOCK_V)
    there = rows < n_query
    whole = there[:, None] & (dv < S.V)[None, :]
    peak, mass, first, spread, score = nothing(S)
    count = tl.zeros((S.BLOCK_M,), S.ACC)
    acc = tl.zeros((S.BLOCK_M, S.BLOCK_V), S.ACC)
    for part in tl.range(0, parts):
        at = (part * n_batch + entry).to(tl.int64) * n_query + rows
        more = tl.load(raw.peak + at, mask=there, other=float("-inf"))
        here = tl.load(raw.mass + at, mask=there, other=0.0)
        count += tl.load(raw.count + at, mask=there, other=0.0)
        top = tl.maximum(peak, more)
        level = tl.where(top == float("-inf"), 0.0, top)
        down = peak - level
        down = tl.where(down < LOWEST, LOWEST, down)
        aside = more - level
        aside = tl.where(aside < LOWEST, LOWEST, aside)
        shrink, fade = tl.exp2(down), tl.exp2(aside)
        before, after = shrink * mass, fade * here
        if S.LEVEL >= 1:
            first_here = tl.load(raw.first + at, mask=there, other=0.0)
            if S.LEVEL >= 2:
                mean = first / tl.where(mass == 0, 1.0, mass) + down
                gap = mean - (first_here / tl.where(here == 0, 1.0, here) + aside)
                both = before + after
                between = before * (after / tl.where(both == 0, 1.0, both)) * gap * gap
                spread = shrink * spread + fade * tl.load(raw.spread + at, mask=there, other=0.0) + between
            first = shrink * (first + down * mass) + fade * (first_here + aside * here)
        if S.TARGET:
            found = tl.load(raw.target_score + at, mask=there, other=float("-inf"))
            score = tl.where(found == float("-inf"), score, found)
        if S.VALUE:
            moment = tl.load(raw.moment.at + at[:, None] * S.V + dv[None, :], mask=whole, other=0.0)
            # an infinite value that a row sees stays infinite however little it weighs: 0 * inf would be nan
            own = tl.where(acc - acc == 0, acc * shrink[:, None], acc)
            acc = own + tl.where(moment - moment == 0, moment * fade[:, None], moment)
        mass = before + after
        peak = top
    total = tl.full((), 1, tl.int64) * n_query * n_batch
    at = entry.to(tl.int64) * n_query + rows
    read_out(out, at, there, peak, mass, first, spread, count, score, total, S)
    if S.VALUE:
        if S.MEAN:
            acc = acc / tl.where(mass == 0, 1.0, mass)[:, None]
        moment_at = out.moment.at + tl.load(offsets + 11 * n_batch + entry)
        wide = rows.to(tl.int64)
        tl.store(moment_at + wide[:, None] * out.moment.row + dv[None, :] * out.moment.col, acc, mask=whole)
