"""One pass over the keys for a tile of rows: the sums of `engine.state`, merged tile by tile, and their read-out.

Legend: M rows of a tile, N its keys, D features, V value features; B batch entries. Where each entry of an operand
begins stands in `offsets` (one row of B numbers per operand): any broadcast and any stride is served as it lies.

    LEVEL    0: log Z and E[value]    1: also first moments (entropy, mean)    2: also the spread (variance)
    CAREFUL  False: the usual pass; leaves a flag where a moment is not finite
             True: runs after it, does nothing where no flag was left, and else looks at every value: nan and inf in
             a value that a row does not see must not reach it, but 0 * nan is nan. Its tiles are smaller
    FLAGGED  rows (in the backward of the keys: keys) that share a flag, those of a tile of the usual pass
    SPLIT    the keys are shared out over several programs, each of which leaves raw sums for `decode.merge`
    DOT      dtype of the factors of a product: the operands' own, but float32 for bfloat16 in the interpreter
    INDEX    int64 where an operand's entry is too large for offsets in int32
    ALIGN    what divides the offsets of query, key and value: told, 16 bytes are read at once, and not one number
"""

import triton
import triton.language as tl

from partita.engine.backends.triton.kernels.common import (
    LN2,
    LOWEST,
    features,
    key_side,
    row_side,
    scores,
    visibility,
)


