"""Weights other than softmax, for comparison: sigmoid, L1, linear; same call, same supports, policies and scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from partita._checks import (
    broadcast,
    broadcast_batch,
    check_bool,
    check_float,
    check_heads,
    check_kind,
    check_pair,
    check_value,
    check_whole,
    finite,
)
from partita.attn.problem import Problem, sink_per_row
from partita.engine.dispatch import scores as all_scores
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.precision import accumulation_dtype, output_dtype
from partita.recompute import by_rows, row_blocks

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from partita.attn.problem import Options

__all__ = ["LinearState", "WeightStats", "l1_attention", "linear_attention", "sigmoid_attention"]

Weigh = Callable[[Tensor, Tensor, slice], Tensor]
"""(scores (..., rows, n_key), visible (..., rows, 1), rows) -> weights, not negative, 0 where a score is -inf"""


class WeightStats(NamedTuple):
    """Statistics of the weights of each row."""

    total: Tensor  # (..., n_query): sum_j w_ij; 1 for a softmax
    entropy: Tensor  # of w / total, in nats; 0 where the total is 0
    largest: Tensor  # max_j w_ij / total; 0 where the total is 0
    visible: Tensor  # number of keys the row may see


def sigmoid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    offset: float | Tensor | None = None,
    return_stats: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, WeightStats]:
    """Attention in which each key is weighed on its own: a sigmoid instead of the softmax.

        out_i = sum_j sigmoid(score_ij + offset_i) value_j            offset_i = -log(visible_i) unless given

    With that offset a row of equal scores near 0 adds up to about 1, at any length. Takes the options of `attention`.

    >>> sigmoid_attention(torch.zeros(1, 2), torch.zeros(3, 2), torch.ones(3, 1))  # 3 * (1/3) / (1 + 1/3)
    tensor([[0.7500]])

    offset: a number, one per head (heads,), or broadcastable to the rows (..., n_query); it may be learned.
    """
    problem = Problem.of(query, key, **options).ready(value)
    given = None if offset is None else _offset(offset, problem, value)

    def weigh(scores: Tensor, visible: Tensor, rows: slice) -> Tensor:
        level = -visible.clamp(min=1).to(scores.dtype).log()
        return torch.sigmoid(scores + (level if given is None else given[..., rows, None].to(scores)))

    return _weighed(problem, value, weigh, return_stats, normalise=False)


def _offset(offset: float | Tensor, problem: Problem, value: Tensor) -> Tensor:  # (..., n_query)
    query = problem.query
    rows = query.new_empty((), dtype=accumulation_dtype(query.dtype)).expand(*problem.batch(value), problem.n_query)
    if isinstance(offset, Tensor):
        check_float("offset", offset)
        return sink_per_row(offset, rows, "offset")
    if not (isinstance(offset, (int, float)) and finite(offset)):
        raise ValueRangeError(f"offset must be a finite number or a tensor; got {offset!r}.")
    return torch.full_like(rows, float(offset))


def l1_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_stats: bool = False, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, WeightStats]:
    """Weights proportional to the absolute score instead of its exponential, for comparison.

        out_i = sum_j |score_ij| value_j / sum_j |score_ij|          0 where every score is 0

    A common factor of the scores, so any scale, and their sign change nothing. `total` of its statistics is
    sum_j |score_ij|, before the division.

    >>> l1_attention(torch.ones(1, 1), torch.tensor([[1.0], [-3.0]]), torch.tensor([[4.0], [8.0]]))
    tensor([[7.]])
    """

    def weigh(scores: Tensor, visible: Tensor, rows: slice) -> Tensor:
        return torch.where(scores.isneginf(), 0.0, scores.abs())

    problem = Problem.of(query, key, **options).ready(value)
    return _weighed(problem, value, weigh, return_stats, normalise=True)


def _weighed(
    problem: Problem, value: Tensor, weigh: Weigh, return_stats: bool, *, normalise: bool
) -> Tensor | tuple[Tensor, WeightStats]:
    """sum_j w_ij value_j a block of rows at a time, recomputed in the backward pass."""
    values = problem.spread(value)

    def run(rows: slice) -> tuple[Tensor, ...]:
        request = problem.rows(rows).gibbs().request()
        scores = request.ungroup(all_scores(request), 1)  # float32 or better, -inf where a key is hidden
        visible = (~scores.isneginf()).sum(-1)
        weight = weigh(scores, visible[..., None], rows)
        share, stats = _statistics(weight, visible)
        out = (share if normalise else weight) @ values.to(weight.dtype)
        return (out.to(output_dtype(value)), *stats)

    out, *stats = by_rows(run, problem.blocks(value), (1, 0, 0, 0, 0))
    return (out, WeightStats(*stats)) if return_stats else out


def _statistics(weight: Tensor, visible: Tensor) -> tuple[Tensor, WeightStats]:
    """The weights of each row divided by their sum, and their statistics."""
    total = weight.sum(-1)
    share = weight / torch.where(total == 0, torch.ones_like(total), total)[..., None]
    size = torch.where(share == 0, torch.ones_like(share), share).log()
    largest = share.detach().amax(-1) if share.shape[-1] else torch.zeros_like(total)
    return share, WeightStats(total, -(share * size).sum(-1), largest, visible.to(weight.dtype))


class LinearState(NamedTuple):
    """The sums over keys that linear attention keeps; states of disjoint keys add up."""

    moment: Tensor  # (..., features, dim_value): sum_j phi(k_j) value_j
    mass: Tensor  # (..., features): sum_j phi(k_j)


def _elu(x: Tensor) -> Tensor:
    return F.elu(x.to(accumulation_dtype(x.dtype))) + 1  # in half, what is left of -1 + 1 would be noise


def linear_attention(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    value: Tensor,  # (..., n_key, dim_value)
    *,
    feature_map: Callable[[Tensor], Tensor] = _elu,
    is_causal: bool = False,
    key_mask: Tensor | None = None,  # (..., n_key), True where a key is visible
    chunk: int = 128,
    state: LinearState | None = None,
    return_state: bool = False,
    return_stats: bool = False,
    **others: object,
) -> Tensor | tuple[Any, ...]:
    """Attention whose weights are inner products of features: time and memory linear in the length.

        out_i = sum_j <phi(q_i), phi(k_j)> value_j / sum_j <phi(q_i), phi(k_j)>          phi(x) = elu(x) + 1

    Causal: j up to i, the same number of queries and keys; pairs are written out within a chunk only. A row whose
    weights add up to 0 gives 0.

    >>> x = torch.ones(3, 1)
    >>> linear_attention(x, x, torch.tensor([[1.0], [2.0], [6.0]]), is_causal=True)  # equal weights: running means
    tensor([[1.0000],
            [1.5000],
            [3.0000]])

    feature_map: a function or module from vectors to vectors without negative numbers.
    state: of the keys that came before, as `return_state` gave it.
    return_stats: also `WeightStats`, in quadratic time, since the weights are written out a block of rows at a time;
        before the state, where both are requested.
    """
    _check_others(others)
    check_pair(query, key)
    check_value(value, key)
    check_heads(query, key)
    if return_stats and state is not None:
        raise ValueRangeError("return_stats needs all keys, and a state has only their sums; leave out one of them.")
    check_whole("chunk", chunk, least=1)
    broadcast_batch((("query", query.shape[:-2]), ("key", key.shape[:-2]), ("value", value.shape[:-2])))
    if not callable(feature_map) or isinstance(feature_map, type):
        raise DtypeError(f"feature_map must be a function of vectors; got {type(feature_map).__name__}.")
    if state is not None:
        check_kind("state", state, LinearState, "Pass on what return_state=True gave.")
    dtype = accumulation_dtype(query.dtype)
    q, k, v = feature_map(query).to(dtype), feature_map(key).to(dtype), value.to(dtype)
    if key_mask is not None:
        check_bool("key_mask", key_mask)
        if not key_mask.dim() or key_mask.shape[-1] != key.shape[-2]:
            raise ShapeError(
                f"key_mask must have one entry per key, (..., {key.shape[-2]}); got {tuple(key_mask.shape)}. "
                f"Linear attention cannot hide a key from some rows only."
            )
        k = torch.where(key_mask[..., None], k, torch.zeros_like(k))
    v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)  # the last column adds up to the normaliser
    before = None if state is None else torch.cat([state.moment, state.mass[..., None]], -1).to(dtype)
    if is_causal:
        if query.shape[-2] != key.shape[-2]:
            raise ShapeError(
                f"causal linear attention needs the same number of queries and keys; got {query.shape[-2]} and "
                f"{key.shape[-2]}."
            )
        sums = _causal(q, k, v, chunk, before)
    else:
        whole = k.mT @ v
        sums = q @ (whole if before is None else whole + before)
    moment, mass = sums[..., :-1], sums[..., -1:]
    found: list[Any] = [(moment / torch.where(mass == 0, torch.ones_like(mass), mass)).to(output_dtype(value))]
    if return_stats:
        found.append(_written_out(q, k, key_mask, is_causal))
    if return_state:
        seen = k.mT @ v if before is None else k.mT @ v + before
        found.append(LinearState(seen[..., :-1], seen[..., -1]))
    return found[0] if len(found) == 1 else tuple(found)


def _check_others(others: dict[str, object]) -> None:
    for name, value in others.items():
        if name not in _REFUSED:
            raise TypeError(f"linear_attention() got an unexpected keyword argument {name!r}.")
        if value is not None and value is not False:
            raise ValueRangeError(f"linear_attention takes no {name}: {_REFUSED[name]}")


_PAIRS = "it never writes out pairs; hide keys from all rows with key_mask, or the future with is_causal."
_SCORES = "its weights are inner products of features and no function of a score; put it into feature_map."
_REFUSED = {
    "attn_mask": _PAIRS,
    "support": _PAIRS,
    "bias": _PAIRS,
    "scale": _SCORES,
    "softcap": _SCORES,
    "score": _SCORES,
    "enable_gqa": "give each query head its key head, key.repeat_interleave(groups, -3).",
}


def _written_out(q: Tensor, k: Tensor, key_mask: Tensor | None, is_causal: bool) -> WeightStats:
    """The statistics of weights <q_i, k_j>, a block of rows at a time; hidden keys are 0 already."""
    n_query, n_key = q.shape[-2], k.shape[-2]
    keep = torch.ones((), dtype=torch.bool, device=q.device) if key_mask is None else key_mask[..., None, :]
    at = torch.arange(n_key, device=q.device)

    def run(rows: slice) -> tuple[Tensor, ...]:
        weight = q[..., rows, :] @ k.mT
        seen = keep & (at <= at[rows, None]) if is_causal else keep
        seen = seen.expand(weight.shape)
        return _statistics(torch.where(seen, weight, torch.zeros_like(weight)), seen.sum(-1))[1]

    batch = broadcast(q.shape[:-2], k.shape[:-2])
    return WeightStats(*by_rows(run, row_blocks(n_query, n_key, batch), (0, 0, 0, 0)))


def _causal(q: Tensor, k: Tensor, v: Tensor, chunk: int, before: Tensor | None) -> Tensor:
    """sum over j up to i of <q_i, k_j> v_j: a running state from chunk to chunk, pairs inside."""
    n = q.shape[-2]
    chunks = (n + chunk - 1) // chunk  # a compiler follows chunks * chunk, not n + -n % chunk
    pad = chunks * chunk - n
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(-2, (chunks, chunk)) for x in (q, k, v))  # (..., chunks, chunk, .)
    own = k.mT @ v
    past = F.pad(own.cumsum(-3), (0, 0, 0, 0, 1, 0))[..., :-1, :, :]  # of the chunks before
    past = past if before is None else past + before.unsqueeze(-3)
    inside = (q @ k.mT).tril() @ v
    out = (q @ past + inside).flatten(-3, -2)
    if torch.compiler.is_compiling():  # inductor keeps a slice for the backward pass with the first length's strides
        return out.index_select(-2, torch.arange(n, device=out.device))
    return out[..., :n, :]
