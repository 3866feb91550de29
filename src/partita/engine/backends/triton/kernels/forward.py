"""One pass over the keys for a tile of rows: the sums of `engine.state`, merged tile by tile, and their read-out.

Legend: M rows of a tile, N its keys, D features, V value features; B batch entries. The operands `o` are those of
`sides`; `out` is where each sum goes. The switches S, in addition to those of `common`:

    LEVEL    0: log Z and E[value]    1: also first moments (entropy, mean)    2: also the spread (variance)
    CAREFUL  False: the usual pass; leaves a flag where a moment is not finite
             True: runs after it, does nothing where no flag was left, and else looks at every value: nan and inf in
             a value that a row does not see must not reach it, but 0 * nan is nan. Its tiles are smaller
    FLAGGED  rows (in the backward of the keys: keys) that share a flag, those of a tile of the usual pass
    SPLIT    the keys are shared out over several programs, each of which leaves raw sums for `decode.merge`
    DOT      dtype of the factors of a product: the operands' own, but float32 for bfloat16 in the interpreter
    INDEX    int64 where an operand's entry is too large for offsets in int32
    ALIGN    what divides the offsets of query, key and value: known, 16 bytes are read at once, and not one number
"""

import triton
import triton.language as tl

from partita.engine.backends.triton.kernels.common import LN2, LOWEST, any_of, scores, visibility
from partita.engine.backends.triton.kernels.sides import features, key_side, reach, row_side


@triton.jit
def nothing(S: tl.constexpr):
    """Peak, mass, first moment, spread and the target's score of no keys."""
    low, zero = tl.full((S.BLOCK_M,), float("-inf"), S.ACC), tl.zeros((S.BLOCK_M,), S.ACC)
    return low, zero, zero, zero, low