@triton.jit
def step(
    peak, mass, first, spread, count, acc, poison, s2, v, LOW: tl.constexpr, DOT: tl.constexpr,
    LEVEL: tl.constexpr, COUNTED: tl.constexpr, VALUE: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
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
    if LEVEL >= 1:
        c = tl.where(c < LOWEST, LOWEST, c)  # a hidden key has e = 0: e * c must be 0 and not nan
        first_here = tl.sum(e * c, 1)
        if LEVEL >= 2:
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
    if VALUE:
        if CAREFUL:
            bad = v - v != 0
            shown = (s2 != float("-inf")).to(DOT)
            high = tl.dot(shown, tl.where(v == float("inf"), 1.0, 0.0).to(DOT), input_precision=PRECISION) > 0
            low = tl.dot(shown, tl.where(v == float("-inf"), 1.0, 0.0).to(DOT), input_precision=PRECISION) > 0
            lost = tl.dot(shown, tl.where(v != v, 1.0, 0.0).to(DOT), input_precision=PRECISION) > 0
            poison += tl.where(high, float("inf"), 0.0)
            poison += tl.where(low, float("-inf"), 0.0)
            poison += tl.where(lost, float("nan"), 0.0)
            v = tl.where(bad, 0.0, v).to(DOT)
        acc = tl.dot(e.to(LOW).to(DOT), v, acc * shrink[:, None], input_precision=PRECISION, out_dtype=acc.dtype)
    return top, mass, first, spread, count, acc, poison


@triton.jit
def read_out(
    at, there, peak, mass, first, spread, count, score,
    peak_at, mass_at, count_at, first_at, spread_at, statistics_at, score_at, total,
    LEVEL: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Row sums in natural units, and the statistics read off them; `total` is B * n_query, `at` where a row stands."""
    filled = tl.where(mass == 0, 1.0, mass)
    empty = (peak == float("-inf")) & (mass == mass)
    high = peak.to(tl.float64) * LN2  # more digits than the sums: the backward pass must find this very peak again
    high = tl.where(mass == mass, high, float("nan"))
    top = high.to(mass.dtype)
    tl.store(peak_at + at, high, mask=there)
    tl.store(mass_at + at, mass, mask=there)
    tl.store(count_at + at, count.to(mass.dtype), mask=there)
    if TARGET:
        tl.store(score_at + at, (score.to(tl.float64) * LN2).to(mass.dtype), mask=there)
    if LEVEL >= 1:
        first = first * LN2
        log_mass = tl.log(filled)
        mean = first / filled
        tl.store(first_at + at, first, mask=there)
        tl.store(statistics_at + at, top + log_mass, mask=there)
        tl.store(statistics_at + total + at, log_mass - mean, mask=there)
        tl.store(statistics_at + 2 * total + at, tl.where(empty, 0.0, top + mean), mask=there)
        tl.store(statistics_at + 4 * total + at, top, mask=there)
        if LEVEL >= 2:
            spread = spread * (LN2 * LN2)
            tl.store(spread_at + at, spread, mask=there)
            tl.store(statistics_at + 3 * total + at, spread / filled, mask=there)


@triton.jit
def forward(
    query, key, value, scale, bias, target, start, stop, query_segment, key_segment, mask, offsets,
    peak_out, mass_out, count_out, first_out, spread_out, statistics_out, moment_out, target_score_out, rank_out, flags,
    query_row, query_col, key_row, key_col, value_row, value_col, scale_row, bias_row, bias_col, target_row,
    start_row, stop_row, segment_row, key_segment_col, mask_row, mask_col, moment_row, moment_col,
    n_batch, n_query, n_key, split_keys,
    D: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LEVEL: tl.constexpr, VALUE: tl.constexpr, MEAN: tl.constexpr, TARGET: tl.constexpr, RANK: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, CAP_BIAS: tl.constexpr,
    START: tl.constexpr, STOP: tl.constexpr, SEGMENT: tl.constexpr, MASK: tl.constexpr, HOLE: tl.constexpr,
    SPLIT: tl.constexpr, CAREFUL: tl.constexpr, FLAGGED: tl.constexpr,
    ACC: tl.constexpr, DOT: tl.constexpr, INDEX: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    LOW: tl.constexpr = query.dtype.element_ty
    COUNTED: tl.constexpr = (BIAS > 0) | SEGMENT | MASK
    # a tile may be empty although its intervals are not; with float32 a branch would end the pipeline, and spill
    SKIPS: tl.constexpr = (SEGMENT | MASK) & (DOT != tl.float32)  # noqa: SIM300
    program = tl.program_id(0)
    blocks = tl.cdiv(n_query, BLOCK_M)
    if CAREFUL:  # noqa: SIM102  (an `and` would ask the flags of every pass)
        if tl.load(flags + program // blocks * tl.cdiv(n_query, FLAGGED) + program % blocks * BLOCK_M // FLAGGED) == 0:
            return
    entry = (program // blocks) % n_batch
    part = program // (blocks * n_batch)
    rows = (program % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = rows < n_query
    wide = rows.to(INDEX)
    d = tl.arange(0, BLOCK_D).to(INDEX)
    dv = tl.arange(0, BLOCK_V).to(INDEX)
    q, sharp, aim, begin, end, segment = row_side(
        query, scale, target, start, stop, query_segment, offsets, entry, wide,
        query_row, query_col, scale_row, target_row, start_row, stop_row, segment_row, n_batch, n_query, n_key,
        D, BLOCK_D, TARGET, START, STOP, SEGMENT, DOT, INDEX, ALIGN,
    )  # fmt: skip
    key_at, value_at, bias_at, key_segment_at, mask_at = key_side(
        key, value, bias, key_segment, mask, offsets, entry, n_batch, VALUE, BIAS, SEGMENT, MASK, ALIGN
    )
    lo = 0
    hi = n_key
    if START:
        lo = tl.min(begin, 0) // BLOCK_N * BLOCK_N
    if STOP:
        hi = tl.max(end, 0)
    if SPLIT:
        lo = tl.maximum(lo, part * split_keys)
        hi = tl.minimum(hi, (part + 1) * split_keys)

    peak = tl.full((BLOCK_M,), float("-inf"), ACC)
    mass = tl.zeros((BLOCK_M,), ACC)
    first = tl.zeros((BLOCK_M,), ACC)
    spread = tl.zeros((BLOCK_M,), ACC)
    count = tl.zeros((BLOCK_M,), tl.int32)
    score = tl.full((BLOCK_M,), float("-inf"), ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_V), ACC)
    poison = tl.zeros((BLOCK_M, BLOCK_V), ACC)
    for n in tl.range(lo, hi, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        far = cols.to(INDEX)
        seen = visibility(
            wide[:, None], far[None, :], begin[:, None], end[:, None], segment[:, None],
            key_segment_at, mask_at, key_segment_col, mask_row, mask_col,
            n_query, n_key, START, STOP, SEGMENT, MASK, HOLE,
        )  # fmt: skip
        todo = True
        if SKIPS:
            todo = tl.max(seen.to(tl.int32)) > 0
        if todo:
            k = features(key_at, d[:, None], far[None, :], key_col, key_row, D, n_key, DOT)
            v = k
            if VALUE:  # before the first product: a barrier between the two would keep one's factors in registers
                v = features(value_at, far[:, None], dv[None, :], value_row, value_col, n_key, V, DOT)
            s2, _ = scores(
                q, k, seen, sharp[:, None], wide[:, None], far[None, :], bias_at, bias_row, bias_col,
                n_query, n_key, BIAS, SOFTCAP, CAP_BIAS, ACC, PRECISION,
            )  # fmt: skip
            if TARGET:
                found = tl.sum(tl.where(aim[:, None] == cols[None, :], s2, 0.0), 1)
                score = tl.where((aim >= n) & (aim < n + BLOCK_N), found, score)
            peak, mass, first, spread, count, acc, poison = step(
                peak, mass, first, spread, count, acc, poison, s2, v, LOW, DOT,
                LEVEL, COUNTED, VALUE, CAREFUL, PRECISION,
            )  # fmt: skip
    if not COUNTED:
        upto = n_key
        if STOP:
            upto = end
        since = 0
        if START:
            since = begin
        if SPLIT:
            since = tl.maximum(since, part * split_keys)
            upto = tl.minimum(upto, (part + 1) * split_keys)
        count = tl.maximum(upto - since, 0) + tl.zeros((BLOCK_M,), tl.int32)
        if HOLE:
            count -= ((rows >= since) & (rows < upto)).to(tl.int32)

    at = (part * n_batch + entry).to(tl.int64) * n_query + rows
    if SPLIT:  # raw, in base 2
        tl.store(peak_out + at, peak, mask=there)
        tl.store(mass_out + at, mass, mask=there)
        tl.store(count_out + at, count.to(ACC), mask=there)
        if LEVEL >= 1:
            tl.store(first_out + at, first, mask=there)
        if LEVEL >= 2:
            tl.store(spread_out + at, spread, mask=there)
        if TARGET:
            tl.store(target_score_out + at, score, mask=there)
    else:
        total = tl.full((), 1, tl.int64) * n_query * n_batch
        read_out(
            at, there, peak, mass, first, spread, count, score, peak_out, mass_out, count_out, first_out,
            spread_out, statistics_out, target_score_out, total, LEVEL, TARGET,
        )  # fmt: skip
    if VALUE:
        moment_at = moment_out + tl.load(offsets + 11 * n_batch + entry)
        if SPLIT:
            moment_at = moment_out + (part * n_batch + entry).to(tl.int64) * n_query * moment_row
        if MEAN:
            acc = acc / tl.where(mass == 0, 1.0, mass)[:, None]
        whole = there[:, None] & (dv < V)[None, :]
        acc = acc + poison
        tl.store(moment_at + wide[:, None] * moment_row + dv[None, :] * moment_col, acc, mask=whole)
        if not CAREFUL:
            tl.store(flags + program, tl.max(tl.where(acc - acc == 0, 0, 1)))
    if RANK:  # only now is the score known that others are compared with, with the same rounding
        rank = tl.zeros((BLOCK_M,), tl.int64)
        for n in tl.range(lo, hi, BLOCK_N):
            cols = n + tl.arange(0, BLOCK_N)
            far = cols.to(INDEX)
            seen = visibility(
                wide[:, None], far[None, :], begin[:, None], end[:, None], segment[:, None],
                key_segment_at, mask_at, key_segment_col, mask_row, mask_col,
                n_query, n_key, START, STOP, SEGMENT, MASK, HOLE,
            )  # fmt: skip
            k = features(key_at, d[:, None], far[None, :], key_col, key_row, D, n_key, DOT)
            s2, _ = scores(
                q, k, seen, sharp[:, None], wide[:, None], far[None, :], bias_at, bias_row, bias_col,
                n_query, n_key, BIAS, SOFTCAP, CAP_BIAS, ACC, PRECISION,
            )  # fmt: skip
            ahead = (s2 > score[:, None]) & (cols[None, :] != aim[:, None])
            rank += tl.sum(ahead.to(tl.int64), 1)
        tl.store(rank_out + at, rank, mask=there)
