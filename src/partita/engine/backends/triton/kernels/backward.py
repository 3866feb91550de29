"""Gradients of a pass: scores are computed again, and every number has one owner.

    rows   a program owns a tile of rows and goes over the keys: query, scale, bias by row
    keys   a program owns a tile of keys and goes over the rows of all entries that share it: key, value, bias by key
    pairs  a program owns a tile of both and goes over the entries that share a dense bias

The owner adds in a fixed order: the same call gives the same bits. `members` lists the batch entries that share a key,
or a bias. Legend and switches as in `forward`; `g` is upstream, what flows back to a score is in `flow`.
CAREFUL cleans the factor that a gradient of 0 meets: nan and inf in a row or key must not reach what does not see it.
"""

import triton
import triton.language as tl

from partita.engine.backends.triton.kernels.common import any_of, scores, visibility
from partita.engine.backends.triton.kernels.flow import flow, upstream
from partita.engine.backends.triton.kernels.sides import features, key_side, reach, row_side


@triton.jit
def sweep(o, rows, pull, keys, seen, cols, S: tl.constexpr):
    """Over a tile of rows goes a tile of keys: these (D, N), ds as the bias gets it, and ds as the product gets it."""
    d = tl.arange(0, S.BLOCK_D).to(S.INDEX)
    dv = tl.arange(0, S.BLOCK_V).to(S.INDEX)
    k = features(keys.key, d[:, None], cols[None, :], o.key.col, o.key.row, S.D, o.n_key, S.DOT)
    v = k
    if S.VALUE:  # before the first product: a barrier between the two would keep one's factors in registers
        v = features(keys.value, dv[:, None], cols[None, :], o.value.col, o.value.row, S.V, o.n_key, S.DOT)
    s2, slope = scores(rows.query, k, seen, o, rows, keys, cols[None, :], S, False)
    along = s2
    if S.VALUE:
        along = tl.dot(pull.toward, v, input_precision=S.PRECISION, out_dtype=S.ACC)
    _, ds, inner = flow(s2, slope, along, rows, pull, cols[None, :], S, False)
    return k, ds, inner


