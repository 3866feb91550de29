"""Gradients of a pass: scores are computed again, and every number has one owner.

    rows   a program owns a tile of rows and goes over the keys: query, scale, bias by row
    keys   a program owns a tile of keys and goes over the rows of all entries that share it: key, value, bias by key
    pairs  a program owns a tile of both and goes over the entries that share a dense bias

The owner adds in a fixed order: the same call gives the same bits. `members` lists the batch entries that share a key,
or a bias. Legend and switches as in `forward`; what flows back to a score is in `flow`.
CAREFUL cleans the factor that a gradient of 0 meets: nan and inf in a row or key must not reach what does not see it.
"""

import triton
import triton.language as tl

from partita.engine.backends.triton.kernels.common import features, key_side, row_side, scores, visibility
from partita.engine.backends.triton.kernels.flow import flow, upstream


@triton.jit
def rows(
    query, key, value, scale, bias, target, start, stop, query_segment, key_segment, mask, offsets,
    peak, g_mass, g_first, g_second, g_moment, g_target, query_out, scale_out, bias_out, flags,
    query_row, query_col, key_row, key_col, value_row, value_col, scale_row, bias_row, bias_col, target_row,
    start_row, stop_row, segment_row, key_segment_col, mask_row, mask_col,
    n_batch, n_query, n_key,
    D: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LEVEL: tl.constexpr, VALUE: tl.constexpr, TARGET: tl.constexpr,
    QUERY_OUT: tl.constexpr, SCALE_OUT: tl.constexpr, BIAS_OUT: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, CAP_BIAS: tl.constexpr,
    START: tl.constexpr, STOP: tl.constexpr, SEGMENT: tl.constexpr, MASK: tl.constexpr, HOLE: tl.constexpr,
    CAREFUL: tl.constexpr, FLAGGED: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, INDEX: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    LOW: tl.constexpr = query.dtype.element_ty
    SKIPS: tl.constexpr = (SEGMENT | MASK) & (DOT != tl.float32)  # noqa: SIM300  (as in `forward`)
    program = tl.program_id(0)
    blocks = tl.cdiv(n_query, BLOCK_M)
    entry = program // blocks
    if CAREFUL:  # noqa: SIM102
        if tl.load(flags + entry * tl.cdiv(n_query, FLAGGED) + program % blocks * BLOCK_M // FLAGGED) == 0:
            return
    own = ((program % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)).to(INDEX)
    d = tl.arange(0, BLOCK_D).to(INDEX)
    dv = tl.arange(0, BLOCK_V).to(INDEX)
    q, sharp, aim, begin, end, segment = row_side(
        query, scale, target, start, stop, query_segment, offsets, entry, own,
        query_row, query_col, scale_row, target_row, start_row, stop_row, segment_row, n_batch, n_query, n_key,
        D, BLOCK_D, TARGET, START, STOP, SEGMENT, DOT, INDEX, ALIGN,
    )  # fmt: skip
    key_at, value_at, bias_at, key_segment_at, mask_at = key_side(
        key, value, bias, key_segment, mask, offsets, entry, n_batch, VALUE, BIAS, SEGMENT, MASK, ALIGN
    )
    level, a, b, c, aimed, toward = upstream(
        peak, g_mass, g_first, g_second, g_moment, g_target, entry, own, n_query,
        V, BLOCK_V, LEVEL, VALUE, TARGET, DOT, ACC,
    )  # fmt: skip
    lo = 0
    hi = n_key
    if START:
        lo = tl.min(begin, 0) // BLOCK_N * BLOCK_N
    if STOP:
        hi = tl.max(end, 0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    total = tl.zeros((BLOCK_M,), ACC)
    for n in tl.range(lo, hi, BLOCK_N):
        cols = (n + tl.arange(0, BLOCK_N)).to(INDEX)
        seen = visibility(
            own[:, None], cols[None, :], begin[:, None], end[:, None], segment[:, None],
            key_segment_at, mask_at, key_segment_col, mask_row, mask_col,
            n_query, n_key, START, STOP, SEGMENT, MASK, HOLE,
        )  # fmt: skip
        todo = True
        if SKIPS:
            todo = tl.max(seen.to(tl.int32)) > 0
        if todo:
            k = features(key_at, d[:, None], cols[None, :], key_col, key_row, D, n_key, DOT)
            v = k
            if VALUE:  # before the first product: a barrier between the two would keep one's factors in registers
                v = features(value_at, dv[:, None], cols[None, :], value_col, value_row, V, n_key, DOT)
            s2, slope = scores(
                q, k, seen, sharp[:, None], own[:, None], cols[None, :], bias_at, bias_row, bias_col,
                n_query, n_key, BIAS, SOFTCAP, CAP_BIAS, ACC, PRECISION,
            )  # fmt: skip
            along = s2
            if VALUE:
                along = tl.dot(toward, v, input_precision=PRECISION, out_dtype=ACC)
            _, ds, inner = flow(
                s2, slope, along, cols[None, :], level[:, None], a[:, None], b[:, None], c[:, None],
                aim[:, None], aimed[:, None], LEVEL, VALUE, TARGET, SOFTCAP, CAP_BIAS,
            )  # fmt: skip
            if BIAS_OUT:
                total += tl.sum(ds, 1)
            if QUERY_OUT | SCALE_OUT:
                if CAREFUL:
                    k = tl.where(k - k == 0, k, 0.0).to(DOT)
                acc = tl.dot(inner.to(LOW).to(DOT), tl.trans(k), acc, input_precision=PRECISION, out_dtype=ACC)
    there = own < n_query
    at = entry.to(tl.int64) * n_query + own
    if QUERY_OUT:
        whole = there[:, None] & (d < D)[None, :]
        tl.store(query_out + at[:, None] * D + d[None, :], acc * sharp[:, None], mask=whole)
    if SCALE_OUT:
        tl.store(scale_out + at, tl.sum(acc * tl.where(q - q == 0, q, 0.0).to(ACC), 1), mask=there)
    if BIAS_OUT:
        tl.store(bias_out + at, total, mask=there)
    if not CAREFUL:
        tl.store(flags + program, tl.max(tl.where(acc - acc == 0, 0, 1)))


@triton.jit
def keys(
    query, key, value, scale, bias, target, start, stop, query_segment, key_segment, mask, offsets,
    peak, g_mass, g_first, g_second, g_moment, g_target, members, bounds, key_out, value_out, bias_out, flags,
    query_row, query_col, key_row, key_col, value_row, value_col, scale_row, bias_row, bias_col, target_row,
    start_row, stop_row, segment_row, key_segment_col, mask_row, mask_col,
    n_batch, n_query, n_key, n_members,
    D: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LEVEL: tl.constexpr, VALUE: tl.constexpr, TARGET: tl.constexpr,
    KEY_OUT: tl.constexpr, VALUE_OUT: tl.constexpr, BIAS_OUT: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, CAP_BIAS: tl.constexpr,
    START: tl.constexpr, STOP: tl.constexpr, SEGMENT: tl.constexpr, MASK: tl.constexpr, HOLE: tl.constexpr,
    CAREFUL: tl.constexpr, FLAGGED: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, INDEX: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    LOW: tl.constexpr = query.dtype.element_ty
    SKIPS: tl.constexpr = (SEGMENT | MASK) & (DOT != tl.float32)  # noqa: SIM300  (as in `forward`)
    program = tl.program_id(0)
    blocks = tl.cdiv(n_key, BLOCK_N)
    group = program // blocks
    block = program % blocks
    spans = tl.cdiv(n_key, FLAGGED)
    span = block * BLOCK_N // FLAGGED  # the tile of the usual pass
    if CAREFUL:  # noqa: SIM102
        if tl.load(flags + group * spans + span) == 0:
            return
    cols = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX)
    inside = cols < n_key
    d = tl.arange(0, BLOCK_D).to(INDEX)
    dv = tl.arange(0, BLOCK_V).to(INDEX)
    key_acc = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    value_acc = tl.zeros((BLOCK_N, BLOCK_V), ACC)
    bias_acc = tl.zeros((BLOCK_N,), ACC)
    for member in tl.range(0, n_members):
        entry = tl.load(members + group * n_members + member)
        key_at, value_at, bias_at, key_segment_at, mask_at = key_side(
            key, value, bias, key_segment, mask, offsets, entry, n_batch, VALUE, BIAS, SEGMENT, MASK, ALIGN
        )
        k = features(key_at, cols[:, None], d[None, :], key_row, key_col, n_key, D, DOT)
        v = k
        if VALUE:
            v = features(value_at, cols[:, None], dv[None, :], value_row, value_col, n_key, V, DOT)
        lo = 0
        hi = n_query
        if START | STOP:  # the rows that may see this tile
            here = bounds + (entry.to(tl.int64) * spans + span) * 2
            lo = tl.load(here)
            hi = tl.load(here + 1)
        for m in tl.range(lo, hi, BLOCK_M):
            own = (m + tl.arange(0, BLOCK_M)).to(INDEX)
            q, sharp, aim, begin, end, segment = row_side(
                query, scale, target, start, stop, query_segment, offsets, entry, own,
                query_row, query_col, scale_row, target_row, start_row, stop_row, segment_row, n_batch, n_query, n_key,
                D, BLOCK_D, TARGET, START, STOP, SEGMENT, DOT, INDEX, ALIGN,
            )  # fmt: skip
            seen = visibility(
                own[None, :], cols[:, None], begin[None, :], end[None, :], segment[None, :],
                key_segment_at, mask_at, key_segment_col, mask_row, mask_col,
                n_query, n_key, START, STOP, SEGMENT, MASK, HOLE,
            )  # fmt: skip
            todo = True
            if SKIPS:
                todo = tl.max(seen.to(tl.int32)) > 0
            if todo:
                level, a, b, c, aimed, toward = upstream(
                    peak, g_mass, g_first, g_second, g_moment, g_target, entry, own, n_query,
                    V, BLOCK_V, LEVEL, VALUE, TARGET, DOT, ACC,
                )  # fmt: skip
                s2, slope = scores(
                    k, tl.trans(q), seen, sharp[None, :], own[None, :], cols[:, None], bias_at, bias_row, bias_col,
                    n_query, n_key, BIAS, SOFTCAP, CAP_BIAS, ACC, PRECISION,
                )  # fmt: skip
                along = s2
                if VALUE:
                    along = tl.dot(v, tl.trans(toward), input_precision=PRECISION, out_dtype=ACC)
                e, ds, inner = flow(
                    s2, slope, along, cols[:, None], level[None, :], a[None, :], b[None, :], c[None, :],
                    aim[None, :], aimed[None, :], LEVEL, VALUE, TARGET, SOFTCAP, CAP_BIAS,
                )  # fmt: skip
                if BIAS_OUT:
                    bias_acc += tl.sum(ds, 1)
                if VALUE_OUT:
                    value_acc = tl.dot(e.to(LOW).to(DOT), toward, value_acc, input_precision=PRECISION, out_dtype=ACC)
                if KEY_OUT:
                    if CAREFUL:
                        q = tl.where(q - q == 0, q, 0.0).to(DOT)
                    weight = (inner * sharp[None, :]).to(LOW).to(DOT)
                    key_acc = tl.dot(weight, q, key_acc, input_precision=PRECISION, out_dtype=ACC)
    at = group.to(tl.int64) * n_key + cols
    if KEY_OUT:
        whole = inside[:, None] & (d < D)[None, :]
        tl.store(key_out + at[:, None] * D + d[None, :], key_acc, mask=whole)
    if VALUE_OUT:
        whole = inside[:, None] & (dv < V)[None, :]
        tl.store(value_out + at[:, None] * V + dv[None, :], value_acc, mask=whole)
    if BIAS_OUT:
        tl.store(bias_out + at, bias_acc, mask=inside)
    if not CAREFUL:
        tl.store(flags + program, tl.max(tl.where(key_acc - key_acc == 0, 0, 1)))


@triton.jit
def pairs(
    query, key, value, scale, bias, target, start, stop, query_segment, key_segment, mask, offsets,
    peak, g_mass, g_first, g_second, g_moment, g_target, members, bias_out,
    query_row, query_col, key_row, key_col, value_row, value_col, scale_row, bias_row, bias_col, target_row,
    start_row, stop_row, segment_row, key_segment_col, mask_row, mask_col,
    n_batch, n_query, n_key, n_members,
    D: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LEVEL: tl.constexpr, VALUE: tl.constexpr, TARGET: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, CAP_BIAS: tl.constexpr,
    START: tl.constexpr, STOP: tl.constexpr, SEGMENT: tl.constexpr, MASK: tl.constexpr, HOLE: tl.constexpr,
    ACC: tl.constexpr, DOT: tl.constexpr, INDEX: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    SKIPS: tl.constexpr = (START | STOP | SEGMENT | MASK) & (DOT != tl.float32)  # noqa: SIM300
    program = tl.program_id(0)
    across = tl.cdiv(n_key, BLOCK_N)
    down = tl.cdiv(n_query, BLOCK_M)
    group = program // (across * down)
    own = ((program // across) % down * BLOCK_M + tl.arange(0, BLOCK_M)).to(INDEX)
    cols = (program % across * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX)
    inside = cols < n_key
    d = tl.arange(0, BLOCK_D).to(INDEX)
    dv = tl.arange(0, BLOCK_V).to(INDEX)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for member in tl.range(0, n_members):
        entry = tl.load(members + group * n_members + member)
        q, sharp, aim, begin, end, segment = row_side(
            query, scale, target, start, stop, query_segment, offsets, entry, own,
            query_row, query_col, scale_row, target_row, start_row, stop_row, segment_row, n_batch, n_query, n_key,
            D, BLOCK_D, TARGET, START, STOP, SEGMENT, DOT, INDEX, ALIGN,
        )  # fmt: skip
        key_at, value_at, bias_at, key_segment_at, mask_at = key_side(
            key, value, bias, key_segment, mask, offsets, entry, n_batch, VALUE, BIAS, SEGMENT, MASK, ALIGN
        )
        seen = visibility(
            own[:, None], cols[None, :], begin[:, None], end[:, None], segment[:, None],
            key_segment_at, mask_at, key_segment_col, mask_row, mask_col,
            n_query, n_key, START, STOP, SEGMENT, MASK, HOLE,
        )  # fmt: skip
        todo = True
        if SKIPS:
            todo = tl.max(seen.to(tl.int32)) > 0
        if todo:
            level, a, b, c, aimed, toward = upstream(
                peak, g_mass, g_first, g_second, g_moment, g_target, entry, own, n_query,
                V, BLOCK_V, LEVEL, VALUE, TARGET, DOT, ACC,
            )  # fmt: skip
            k = features(key_at, d[:, None], cols[None, :], key_col, key_row, D, n_key, DOT)
            v = k
            if VALUE:  # before the first product: a barrier between the two would keep one's factors in registers
                v = features(value_at, dv[:, None], cols[None, :], value_col, value_row, V, n_key, DOT)
            s2, slope = scores(
                q, k, seen, sharp[:, None], own[:, None], cols[None, :], bias_at, bias_row, bias_col,
                n_query, n_key, BIAS, SOFTCAP, CAP_BIAS, ACC, PRECISION,
            )  # fmt: skip
            along = s2
            if VALUE:
                along = tl.dot(toward, v, input_precision=PRECISION, out_dtype=ACC)
            _, ds, _ = flow(
                s2, slope, along, cols[None, :], level[:, None], a[:, None], b[:, None], c[:, None],
                aim[:, None], aimed[:, None], LEVEL, VALUE, TARGET, SOFTCAP, CAP_BIAS,
            )  # fmt: skip
            acc += ds
    whole = (own < n_query)[:, None] & inside[None, :]
    at = (group.to(tl.int64) * n_query + own)[:, None] * n_key + cols[None, :]
    tl.store(bias_out + at, acc, mask=whole)
