"""Long sequences in pieces: exact by merging, or two-level with summaries.

blockwise      state(all keys) = merge of state(block of keys)                    exact (M-GIB-9, M-ATT-14)
hierarchical   own block exactly, every other block as one summary key            O(n * (block + n / block))
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from partita import support as supports
from partita._checks import check_whole
from partita.attn.problem import Problem
from partita.attn.sdpa import finish
from partita.engine import State, Stats
from partita.errors import ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.precision import accumulation_dtype, finest
from partita.scale import Policy, TargetEntropy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from partita.attn.problem import Options

__all__ = ["blockwise_attention", "hierarchical_attention"]


def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, block: int, *, return_stats: bool = False, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Stats]:
    """Full attention from keys that arrive in blocks: one state per block, merged. Equal to `attention` to rounding.

    >>> x = torch.eye(4)
    >>> torch.allclose(blockwise_attention(x, x, x, 3), Gibbs(x, x, scale=0.5).expectation(x))
    True
    """
    check_whole("block", block, least=1)
    problem = Problem.of(query, key, **options).resolved()
    n = problem.n_key
    if torch.compiler.is_compiling():  # nothing can be cut by size: one block holds all keys
        parts = [slice(0, n)]
    else:
        parts = [slice(i, min(i + block, n)) for i in range(0, max(1, n), block)]
    states = [problem.keys(part).state(value[..., part, :]) for part in parts]
    return finish(reduce(State.merge, states), value, None, return_stats)


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
    Causal: own block up to the query, and the blocks before it. With one block, equal to `attention`. Statistics are
    those of what the query looks at: a summary is one key of score log n_b + scale <query, mean key>.

    >>> x = torch.zeros(6, 1)
    >>> hierarchical_attention(x, x, torch.arange(6.0)[:, None], 2)[0]  # equal scores: every key counts once
    tensor([2.5000])

    scale: a policy counts the keys of each level: those of its own block that a query sees, and the summaries it sees.
    """
    check_whole("block", block, least=1)
    if isinstance(scale, TargetEntropy):
        raise ValueRangeError("hierarchical_attention takes no TargetEntropy: its rows are made of two levels.")
    n = key.shape[-2]
    if query.shape[-2] != n:
        raise ShapeError(f"hierarchical_attention needs as many queries as keys; got {query.shape[-2]} and {n}.")
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    own = torch.arange(n, device=key.device) // block
    near = supports.segments(own, own)
    near = near & supports.causal() if is_causal else near
    local = Gibbs(query, key, scale=scale, support=near).state(value)
    summary, mean, count = _means(key, block), _means(value, block), _sizes(n, block, key.device)
    others = torch.arange(count.shape[0], device=key.device)
    far = (others < own[:, None]) if is_causal else (others != own[:, None])
    log_count = count.log().to(accumulation_dtype(query.dtype))[None, :]
    distant = Gibbs(query, summary, scale=scale, bias=log_count, support=supports.mask(far)).state(mean)
    return finish(local.merge(distant), value, None, return_stats)


def _sizes(n: int, block: int, device: torch.device) -> Tensor:
    many = -(-n // block)
    return (n - block * torch.arange(many, device=device)).clamp(max=block).to(finest(device))


def _means(x: Tensor, block: int) -> Tensor:  # (..., n, dim) -> (..., blocks, dim)
    n = x.shape[-2]
    many = -(-n // block)
    padded = torch.nn.functional.pad(x, (0, 0, 0, many * block - n))
    blocks = padded.reshape(*x.shape[:-2], many, block, x.shape[-1])
    return blocks.sum(-2) / _sizes(n, block, x.device)[:, None].to(x.dtype)
