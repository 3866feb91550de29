"""What every kernel shares: which keys a tile's rows see, and their scores.

    s2 = log2(e) (softcap(scale <query, key>) + bias)        -inf where a row does not see a key

Scores are in base 2, since a GPU has exp2 and no exp: one multiplication less for every score. What leaves a kernel is
natural again. Legend: M rows of a tile, N its keys. A tile has either orientation: what belongs to rows has shape
(M, 1) and what belongs to keys (1, N), or, where rows are ACROSS, (1, M) and (N, 1); `cols` already have theirs.

The operands `o`, and what `rows` and `keys` bring, are those of `sides`. The switches S are constexprs, so what
is not wanted costs nothing:
    BIAS          0 none, 1 by row, 2 by key, 3 dense          CAP_BIAS    it is added before the softcap
    START, STOP   row intervals       SEGMENT  ids             MASK, SKIP  as in `engine.terms`
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
def beside(x, ACROSS: tl.constexpr):
    """A number for each row, in the shape that broadcasts over a tile of scores."""
    if ACROSS:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def visibility(o, rows, keys, cols, S: tl.constexpr, ACROSS: tl.constexpr):
    """Which keys each row sees, as far as the support tells."""
    own, segment = beside(rows.at, ACROSS), beside(rows.segment, ACROSS)
    begin, end = beside(rows.begin, ACROSS), beside(rows.end, ACROSS)
    seen = (own < o.n_query) & (cols < o.n_key)
    inside = seen
    if S.START:
        seen = seen & (cols >= begin)
    if S.STOP:
        seen = seen & (cols < end)
    if S.SEGMENT:
        theirs = tl.load(keys.segment + cols * o.key_segment.row, mask=cols < o.n_key, other=0)
        seen = seen & (segment == theirs)
    if S.MASK:
        shown = tl.load(keys.mask + own * o.mask.row + cols * o.mask.col, mask=inside, other=0)
        seen = seen & (shown != 0)
    if S.SKIP:
        seen = seen & (cols != beside(rows.skip, ACROSS))
    return seen


@triton.jit
def any_of(seen, ASKED: tl.constexpr):
    """Whether a tile has anything to do, where that is ASKED; all have where it is not."""
    todo = True
    if ASKED:
        todo = tl.max(seen.to(tl.int32)) > 0
    return todo


@triton.jit
def scores(left, right, seen, o, rows, keys, cols, S: tl.constexpr, ACROSS: tl.constexpr):
    """Scores of a tile in base 2, -inf where nothing is seen or a bias is -inf, and the softcap's slope.

    Later, visibility is read off the scores: a mask that is kept takes registers.
    """
    scale, own = beside(rows.scale, ACROSS), beside(rows.at, ACROSS)
    product = tl.dot(left, right, input_precision=S.PRECISION, out_dtype=S.ACC)
    slope = product
    if S.BIAS == 0:
        if S.SOFTCAP == 0.0:
            s2 = product * (scale * LOG2E)
        else:
            t = tanh(product * (scale / S.SOFTCAP))
            s2 = t * (S.SOFTCAP * LOG2E)
            slope = 1 - t * t
    else:
        if S.BIAS == 1:
            bias = tl.load(keys.bias + own * o.bias.row, mask=own < o.n_query, other=0.0)
        elif S.BIAS == 2:
            bias = tl.load(keys.bias + cols * o.bias.col, mask=cols < o.n_key, other=0.0)
        else:
            bias = tl.load(keys.bias + own * o.bias.row + cols * o.bias.col, mask=seen, other=0.0)
        bias = bias.to(product.dtype)
        seen = seen & (bias != float("-inf"))
        if S.SOFTCAP == 0.0:
            s2 = product * (scale * LOG2E) + bias * LOG2E
        elif S.CAP_BIAS:
            t = tanh((product * scale + bias) * (1.0 / S.SOFTCAP))
            s2 = t * (S.SOFTCAP * LOG2E)
            slope = 1 - t * t
        else:
            t = tanh(product * (scale / S.SOFTCAP))
            s2 = t * (S.SOFTCAP * LOG2E) + bias * LOG2E
            slope = 1 - t * t
    return tl.where(seen, s2, float("-inf")), slope