@triton.jit
def rows(o, g, query_out, scale_out, bias_out, flags, S: tl.constexpr):
    LOW: tl.constexpr = o.query.at.dtype.element_ty
    SKIPS: tl.constexpr = (S.SEGMENT | S.MASK) & (S.DOT != tl.float32)  # noqa: SIM300  (as in `forward`)
    program = tl.program_id(0)
    blocks = tl.cdiv(o.n_query, S.BLOCK_M)
    entry = program // blocks
    if S.CAREFUL:  # noqa: SIM102
        if tl.load(flags + entry * tl.cdiv(o.n_query, S.FLAGGED) + program % blocks * S.BLOCK_M // S.FLAGGED) == 0:
            return
    own = ((program % blocks) * S.BLOCK_M + tl.arange(0, S.BLOCK_M)).to(S.INDEX)
    d = tl.arange(0, S.BLOCK_D).to(S.INDEX)
    mine = row_side(o, entry, own, S)
    theirs = key_side(o, entry, S)
    pull = upstream(g, entry, own, o.n_query, S)
    lo, hi = reach(o, mine, S)
    acc = tl.zeros((S.BLOCK_M, S.BLOCK_D), S.ACC)
    total = tl.zeros((S.BLOCK_M,), S.ACC)
    for n in tl.range(lo, hi, S.BLOCK_N):
        cols = (n + tl.arange(0, S.BLOCK_N)).to(S.INDEX)
        seen = visibility(o, mine, theirs, cols[None, :], S, False)
        if any_of(seen, SKIPS):
            k, ds, inner = sweep(o, mine, pull, theirs, seen, cols, S)
            if S.BIAS_OUT:
                total += tl.sum(ds, 1)
            if S.QUERY_OUT | S.SCALE_OUT:
                if S.CAREFUL:
                    k = tl.where(k - k == 0, k, 0.0).to(S.DOT)
                acc = tl.dot(inner.to(LOW).to(S.DOT), tl.trans(k), acc, input_precision=S.PRECISION, out_dtype=S.ACC)
    there = own < o.n_query
    at = entry.to(tl.int64) * o.n_query + own
    if S.QUERY_OUT:
        whole = there[:, None] & (d < S.D)[None, :]
        tl.store(query_out + at[:, None] * S.D + d[None, :], acc * mine.scale[:, None], mask=whole)
    if S.SCALE_OUT:
        q = mine.query
        tl.store(scale_out + at, tl.sum(acc * tl.where(q - q == 0, q, 0.0).to(S.ACC), 1), mask=there)
    if S.BIAS_OUT:
        tl.store(bias_out + at, total, mask=there)
    if not S.CAREFUL:
        tl.store(flags + program, tl.max(tl.where(acc - acc == 0, 0, 1)))


@triton.jit
def keys(o, g, key_out, value_out, bias_out, members, n_members, bounds, flags, S: tl.constexpr):
    LOW: tl.constexpr = o.query.at.dtype.element_ty
    SKIPS: tl.constexpr = (S.SEGMENT | S.MASK) & (S.DOT != tl.float32)  # noqa: SIM300  (as in `forward`)
    program = tl.program_id(0)
    blocks = tl.cdiv(o.n_key, S.BLOCK_N)
    group = program // blocks
    block = program % blocks
    spans = tl.cdiv(o.n_key, S.FLAGGED)
    span = block * S.BLOCK_N // S.FLAGGED  # the tile of the usual pass
    if S.CAREFUL:  # noqa: SIM102
        if tl.load(flags + group * spans + span) == 0:
            return
    cols = (block * S.BLOCK_N + tl.arange(0, S.BLOCK_N)).to(S.INDEX)
    inside = cols < o.n_key
    d = tl.arange(0, S.BLOCK_D).to(S.INDEX)
    dv = tl.arange(0, S.BLOCK_V).to(S.INDEX)
    key_acc = tl.zeros((S.BLOCK_N, S.BLOCK_D), S.ACC)
    value_acc = tl.zeros((S.BLOCK_N, S.BLOCK_V), S.ACC)
    bias_acc = tl.zeros((S.BLOCK_N,), S.ACC)
    for member in tl.range(0, n_members):
        entry = tl.load(members + group * n_members + member)
        theirs = key_side(o, entry, S)
        k = features(theirs.key, cols[:, None], d[None, :], o.key.row, o.key.col, o.n_key, S.D, S.DOT)
        v = k
        if S.VALUE:
            v = features(theirs.value, cols[:, None], dv[None, :], o.value.row, o.value.col, o.n_key, S.V, S.DOT)
        lo = 0
        hi = o.n_query
        if S.START | S.STOP:  # the rows that may see this tile
            here = bounds + (entry.to(tl.int64) * spans + span) * 2
            lo = tl.load(here)
            hi = tl.load(here + 1)
        for m in tl.range(lo, hi, S.BLOCK_M):
            own = (m + tl.arange(0, S.BLOCK_M)).to(S.INDEX)
            mine = row_side(o, entry, own, S)
            seen = visibility(o, mine, theirs, cols[:, None], S, True)
            if any_of(seen, SKIPS):
                pull = upstream(g, entry, own, o.n_query, S)
                s2, slope = scores(k, tl.trans(mine.query), seen, o, mine, theirs, cols[:, None], S, True)
                along = s2
                if S.VALUE:
                    along = tl.dot(v, tl.trans(pull.toward), input_precision=S.PRECISION, out_dtype=S.ACC)
                e, ds, inner = flow(s2, slope, along, mine, pull, cols[:, None], S, True)
                if S.BIAS_OUT:
                    bias_acc += tl.sum(ds, 1)
                if S.VALUE_OUT:
                    e = e.to(LOW).to(S.DOT)
                    value_acc = tl.dot(e, pull.toward, value_acc, input_precision=S.PRECISION, out_dtype=S.ACC)
                if S.KEY_OUT:
                    q = mine.query
                    if S.CAREFUL:
                        q = tl.where(q - q == 0, q, 0.0).to(S.DOT)
                    weight = (inner * mine.scale[None, :]).to(LOW).to(S.DOT)
                    key_acc = tl.dot(weight, q, key_acc, input_precision=S.PRECISION, out_dtype=S.ACC)
    at = group.to(tl.int64) * o.n_key + cols
    if S.KEY_OUT:
        whole = inside[:, None] & (d < S.D)[None, :]
        tl.store(key_out + at[:, None] * S.D + d[None, :], key_acc, mask=whole)
    if S.VALUE_OUT:
        whole = inside[:, None] & (dv < S.V)[None, :]
        tl.store(value_out + at[:, None] * S.V + dv[None, :], value_acc, mask=whole)
    if S.BIAS_OUT:
        tl.store(bias_out + at, bias_acc, mask=inside)
    if not S.CAREFUL:
        tl.store(flags + program, tl.max(tl.where(key_acc - key_acc == 0, 0, 1)))


@triton.jit
def pairs(o, g, bias_out, members, n_members, S: tl.constexpr):
    SKIPS: tl.constexpr = (S.START | S.STOP | S.SEGMENT | S.MASK) & (S.DOT != tl.float32)  # noqa: SIM300
    program = tl.program_id(0)
    across = tl.cdiv(o.n_key, S.BLOCK_N)
    down = tl.cdiv(o.n_query, S.BLOCK_M)
    group = program // (across * down)
    own = ((program // across) % down * S.BLOCK_M + tl.arange(0, S.BLOCK_M)).to(S.INDEX)
    cols = (program % across * S.BLOCK_N + tl.arange(0, S.BLOCK_N)).to(S.INDEX)
    inside = cols < o.n_key
    acc = tl.zeros((S.BLOCK_M, S.BLOCK_N), S.ACC)
    for member in tl.range(0, n_members):
        entry = tl.load(members + group * n_members + member)
        mine = row_side(o, entry, own, S)
        theirs = key_side(o, entry, S)
        seen = visibility(o, mine, theirs, cols[None, :], S, False)
        if any_of(seen, SKIPS):
            pull = upstream(g, entry, own, o.n_query, S)
            _, ds, _ = sweep(o, mine, pull, theirs, seen, cols, S)
            acc += ds
    whole = (own < o.n_query)[:, None] & inside[None, :]
    at = (group.to(tl.int64) * o.n_query + own)[:, None] * o.n_key + cols[None, :]
    tl.store(bias_out + at, acc, mask=whole)
