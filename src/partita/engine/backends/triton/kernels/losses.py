"""What a loss needs of a chunk of logits: sums by rows, sums by columns, and the gradient; torch makes its products.

    s_ij = scale_i logit_ij + bias_j                     logit_ij = <query_i, key_j>, made by torch
    rows      peak_i = max_j s_ij        mass_i = sum_j exp(s_ij - peak_i)        score_i = s_i,target_i
    columns   the same over i, added to what earlier chunks left
    gradient  ds_ij = g_i exp(s_ij - peak_i) + h_j exp(s_ij - column_peak_j) + t_i [j = target_i]

Every sum is made in an order that the sizes alone decide: the same bits each time.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["column_sums", "gradient", "row_sums"]


@triton.jit
def _level(peak):
    """What to centre at: 0 where no score was seen, since -inf - -inf is nan."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def row_sums(
    logits,  # (n, n_key) in the dtype of the sums, with this stride
    scale,  # (n,)
    bias,  # (n_key,)
    target,  # (n,) int64; out of range where there is none
    peak,  # (n,) out
    mass,  # (n,) out; nan where a logit is not finite
    score,  # (n,) out, -inf without a target
    n_key,
    stride,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i = tl.program_id(0)
    row = logits + i.to(tl.int64) * stride
    sharp = tl.load(scale + i)
    lane = tl.arange(0, COLUMNS)
    # each lane keeps a softmax of its own; they are joined once, after the loop
    ACC: tl.constexpr = logits.dtype.element_ty
    top = tl.full((COLUMNS,), float("-inf"), ACC)
    total = tl.zeros((COLUMNS,), ACC)
    sound = tl.zeros((COLUMNS,), ACC)
    for start in range(0, n_key, COLUMNS):
        j = start + lane
        inside = j < n_key
        logit = tl.load(row + j, mask=inside, other=0.0)
        sound += logit * 0.0
        s = sharp * logit
        if HAS_BIAS:
            s += tl.load(bias + j, mask=inside, other=0.0)
        s = tl.where(inside, s, float("-inf"))
        above = tl.maximum(top, s)
        level = _level(above)
        total = total * tl.exp(top - level) + tl.exp(s - level)
        top = above
    above = tl.max(top, 0)
    t = tl.load(target + i)
    there = (t >= 0) & (t < n_key)
    at = sharp * tl.load(row + t, mask=there, other=0.0)
    if HAS_BIAS:
        at += tl.load(bias + t, mask=there, other=0.0)
    tl.store(peak + i, above)
    tl.store(mass + i, tl.sum(total * tl.exp(top - _level(above)), 0) + tl.sum(sound, 0))
    tl.store(score + i, tl.where(there, at, float("-inf")))


@triton.jit
def column_sums(
    logits,  # (n, n_key) in the dtype of the sums, with this stride
    scale,  # (1,): a column has no row of its own
    peak,  # (n_key,) in and out
    mass,  # (n_key,) in and out
    n,
    n_key,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = j < n_key
    sharp = tl.load(scale)
    top = tl.load(peak + j, mask=inside, other=float("-inf"))
    total = tl.load(mass + j, mask=inside, other=0.0)
    for start in range(0, n, ROWS):
        i = start + tl.arange(0, ROWS)
        seen = (i < n)[:, None] & inside[None, :]
        s = sharp * tl.load(logits + i.to(tl.int64)[:, None] * stride + j[None, :], mask=seen, other=0.0)
        s = tl.where(seen, s, float("-inf"))
        above = tl.maximum(top, tl.max(s, 0))
        level = _level(above)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(s - level[None, :]), 0)
        top = above
    tl.store(peak + j, top, mask=inside)
    tl.store(mass + j, total, mask=inside)


@triton.jit
def gradient(
    logits,  # (n, n_key) in the dtype of the sums, with this stride
    scale,  # (n,)
    bias,  # (n_key,)
    target,  # (n,) int64
    peak,  # (n,)
    g_mass,  # (n,) upstream of the rows' masses
    g_score,  # (n,) upstream of the targets' scores
    column_peak,  # (n_key,)
    g_column,  # (n_key,) upstream of the columns' masses
    out,  # (n, n_key) contiguous, the dtype of the products that follow; may be the logits themselves
    n,
    n_key,
    stride,
    HAS_BIAS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own, inside = i < n, j < n_key
    seen = own[:, None] & inside[None, :]
    row = i.to(tl.int64)[:, None]
    s = tl.load(logits + row * stride + j[None, :], mask=seen, other=0.0) * tl.load(scale + i, mask=own)[:, None]
    if HAS_BIAS:
        s += tl.load(bias + j, mask=inside, other=0.0)[None, :]
    e = tl.exp(s - tl.load(peak + i, mask=own, other=0.0)[:, None])
    ds = e * tl.load(g_mass + i, mask=own, other=0.0)[:, None]
    if HAS_COLUMNS:
        e = tl.exp(s - tl.load(column_peak + j, mask=inside, other=0.0)[None, :])
        ds += e * tl.load(g_column + j, mask=inside, other=0.0)[None, :]
    hit = j[None, :] == tl.load(target + i, mask=own, other=-1)[:, None]
    ds += tl.where(hit, tl.load(g_score + i, mask=own, other=0.0)[:, None], 0.0)
    tl.store(out + row * n_key + j[None, :], ds.to(out.dtype.element_ty), mask=seen)
