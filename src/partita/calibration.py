"""One temperature for a trained classifier, from streamed statistics alone.

    minimise over T     mean_i ( log Z_i(1/T) - score_i,target(1/T) ),      scores (<q, k> + bias) / T

With b = 1/T the loss is convex in b. One pass at b gives its slope and curvature along log b:

    slope = mean( E[s] - s_target )            curvature of the loss in b, times b^2 = mean( Var[s] )

so a Newton step costs one pass, whatever the number of classes, and no logits are held.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, library

from partita import _checks
from partita.errors import ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.precision import accumulation_dtype

__all__ = ["fit_temperature"]

_PASSES = 40
_LIMIT = math.log(1e6)  # temperatures between 1e-6 and 1e6: beyond, the data want none or all of it
_STRIDE = math.log(10.0)
_NATS = 3.0


def fit_temperature(
    query: Tensor,  # (..., n, dim) hidden states
    key: Tensor,  # (n_class, dim) class vectors
    target: Tensor,  # (..., n) class indices
    *,
    bias: Tensor | None = None,  # (n_class,)
    ignore_index: int = -100,
) -> Tensor:
    """The temperature T at which softmax((<query, key> + bias) / T) has the smallest mean surprise (calibration).

    The whole logit is divided, bias included: use it as ``linear_cross_entropy(x, w, y, scale=1/T, linear_bias=b/T)``.
    Where no finite optimum exists (every target already wins, or chance does better) the result is the end of the range
    that still changes anything. No gradient. Spec: M-TMP-1.

    >>> q, k = torch.tensor([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0]]), torch.eye(2)
    >>> fit_temperature(q, k, torch.tensor([0, 0, 1]))  # right in 2 of 3, so p = 2/3: 3 / log 2
    tensor(4.3281)
    """
    _checks.check_pair(query, key)
    _checks.check_index_dtype("target", target)
    _checks.check_device(("query", "target"), (query, target))
    _checks.check_whole("ignore_index", ignore_index)
    if tuple(target.shape) != tuple(query.shape[:-1]):
        raise ShapeError(
            f"query must be (..., n, dim) and target (..., n); got {_checks.shape_text(query)} and "
            f"{_checks.shape_text(target)}."
        )
    if key.dim() != 2:
        raise ShapeError(f"key must be a matrix (n_class, dim); got {_checks.shape_text(key)}.")
    if bias is not None:
        _checks.check_classwise("bias", bias, key.shape[0])
    given = (query.detach(), key.detach(), target, None if bias is None else bias.detach(), ignore_index)
    if torch.compiler.is_compiling():
        fitted: Tensor = torch.ops.partita.fit_temperature(*given)
        return fitted
    return _fit(*given)


@torch.no_grad()
def _fit(query: Tensor, key: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
    index = target.long().reshape(-1)  # first: -100 is 156 among uint8
    kept = (index != ignore_index).nonzero()[:, 0]
    if not len(kept):
        raise ValueRangeError("there is no row to fit a temperature to: every target is ignored, or there is none.")
    rows = query.reshape(len(index), query.shape[-1])
    if len(kept) < len(rows):
        rows, index = rows[kept], index[kept]
    _checks.check_classes(index, key.shape[0], ignore_index)
    shift = None if bias is None else bias.reshape(1, -1)

    eps = torch.finfo(torch.float64 if query.dtype == torch.float64 else torch.float32).eps
    x, low, high = _start(rows, key, shift), -math.inf, math.inf  # x = log(1/T)
    for _ in range(_PASSES):
        scale = math.exp(x)
        sums = Gibbs(rows, key, scale=scale, bias=None if shift is None else scale * shift).reduce(target=index)
        assert sums.target_score is not None
        state, score = sums.state, sums.target_score
        gap = state.mean_score() - score
        slope, curvature = gap.double().mean().item(), state.score_variance().double().mean().item()
        noise = eps * (1e-6 + gap.double().abs().mean().item())
        if math.isnan(slope) or abs(slope) <= noise:
            break
        low, high = (low, x) if slope > 0 else (x, high)
        step = max(-_STRIDE, min(_STRIDE, _step(slope, curvature)))
        following = x + step
        if not low < following < high:
            following = (low + high) / 2 if math.isfinite(low) and math.isfinite(high) else following
        following = max(-_LIMIT, min(_LIMIT, following))
        done = abs(following - x) < 1e-3  # the error left is about the square of the last step
        x = following
        if done:
            break
    return torch.tensor(math.exp(-x), dtype=sums.state.mass.dtype, device=query.device)


def _start(query: Tensor, key: Tensor, bias: Tensor | None) -> float:
    """log of the scale at which logits spread by a few nats, from second moments alone: units of the logits cancel."""
    q, k = query.double(), key.double()
    if bias is not None:  # one more feature, 1 for every query
        q = torch.cat([q, q.new_ones(len(q), 1)], -1)
        k = torch.cat([k, bias.double().reshape(-1, 1)], -1)
    k = k - k.mean(0)
    spread = ((k.mT @ k) * (q.mT @ q)).sum().item() / (len(q) * max(len(k), 1))
    if not math.isfinite(spread) or spread <= 0.0:
        return 0.0
    return max(-_LIMIT, min(_LIMIT, math.log(_NATS) - 0.5 * math.log(spread)))


def _step(slope: float, curvature: float) -> float:
    """A Newton step in log(1/T).

    Too sharp (slope > 0): Newton in the logarithm, which never steps below zero. Too flat: Newton in 1/T itself, where
    the loss is convex; in the logarithm it may not be.
    """
    if slope > 0:
        return -slope / (curvature + slope)
    return math.log1p(-slope / curvature) if curvature > 0 else _STRIDE


# ---- as an operator: a search until nothing moves has no place in a graph --------------------------------------------

library.define(
    "partita::fit_temperature", "(Tensor query, Tensor key, Tensor target, Tensor? bias, int ignore_index) -> Tensor"
)
library.impl("partita::fit_temperature", "CompositeExplicitAutograd", _fit)


@library.register_fake("partita::fit_temperature")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
    return query.new_empty((), dtype=accumulation_dtype(query.dtype))
