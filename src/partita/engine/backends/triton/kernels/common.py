"""What every kernel shares: which keys a tile's rows see, and their scores.

    s2 = log2(e) (softcap(scale <query, key>) + bias)        -inf where a row does not see a key

Scores are in base 2, since a GPU has exp2 and no exp: one multiplication less for every score. What leaves a kernel is
natural again. Legend: M rows of a tile, N its keys; `rows` and `cols` are their indices. A tile may lie either way:
what belongs to rows comes as (M, 1) and what belongs to keys as (1, N), or as (1, M) and (N, 1).

Every switch is a constexpr, so what is not asked for costs nothing:
    BIAS          0 none, 1 by row, 2 by key, 3 dense          CAP_BIAS    it is added before the softcap
    START, STOP   row intervals       SEGMENT  ids             MASK, HOLE  as in `engine.terms`
    SOFTCAP       0.0 is none         PRECISION                of float32 products: ieee or tf32
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e5)  # exp2 of it is 0, its square is finite in float32


@triton.jit
def tanh(x):
    """Odd, and right to the last digits near 0: 1 - 2 / (1 + exp(2 x)) alone would have none of them left there."""
    size = tl.abs(x)
    t = tl.exp2(-2.8853900817779268 * size)  # exp(-2 size)
    far = (1 - t) / (1 + t)
    if x.dtype == tl.float64:
        return tl.where(x < 0, -far, far)
    # the series of tanh(x) / x up to x^12: what is left out is below a unit of float32 up to 0.4
    z = x * x
    near = -0.0088632355 + z * 0.0035921280
    near = 0.0218694885 + z * near
    near = -0.0539682540 + z * near
    near = 0.1333333333 + z * near
    near = -0.3333333333 + z * near
    return tl.where(size < 0.4, x + x * z * near, tl.where(x < 0, -far, far))


@triton.jit
def visibility(
    rows, cols, start, stop, segment, key_segment_at, mask_at,
    key_segment_col, mask_row, mask_col, n_query, n_key,
    START: tl.constexpr, STOP: tl.constexpr, SEGMENT: tl.constexpr, MASK: tl.constexpr, HOLE: tl.constexpr,
):  # fmt: skip
    """Which keys each row sees, as far as the support tells; start, stop and segment are those of the rows."""
    seen = (rows < n_query) & (cols < n_key)
    inside = seen
    if START:
        seen = seen & (cols >= start)
    if STOP:
        seen = seen & (cols < stop)
    if SEGMENT:
        own = tl.load(key_segment_at + cols * key_segment_col, mask=cols < n_key, other=0)
        seen = seen & (segment == own)
    if MASK:
        shown = tl.load(mask_at + rows * mask_row + cols * mask_col, mask=inside, other=0)
        seen = seen & (shown != 0)
    if HOLE:
        seen = seen & (rows != cols)
    return seen


@triton.jit
def features(at, rows, cols, row_step, col_step, n_row, n_col, DOT: tl.constexpr):
    """A tile of queries, keys or values, either way round; 0 beyond them."""
    inside = (rows < n_row) & (cols < n_col)
    return tl.load(at + rows * row_step + cols * col_step, mask=inside, other=0.0).to(DOT)


@triton.jit
def scores(
    left, right, seen, scale, rows, cols, bias_at, bias_row, bias_col, n_query, n_key,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, CAP_BIAS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in base 2, -inf where nothing is seen or a bias is -inf, and the softcap's slope.

    Whoever asks later what is seen asks the scores: a mask that is kept takes registers.
    """
    product = tl.dot(left, right, input_precision=PRECISION, out_dtype=ACC)
    slope = product
    if BIAS == 0:
        if SOFTCAP == 0.0:
            s2 = product * (scale * LOG2E)
        else:
            t = tanh(product * (scale / SOFTCAP))
            s2 = t * (SOFTCAP * LOG2E)
            slope = 1 - t * t
    else:
        if BIAS == 1:
            bias = tl.load(bias_at + rows * bias_row, mask=rows < n_query, other=0.0)
        elif BIAS == 2:
            bias = tl.load(bias_at + cols * bias_col, mask=cols < n_key, other=0.0)
        else:
            bias = tl.load(bias_at + rows * bias_row + cols * bias_col, mask=seen, other=0.0)
        bias = bias.to(product.dtype)
        seen = seen & (bias != float("-inf"))
        if SOFTCAP == 0.0:
            s2 = product * (scale * LOG2E) + bias * LOG2E
        elif CAP_BIAS:
            t = tanh((product * scale + bias) * (1.0 / SOFTCAP))
            s2 = t * (SOFTCAP * LOG2E)
            slope = 1 - t * t
        else:
            t = tanh(product * (scale / SOFTCAP))
            s2 = t * (SOFTCAP * LOG2E) + bias * LOG2E
            slope = 1 - t * t
    return tl.where(seen, s2, float("-inf")), slope


