"""Positions: sinusoids, what they add to a score, and biases that depend on distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import require

__all__ = ["ScoreParts", "distance_bias", "score_parts", "sinusoidal_positions", "sinusoidal_similarity"]


class ScoreParts(NamedTuple):
    """The four terms of a score whose query and key carry positions."""

    content: Tensor
    content_position: Tensor
    position_content: Tensor
    position: Tensor

    @property
    def total(self) -> Tensor:
        """Their sum, the score."""
        return self.content + self.content_position + self.position_content + self.position


def sinusoidal_positions(n: int, dim: int, base: float = 10000.0) -> Tensor:  # (n, dim)
    """Absolute position vectors of length sqrt(dim / 2).

        p_{i,2k} = sin(i w_k),    p_{i,2k+1} = cos(i w_k),    w_k = base^(-2k/dim)

    Spec: M-ATT-10.
    From Vaswani et al. (2017), Attention is all you need.

    >>> sinusoidal_positions(1, 4)
    tensor([[0., 1., 0., 1.]], dtype=torch.float64)
    """
    angle = torch.arange(n, dtype=torch.float64, device="cpu")[:, None] * _frequencies(dim, base)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def sinusoidal_similarity(lag: Tensor, dim: int, base: float = 10000.0) -> Tensor:  # (...)
    """Inner product of two sinusoidal positions: a function of their distance, falling on average but oscillating.

        <p_i, p_j> = sum_k cos((i - j) w_k),     dim / 2 at lag 0

    Spec: M-ATT-10.

    >>> sinusoidal_similarity(torch.tensor(0), 64).item()
    32.0
    """
    return torch.cos(lag.double()[..., None] * _frequencies(dim, base)).sum(-1)


def score_parts(query: Tensor, key: Tensor, position_q: Tensor, position_k: Tensor) -> ScoreParts:
    """A score with positions added to query and key, term by term; the usual model adds them before the projections.

        <q + p_i, k + p_j> = q.k + q.p_j + p_i.k + p_i.p_j

    Spec: M-ATT-10.

    >>> score_parts(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([4.0])).total  # 4 * 6
    tensor(24.)
    """
    return ScoreParts(
        (query * key).sum(-1),
        (query * position_k).sum(-1),
        (position_q * key).sum(-1),
        (position_q * position_k).sum(-1),
    )


def distance_bias(n_query: int, n_key: int, slope: float) -> Tensor:  # (n_query, n_key)
    """A linear penalty on distance, to be added to scaled scores; its effect on entropy has no fixed sign.

        b_ij = -slope * |i - j|

    Spec: M-ATT-9.
    From Press, Smith and Lewis (2022), Train short, test long: attention with linear biases enables input length
    extrapolation.

    >>> distance_bias(1, 3, 0.5)
    tensor([[-0.0000, -0.5000, -1.0000]], dtype=torch.float64)
    """
    i, j = (torch.arange(n, dtype=torch.float64, device="cpu") for n in (n_query, n_key))
    return -slope * (i[:, None] - j[None, :]).abs()


def _frequencies(dim: int, base: float) -> Tensor:
    require(dim >= 2 and dim % 2 == 0, f"sinusoidal positions need an even dim of at least 2; got {dim}.")
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
