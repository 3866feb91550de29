"""Variants of attention: the best keys, one key, keys in blocks, blocks by their means, scores changed pair by pair."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from partita import support as supports
from partita._checks import check_pair, check_positive, check_value, check_whole
from partita.attn.positions import Bias, Gumbel
from partita.attn.problem import Problem
from partita.attn.sdpa import draw_seed, finish
from partita.engine import State, Stats
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.precision import accumulation_dtype, finest, no_autocast, product
from partita.recompute import by_rows, slices
from partita.scale import Policy, TargetEntropy
from partita.score import Score

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from partita.attn.problem import Options

__all__ = [
    "PairHook", "ScaleInvariant", "TopK", "blockwise_attention", "gumbel_attention", "hard_attention",
    "hierarchical_attention", "pair_attention", "top_k_attention",
]  # fmt: skip


class TopK(NamedTuple):
    """What the k best keys give, and the mass of the others."""

    output: Tensor  # (..., n_query, dim_value)
    stats: Stats  # of the kept keys
    log_kept: Tensor  # (..., n_query): log of the mass kept; KL(kept || all) = -log_kept, 0 on an empty row


def top_k_attention(query: Tensor, key: Tensor, value: Tensor, k: int, **options: Unpack[Options]) -> TopK:
    """Attention over the k best keys of each row; only those get gradients (M-SPA-1). Takes the options of `attention`.

        |change of output| <= (1 - kept) * diam(values)          H(kept) <= min(log k, H)

    >>> out = top_k_attention(torch.zeros(1, 2), torch.zeros(4, 2), torch.eye(4), 4)
    >>> out.output, out.log_kept  # k = n: nothing is left out
    (tensor([[0.2500, 0.2500, 0.2500, 0.2500]]), tensor([0.]))
    """
    check_whole("k", k, least=1)
    problem = Problem.of(query, key, **options).ready(value)
    gibbs = problem.gibbs()
    scores, index = gibbs.top(k)  # (..., n_query, k)
    chosen = _pick(value, index, problem)
    each = State.of(scores[..., None, :], chosen.to(scores.dtype))  # every row has keys of its own
    stats = Stats(*(field[..., 0] for field in each.stats()))
    empty = stats.visible == 0
    lost = torch.where(empty, 0.0, stats.log_partition) - torch.where(empty, 0.0, gibbs.log_partition())
    return TopK(each.expectation()[..., 0, :].to(value.dtype), stats, lost.clamp(max=0.0))


def _pick(value: Tensor, index: Tensor, problem: Problem) -> Tensor:  # (..., n_query, k, dim_value)
    """The values of chosen keys; key 0 stands in where there is none, and 0 where there are no keys."""
    value = problem.spread(value)
    value = value if value.shape[-2] else torch.nn.functional.pad(value, (0, 0, 0, 1))
    batch, (n, k) = index.shape[:-2], index.shape[-2:]
    value = value.expand(*batch, *value.shape[-2:])
    at = index.clamp(min=0).reshape(*batch, n * k, 1).expand(*batch, n * k, value.shape[-1])
    return value.gather(-2, at).reshape(*batch, n, k, value.shape[-1])


def _hard(problem: Problem, value: Tensor) -> Tensor:
    """The best key's value with the soft mean's gradient."""
    gibbs = problem.gibbs()
    with torch.no_grad():
        index = gibbs.top(1)[1]
        best = _pick(value, index, problem)[..., 0, :]
        best = torch.where(index >= 0, best, torch.zeros_like(best))
    soft = gibbs.state(value).expectation().to(value.dtype)
    return best + (soft - soft.detach())


def hard_attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> Tensor:
    """The value of the best key, with the gradient of soft attention (straight-through, M-SPA-2).

        out_i = value_{argmax_j score_ij}            |soft - hard| <= (1 - p_max) * diam(values)

    Among equal scores one key wins, always the same.

    >>> hard_attention(torch.ones(1, 1), torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]]))
    tensor([[7.]])
    """
    return _hard(Problem.of(query, key, **options).ready(value), value)


def gumbel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    temperature: float = 1.0,
    *,
    hard: bool = False,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """Attention that draws its key: its argmax follows softmax(score) at every temperature, its mean does not.

        weights_i = softmax((score_i + g_i) / temperature)          g = -log(-log U)

    >>> drawn = gumbel_attention(torch.zeros(1, 2), torch.zeros(4, 2), torch.ones(4, 1), 0.1)
    >>> round(drawn.item(), 5)  # whichever key it is, its value is 1
    1.0

    hard: the drawn key's value, with the relaxed sample's gradient (M-SPA-3). The noise is remade from a seed of
        torch's generator, or of `generator`. No softcap: it would cap the noisy scores.
    """
    check_positive("temperature", temperature)
    if options.get("softcap") is not None:
        raise ValueRangeError("gumbel_attention takes no softcap.")
    problem = Problem.of(query, key, **options).ready(value)
    noise: Bias = Gumbel(draw_seed(query.device, generator), problem.batch(value))
    noisy = (noise if problem.rule is None else problem.rule + noise) * (1 / temperature)
    assert not isinstance(problem.scale, Policy)
    bias = None if problem.bias is None else problem.bias / temperature
    sharp = replace(problem, scale=problem.scale / temperature, bias=bias, rule=noisy)
    if not hard:
        return sharp.state(value).expectation().to(value.dtype)
    return by_rows(lambda rows: (_hard(sharp.rows(rows), value),), sharp.blocks(value), (1,))[0]


# ---- keys in blocks --------------------------------------------------------------------------------------------------


def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, block: int, *, return_stats: bool = False, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Stats]:
    """Full attention over blocks of keys: one state per block, merged (M-GIB-9, M-ATT-14).

    >>> x = torch.eye(4)
    >>> torch.allclose(blockwise_attention(x, x, x, 3), Gibbs(x, x, scale=0.5).expectation(x))
    True
    """
    check_whole("block", block, least=1)
    problem = Problem.of(query, key, **options).ready(value)
    cuts = slices(problem.n_key, block)
    states = [problem.keys(part).gibbs().state(value[..., part, :]) for part in cuts]
    return finish(functools.reduce(State.merge, states), value, None, return_stats)


def hierarchical_attention(
    query: Tensor,  # (..., n, dim)
    key: Tensor,
    value: Tensor,
    block: int,
    *,
    is_causal: bool = False,
    scale: float | Tensor | Policy | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Stats]:
    """Two levels: the keys of a query's own block one by one, every other block through its mean key and mean value.

        Z_i = sum_{j in own block} exp(score_ij) + sum_{other blocks b} n_b exp(scale <query_i, mean key_b>)

    Exact when keys agree inside each other block; otherwise a block's share is a lower bound of its true one (Jensen).
    Causal: own block up to the query, and the blocks before it. With one block, equal to `attention`. In statistics a
    summary is one key of score log n_b + scale <query, mean key>.

    >>> x = torch.zeros(6, 1)
    >>> hierarchical_attention(x, x, torch.arange(6.0)[:, None], 2)[0]  # equal scores: every key counts once
    tensor([2.5000])

    scale: a policy counts the keys of each level: those of its own block that a query sees, and the summaries it sees.
    """
    check_whole("block", block, least=1)
    if isinstance(scale, TargetEntropy):
        raise ValueRangeError("hierarchical_attention takes no TargetEntropy: its rows are made of two levels.")
    check_pair(query, key)
    check_value(value, key)
    n = key.shape[-2]
    if query.shape[-2] != n:
        raise ShapeError(
            f"hierarchical_attention needs the same number of queries and keys; got {query.shape[-2]} and {n}."
        )
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    own = torch.arange(n, device=key.device) // block
    near = supports.segments(own, own)
    near = near & supports.causal() if is_causal else near
    local = Gibbs(query, key, scale=scale, support=near).state(value)
    summary, mean, count = _means(key, block), _means(value, block), _sizes(n, block, key.device)
    others = torch.arange(count.shape[0], device=key.device)
    far = (others < own[:, None]) if is_causal else (others != own[:, None])
    log_count = count.log().to(accumulation_dtype(query.dtype))
    distant = Gibbs(query, summary, scale=scale, bias=log_count[None], support=supports.mask(far)).state(mean)
    return finish(local.merge(distant), value, None, return_stats)


def _sizes(n: int, block: int, device: torch.device) -> Tensor:
    return (n - torch.arange(0, n, block, device=device)).clamp(max=block).to(finest(device))


def _means(x: Tensor, block: int) -> Tensor:  # (..., n, dim) -> (..., blocks, dim)
    n = x.shape[-2]
    many = -(-n // block)
    blocks: Tensor = torch.nn.functional.pad(x, (0, 0, 0, many * block - n)).unflatten(-2, (many, block))
    return blocks.sum(-2) / _sizes(n, block, x.device)[:, None].to(x.dtype)


# ---- scores that change pair by pair ---------------------------------------------------------------------------------


PairHook = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(i (rows, 1), j (keys,)) of a tile -> multiplier, offset, each broadcastable to (..., rows, keys)"""