@triton.jit
def step(
    peak, mass, first, spread, count, acc, poison, s2, v, LOW: tl.constexpr, COUNTED: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """The sums of the keys so far and of one more tile: `State.merge`, in base 2."""
    top = tl.maximum(peak, tl.max(s2, 1))
    level = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be nan
    c = s2 - level[:, None]
    e = tl.exp2(c)
    down = peak - level
    down = tl.where(down < LOWEST, LOWEST, down)
    shrink = tl.exp2(down)
    here = tl.sum(e, 1)
    before = shrink * mass
    if S.LEVEL >= 1:
        c = tl.where(c < LOWEST, LOWEST, c)  # a hidden key has e = 0: e * c must be 0 and not nan
        first_here = tl.sum(e * c, 1)
        if S.LEVEL >= 2:
            # spread about the tile's own mean, and between the two means: a raw second moment would cancel
            mean_here = first_here / tl.where(here == 0, 1.0, here)
            away = c - mean_here[:, None]
            gap = first / tl.where(mass == 0, 1.0, mass) + down - mean_here
            both = before + here
            between = before * (here / tl.where(both == 0, 1.0, both)) * gap * gap
            spread = shrink * spread + tl.sum(e * away * away, 1) + between
        first = shrink * (first + down * mass) + first_here
    mass = before + here
    if COUNTED:
        count += tl.sum((s2 != float("-inf")).to(tl.int32), 1)
    if S.VALUE:
        if S.CAREFUL:
            bad = v - v != 0
            shown = (s2 != float("-inf")).to(S.DOT)
            high = tl.dot(shown, tl.where(v == float("inf"), 1.0, 0.0).to(S.DOT), input_precision=S.PRECISION) > 0
            low = tl.dot(shown, tl.where(v == float("-inf"), 1.0, 0.0).to(S.DOT), input_precision=S.PRECISION) > 0
            lost = tl.dot(shown, tl.where(v != v, 1.0, 0.0).to(S.DOT), input_precision=S.PRECISION) > 0
            poison += tl.where(high, float("inf"), 0.0)
            poison += tl.where(low, float("-inf"), 0.0)
            poison += tl.where(lost, float("nan"), 0.0)
            v = tl.where(bad, 0.0, v).to(S.DOT)
        acc = tl.dot(e.to(LOW).to(S.DOT), v, acc * shrink[:, None], input_precision=S.PRECISION, out_dtype=acc.dtype)
    return top, mass, first, spread, count, acc, poison


@triton.jit
def read_out(out, at, there, peak, mass, first, spread, count, score, total, S: tl.constexpr):
    """Row sums in natural units, and the statistics read off them; `total` is B * n_query, `at` where a row stands."""
    filled = tl.where(mass == 0, 1.0, mass)
    empty = (peak == float("-inf")) & (mass == mass)
    high = peak.to(tl.float64) * LN2  # more digits than the sums: the backward pass must find this very peak again
    high = tl.where(mass == mass, high, float("nan"))
    top = high.to(mass.dtype)
    tl.store(out.peak + at, high, mask=there)
    tl.store(out.mass + at, mass, mask=there)
    tl.store(out.count + at, count.to(mass.dtype), mask=there)
    if S.TARGET:
        tl.store(out.target_score + at, (score.to(tl.float64) * LN2).to(mass.dtype), mask=there)
    if S.LEVEL >= 1:
        first = first * LN2
        log_mass = tl.log(filled)
        mean = first / filled
        tl.store(out.first + at, first, mask=there)
        tl.store(out.statistics + at, top + log_mass, mask=there)
        tl.store(out.statistics + total + at, log_mass - mean, mask=there)
        tl.store(out.statistics + 2 * total + at, tl.where(empty, 0.0, top + mean), mask=there)
        tl.store(out.statistics + 4 * total + at, top, mask=there)
        if S.LEVEL >= 2:
            spread = spread * (LN2 * LN2)
            tl.store(out.spread + at, spread, mask=there)
            tl.store(out.statistics + 3 * total + at, spread / filled, mask=there)


@triton.jit
def forward(o, out, flags, split_keys, S: tl.constexpr):
    LOW: tl.constexpr = o.query.at.dtype.element_ty
    COUNTED: tl.constexpr = (S.BIAS > 0) | S.SEGMENT | S.MASK
    # a tile may be empty although its intervals are not; with float32 a branch would end the pipeline, and spill
    SKIPS: tl.constexpr = (S.SEGMENT | S.MASK) & (S.DOT != tl.float32)  # noqa: SIM300
    program = tl.program_id(0)
    blocks = tl.cdiv(o.n_query, S.BLOCK_M)
    if S.CAREFUL:
        flag = flags + program // blocks * tl.cdiv(o.n_query, S.FLAGGED)
        if tl.load(flag + program % blocks * S.BLOCK_M // S.FLAGGED) == 0:
            return
    entry = (program // blocks) % o.n_batch
    part = program // (blocks * o.n_batch)
    rows = (program % blocks) * S.BLOCK_M + tl.arange(0, S.BLOCK_M)
    there = rows < o.n_query
    wide = rows.to(S.INDEX)
    d = tl.arange(0, S.BLOCK_D).to(S.INDEX)
    dv = tl.arange(0, S.BLOCK_V).to(S.INDEX)
    mine = row_side(o, entry, wide, S)
    theirs = key_side(o, entry, S)
    lo, hi = reach(o, mine, S)
    if S.SPLIT:
        lo = tl.maximum(lo, part * split_keys)
        hi = tl.minimum(hi, (part + 1) * split_keys)

    peak, mass, first, spread, score = nothing(S)
    count = tl.zeros((S.BLOCK_M,), tl.int32)
    acc = tl.zeros((S.BLOCK_M, S.BLOCK_V), S.ACC)
    poison = tl.zeros((S.BLOCK_M, S.BLOCK_V), S.ACC)
    for n in tl.range(lo, hi, S.BLOCK_N):
        cols = n + tl.arange(0, S.BLOCK_N)
        far = cols.to(S.INDEX)
        seen = visibility(o, mine, theirs, far[None, :], S, False)
        if any_of(seen, SKIPS):
            k = features(theirs.key, d[:, None], far[None, :], o.key.col, o.key.row, S.D, o.n_key, S.DOT)
            v = k
            if S.VALUE:  # before the first product: a barrier between the two would keep one's factors in registers
                v = features(theirs.value, far[:, None], dv[None, :], o.value.row, o.value.col, o.n_key, S.V, S.DOT)
            s2, _ = scores(mine.query, k, seen, o, mine, theirs, far[None, :], S, False)
            if S.TARGET:
                found = tl.sum(tl.where(mine.aim[:, None] == cols[None, :], s2, 0.0), 1)
                score = tl.where((mine.aim >= n) & (mine.aim < n + S.BLOCK_N), found, score)
            peak, mass, first, spread, count, acc, poison = step(
                peak, mass, first, spread, count, acc, poison, s2, v, LOW, COUNTED, S
            )  # fmt: skip
    if not COUNTED:
        upto = o.n_key
        if S.STOP:
            upto = mine.end
        since = 0
        if S.START:
            since = mine.begin
        if S.SPLIT:
            since = tl.maximum(since, part * split_keys)
            upto = tl.minimum(upto, (part + 1) * split_keys)
        count = tl.maximum(upto - since, 0) + tl.zeros((S.BLOCK_M,), tl.int32)
        if S.SKIP:
            count -= ((mine.skip >= since) & (mine.skip < upto)).to(tl.int32)

    at = (part * o.n_batch + entry).to(tl.int64) * o.n_query + rows
    if S.SPLIT:  # raw, in base 2
        tl.store(out.peak + at, peak, mask=there)
        tl.store(out.mass + at, mass, mask=there)
        tl.store(out.count + at, count.to(S.ACC), mask=there)
        if S.LEVEL >= 1:
            tl.store(out.first + at, first, mask=there)
        if S.LEVEL >= 2:
            tl.store(out.spread + at, spread, mask=there)
        if S.TARGET:
            tl.store(out.target_score + at, score, mask=there)
    else:
        total = tl.full((), 1, tl.int64) * o.n_query * o.n_batch
        read_out(out, at, there, peak, mass, first, spread, count, score, total, S)
    if S.VALUE:
        moment_at = out.moment.at + tl.load(o.offsets + 11 * o.n_batch + entry)
        if S.SPLIT:
            moment_at = out.moment.at + (part * o.n_batch + entry).to(tl.int64) * o.n_query * out.moment.row
        if S.MEAN:
            acc = acc / tl.where(mass == 0, 1.0, mass)[:, None]
        whole = there[:, None] & (dv < S.V)[None, :]
        acc = acc + poison
        tl.store(moment_at + wide[:, None] * out.moment.row + dv[None, :] * out.moment.col, acc, mask=whole)
        if not S.CAREFUL:
            tl.store(flags + program, tl.max(tl.where(acc - acc == 0, 0, 1)))
    if S.RANK:  # only now is the score known that others are compared with, with the same rounding
        rank = tl.zeros((S.BLOCK_M,), tl.int64)
        for n in tl.range(lo, hi, S.BLOCK_N):
            cols = n + tl.arange(0, S.BLOCK_N)
            far = cols.to(S.INDEX)
            seen = visibility(o, mine, theirs, far[None, :], S, False)
            k = features(theirs.key, d[:, None], far[None, :], o.key.col, o.key.row, S.D, o.n_key, S.DOT)
            s2, _ = scores(mine.query, k, seen, o, mine, theirs, far[None, :], S, False)
            ahead = (s2 > score[:, None]) & (cols[None, :] != mine.aim[:, None])
            rank += tl.sum(ahead.to(tl.int64), 1)
        tl.store(out.rank + at, rank, mask=there)
