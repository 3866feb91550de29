"""Other ways to choose: the k best, the best, a random one.

top-k    softmax over the k best keys of each row                                        (M-SPA-1)
hard     the best key's value; soft attention's gradient                                 (M-SPA-2)
Gumbel   softmax((score + noise) / temperature): a relaxed sample of one key             (M-SPA-3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from partita._checks import check_whole
from partita.attn.bias import Gumbel
from partita.attn.dropout import draw_seed
from partita.attn.problem import Problem
from partita.attn.rows import by_rows, states_by_rows
from partita.engine import State, Stats
from partita.errors import ValueRangeError
from partita.gibbs import Gibbs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from partita.attn.problem import Options

__all__ = ["TopK", "gumbel_attention", "hard_attention", "top_k_attention"]


class TopK(NamedTuple):
    """What the k best keys give, and what the others were worth."""

    output: Tensor  # (..., n_query, dim_value)
    stats: Stats  # of the kept keys
    log_kept: Tensor  # (..., n_query): log of the mass kept; KL(kept || all) = -log_kept, 0 on an empty row


def top_k_attention(query: Tensor, key: Tensor, value: Tensor, k: int, **options: Unpack[Options]) -> TopK:
    """Attention over the k best keys of each row; gradients flow to those alone. Takes the options of `attention`.

        |change of output| <= (1 - kept) * diam(values)          H(kept) <= min(log k, H)

    >>> out = top_k_attention(torch.zeros(1, 2), torch.zeros(4, 2), torch.eye(4), 4)
    >>> out.output, out.log_kept  # k = n: nothing is left out
    (tensor([[0.2500, 0.2500, 0.2500, 0.2500]]), tensor([0.]))
    """
    check_whole("k", k, least=1)
    problem = Problem.of(query, key, **options)
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


def _hard(gibbs: Gibbs, value: Tensor, problem: Problem) -> Tensor:
    """The best key's value with the soft mean's gradient."""
    with torch.no_grad():
        index = gibbs.top(1)[1]
        best = _pick(value, index, problem)[..., 0, :]
        best = torch.where(index >= 0, best, torch.zeros_like(best))
    soft = gibbs.state(value).expectation().to(value.dtype)
    return best + (soft - soft.detach())


def hard_attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> Tensor:
    """The value of the best key; going back, the gradient of soft attention (straight-through).

        out_i = value_{argmax_j score_ij}            |soft - hard| <= (1 - p_max) * diam(values)

    Among equal scores one key wins, always the same; the limit of softmax would be their mean.

    >>> hard_attention(torch.ones(1, 1), torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]]))
    tensor([[7.]])
    """
    problem = Problem.of(query, key, **options)
    return _hard(problem.gibbs(), value, problem)


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

    hard: the drawn key's value going forward, the relaxed sample's gradient going back. The noise is remade from a
    seed, never held whole; torch.manual_seed, or `generator`, governs it. No softcap: it would cap the noisy scores.
    """
    if not temperature > 0:
        raise ValueRangeError(f"temperature must be positive; got {temperature!r}.")
    if options.get("softcap") is not None:
        raise ValueRangeError("gumbel_attention takes no softcap.")
    problem = Problem.of(query, key, **options).resolved()
    noise = Gumbel(draw_seed(query.device, generator), problem.batch(value))
    sharp = problem.divided(temperature, noise)
    if not hard:
        state = states_by_rows(lambda rows: sharp.rows(rows).state(value), sharp.blocks(value))
        return state.expectation().to(value.dtype)
    return by_rows(lambda rows: (_hard(sharp.rows(rows), value, problem),), sharp.blocks(value), (1,))[0]