def pair_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pair: PairHook,
    *,
    where: int = 0,
    sink: Tensor | None = None,
    return_stats: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Stats]:
    """Attention whose scores are changed pair by pair before the bias is added; takes the options of `attention`.

    pair: a function (i, j) -> (multiplier, offset); the parameters of a module get their gradients.
    where: the position of the first query among the keys (with a cache: how many keys came before).

    >>> flat = lambda i, j: (torch.zeros(()), torch.zeros(()))  # forget the content
    >>> pair_attention(torch.ones(1, 1), torch.tensor([[1.0], [9.0]]), torch.tensor([[2.0], [4.0]]), flat)
    tensor([[3.]])
    """
    if options.get("softcap") is not None:
        raise ValueRangeError("pair_attention takes no softcap; put it into the hook.")
    check_whole("where", where)
    if not callable(pair) or isinstance(pair, type):
        raise DtypeError(f"pair must be a function (i, j) -> (multiplier, offset); got {type(pair).__name__}.")
    problem = Problem.of(query, key, **options).ready(value)
    dtype = accumulation_dtype(query.dtype)
    with no_autocast(query):  # positions are stored among the features: half precision would round them
        score = _PairScore(pair, problem.score, where)
        q, k = score.placed(query.to(dtype), key.to(dtype), problem.scale)
        state = replace(problem, query=q, key=k, score=score, scale=1.0).state(value.to(dtype))
    return finish(state, value, sink, return_stats)


