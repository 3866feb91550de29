"""What a tile of rows and the keys of a batch entry bring: read once, before anything is multiplied.

The operands come as one tuple `o`, each in place: `at` is its address, `row` and `col` are how far apart neighbours
are. Where its batch entries begin stands in `o.offsets`, a row of B numbers for each, in the order of the tuple: any
broadcast and any stride is served. The sizes are n_query, n_key and n_batch. Switches S as in `common` and `forward`.
"""

from collections import namedtuple

import triton
import triton.language as tl

# What a tile of rows brings: their indices, queries (M, D), scale, target, first key and key after the last, segment,
# the key that is left out.
Rows = namedtuple("Rows", "at query scale aim begin end segment skip")
# Where an entry's keys, values, biases, segment ids and mask begin; some address stands for what is absent.
Keys = namedtuple("Keys", "key value bias segment mask")


@triton.jit
def features(at, rows, cols, row_step, col_step, n_row, n_col, DOT: tl.constexpr):
    """A tile of queries, keys or values, either way round; 0 beyond them."""
    inside = (rows < n_row) & (cols < n_col)
    return tl.load(at + rows * row_step + cols * col_step, mask=inside, other=0.0).to(DOT)


@triton.jit
def row_side(o, entry, own, S: tl.constexpr):
    """What the rows with these indices bring."""
    there = own < o.n_query
    d = tl.arange(0, S.BLOCK_D).to(S.INDEX)
    at = o.query.at + tl.multiple_of(tl.load(o.offsets + entry), S.ALIGN)
    query = features(at, own[:, None], d[None, :], o.query.row, o.query.col, o.n_query, S.D, S.DOT)
    at_scale = o.scale.at + tl.load(o.offsets + 3 * o.n_batch + entry)
    scale = tl.load(at_scale + own * o.scale.row, mask=there, other=0.0)
    aim = own
    if S.TARGET:
        at_target = o.target.at + tl.load(o.offsets + 5 * o.n_batch + entry)
        aim = tl.load(at_target + own * o.target.row, mask=there, other=-1)
    begin = own
    if S.START:
        at_start = o.start.at + tl.load(o.offsets + 6 * o.n_batch + entry)
        begin = tl.load(at_start + own * o.start.row, mask=there, other=o.n_key)
        begin = tl.minimum(tl.maximum(begin, 0), o.n_key).to(tl.int32)
    end = own
    if S.STOP:
        at_stop = o.stop.at + tl.load(o.offsets + 7 * o.n_batch + entry)
        end = tl.load(at_stop + own * o.stop.row, mask=there, other=0)
        end = tl.minimum(tl.maximum(end, 0), o.n_key).to(tl.int32)
    segment = own
    if S.SEGMENT:
        at_segment = o.query_segment.at + tl.load(o.offsets + 8 * o.n_batch + entry)
        segment = tl.load(at_segment + own * o.query_segment.row, mask=there, other=0)
    skip = own
    if S.SKIP:
        at_skip = o.skip.at + tl.load(o.offsets + 12 * o.n_batch + entry)
        skip = tl.load(at_skip + own * o.skip.row, mask=there, other=-1)
    return Rows(own, query, scale, aim, begin, end, segment, skip)


@triton.jit
def key_side(o, entry, S: tl.constexpr):
    """Where what an entry has for its keys begins."""
    key = o.key.at + tl.multiple_of(tl.load(o.offsets + o.n_batch + entry), S.ALIGN)
    value = key
    if S.VALUE:
        value = o.value.at + tl.multiple_of(tl.load(o.offsets + 2 * o.n_batch + entry), S.ALIGN)
    bias = key
    if S.BIAS > 0:
        bias = o.bias.at + tl.load(o.offsets + 4 * o.n_batch + entry)
    segment = key
    if S.SEGMENT:
        segment = o.key_segment.at + tl.load(o.offsets + 9 * o.n_batch + entry)
    mask = key
    if S.MASK:
        mask = o.mask.at + tl.load(o.offsets + 10 * o.n_batch + entry)
    return Keys(key, value, bias, segment, mask)


@triton.jit
def reach(o, rows, S: tl.constexpr):
    """The first key that one of the rows may see, at the border of a tile, and the key after the last."""
    lo = 0
    hi = o.n_key
    if S.START:
        lo = tl.min(rows.begin, 0) // S.BLOCK_N * S.BLOCK_N
    if S.STOP:
        hi = tl.max(rows.end, 0)
    return lo, hi