@triton.jit
def row_side(
    query, scale, target, start, stop, query_segment, offsets, entry, rows,
    query_row, query_col, scale_row, target_row, start_row, stop_row, segment_row, n_batch, n_query, n_key,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr, START: tl.constexpr, STOP: tl.constexpr,
    SEGMENT: tl.constexpr, DOT: tl.constexpr, INDEX: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """What a tile of rows brings: queries (M, D), scale, target, first key and key after the last, segment."""
    there = rows < n_query
    d = tl.arange(0, BLOCK_D).to(INDEX)
    at = query + tl.multiple_of(tl.load(offsets + entry), ALIGN)
    q = features(at, rows[:, None], d[None, :], query_row, query_col, n_query, D, DOT)
    sharp = tl.load(scale + tl.load(offsets + 3 * n_batch + entry) + rows * scale_row, mask=there, other=0.0)
    aim = rows
    if TARGET:
        aim = tl.load(target + tl.load(offsets + 5 * n_batch + entry) + rows * target_row, mask=there, other=-1)
    begin = rows
    if START:
        begin = tl.load(start + tl.load(offsets + 6 * n_batch + entry) + rows * start_row, mask=there, other=n_key)
        begin = tl.minimum(tl.maximum(begin, 0), n_key).to(tl.int32)
    end = rows
    if STOP:
        end = tl.load(stop + tl.load(offsets + 7 * n_batch + entry) + rows * stop_row, mask=there, other=0)
        end = tl.minimum(tl.maximum(end, 0), n_key).to(tl.int32)
    segment = rows
    if SEGMENT:
        at_segment = query_segment + tl.load(offsets + 8 * n_batch + entry)
        segment = tl.load(at_segment + rows * segment_row, mask=there, other=0)
    return q, sharp, aim, begin, end, segment


@triton.jit
def key_side(
    key, value, bias, key_segment, mask, offsets, entry, n_batch,
    VALUE: tl.constexpr, BIAS: tl.constexpr, SEGMENT: tl.constexpr, MASK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Where an entry's keys, values, biases, segment ids and mask begin; some address stands for what is absent."""
    key_at = key + tl.multiple_of(tl.load(offsets + n_batch + entry), ALIGN)
    value_at = key_at
    if VALUE:
        value_at = value + tl.multiple_of(tl.load(offsets + 2 * n_batch + entry), ALIGN)
    bias_at = key_at
    if BIAS > 0:
        bias_at = bias + tl.load(offsets + 4 * n_batch + entry)
    key_segment_at = key_at
    if SEGMENT:
        key_segment_at = key_segment + tl.load(offsets + 9 * n_batch + entry)
    mask_at = key_at
    if MASK:
        mask_at = mask + tl.load(offsets + 10 * n_batch + entry)
    return key_at, value_at, bias_at, key_segment_at, mask_at