class _PairScore(nn.Module):
    """A score whose queries carry their scale and position, and whose keys carry their position, as features."""

    per_pair = 4  # numbers held for each pair

    def __init__(self, pair: PairHook, score: Score | None, where: int):
        super().__init__()
        self.pair, self.score, self.where = pair, score, where

    def placed(self, query: Tensor, key: Tensor, scale: Any) -> tuple[Tensor, Tensor]:
        i, j = (torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None] for x in (query, key))
        scale = torch.as_tensor(scale, dtype=query.dtype, device=query.device)[..., None]
        lead = torch.broadcast_shapes(query.shape[:-1], scale.shape[:-1])
        query = query.expand(*lead, query.shape[-1])
        query = torch.cat([query, scale.expand(*lead, 1), (i + self.where).expand(*lead, 1)], -1)
        return query, torch.cat([key, j.expand(*key.shape[:-1], 1)], -1)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        q, k = query[..., :-2], key[..., :-1]
        raw = product(q, k.mT) if self.score is None else self.score(q, k)
        if not raw.numel():  # a batch of none has no first entry to read positions of
            return raw
        i, j = (x[(0,) * (x.dim() - 2)][..., -1].long() for x in (query, key))
        multiplier, offset = self.pair(i[:, None], j)
        return multiplier.to(raw) * (raw * query[..., -2, None]) + offset.to(raw)


@dataclass(frozen=True)
class ScaleInvariant:
    """The hook of scale-invariant attention: sharper and lower with distance t, so that each octave keeps its share.

        multiplier_t^2 = 2 (log(t/tau + 1) - log a + b/a)        offset_t = b/a - multiplier_t^2        a = b = sqrt(e)

    At distance 0 it changes nothing. Equal to the formula of arXiv 2505.17083 for unit-variance scores.

    >>> ScaleInvariant()(torch.tensor([[0]]), torch.tensor([0]))
    (tensor([[1.]], dtype=torch.float64), tensor([[0.]], dtype=torch.float64))
    """

    tau: float = 10.0
    a: float = math.exp(0.5)
    b: float = math.exp(0.5)

    def __post_init__(self) -> None:
        for name in ("tau", "a", "b"):
            check_positive(name, getattr(self, name))

    def __call__(self, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        distance = (i - j).abs().to(finest(i.device))  # the caller rounds once, to the dtype of its scores
        square = 2 * (torch.log1p(distance / self.tau) - math.log(self.a) + self.b / self.a)
        return square.sqrt(), self.b / self.a - square
