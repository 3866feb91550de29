"""Sparse, hard and stochastic choice: what is lost against softmax, and what a relaxed sample is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita_theory._domain import Number, above_zero, number, public, require, where
from partita_theory.law import gibbs_law


class TopK(NamedTuple):
    """A truncated law and the mass it kept of the full one."""

    probs: Tensor  # (..., n)
    mass: Tensor  # (...)


class TopKLoss(NamedTuple):
    """What truncation costs, as a function of the kept mass alone."""

    total_variation: Tensor
    divergence: Tensor
    output: Tensor


def top_k_law(logits: Tensor, k: int) -> TopK:  # (..., n)
    """Keep the k heaviest keys and renormalise; ties go to the lower index.

        p_k = p / mass on the kept keys, 0 elsewhere        (M-SPA-1)

    Entropy never rises: H(p_k) <= min(log k, H(p)). Gradient flows to kept keys only.

    >>> top_k_law(torch.tensor([4.0, 3.0, 3.0]).log(), 2)
    TopK(probs=tensor([0.5714, 0.4286, 0.0000]), mass=tensor(0.7000))
    """
    require(1 <= k <= logits.shape[-1], f"k must lie between 1 and the number of keys {logits.shape[-1]}; got {k}.")
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :k]
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, True)
    full = gibbs_law(logits).probs
    return TopK(gibbs_law(logits, keep=keep).probs, torch.where(keep, full, 0.0).sum(-1))


def top_k_loss(mass: Tensor, diameter: Number = 1.0) -> TopKLoss:
    """What truncating to a kept mass costs, exactly for the law and at most for the output.

        TV = 1 - mass,    KL(p_k || p) = -log mass,    |change of output| <= (1 - mass) * diam(V)        (M-SPA-1)

    >>> top_k_loss(torch.tensor(0.5)).divergence
    tensor(0.6931)
    """
    return TopKLoss(1 - mass, -mass.log(), (1 - mass) * number(diameter).to(mass.dtype))


def hard_choice(scores: Tensor, values: Tensor) -> Tensor:  # (..., n), (..., n, dim_value) -> (..., dim_value)
    """The value of the best key; at a tie the mean over the best, which is the limit of softmax.

        lim_{scale -> inf} sum_j softmax(scale * s)_j v_j        (M-SPA-2, M-GIB-3)

    >>> hard_choice(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([[2.0], [4.0], [9.0]]))
    tensor([3.])
    """
    best = (scores == scores.amax(-1, keepdim=True)).to(values.dtype)
    return (best[..., None] * values).sum(-2) / best.sum(-1, keepdim=True)


def hard_gap(scores: Tensor, scale: Number = 1.0) -> tuple[Tensor, Tensor]:  # (..., n) -> (...), (...)
    """Mass that softmax leaves off its best key, and a bound on it from the lead g of that key.

        1 - p_max  <=  (n - 1) exp(-scale * g);       |soft - hard| <= (1 - p_max) * diam(V)        (M-SPA-2)

    Unique maximum; at a tie the bound is n - 1 and says nothing; of one key both are 0.

    >>> [round(x.item(), 4) for x in hard_gap(torch.tensor([2.0, 0.0]), 1.0)]  # 1/(1 + e^2), e^-2
    [0.1192, 0.1353]
    """
    scale_t = number(scale).to(scores.dtype)
    p = gibbs_law(scores, scale=scale_t).probs
    n = scores.shape[-1]
    top = scores.topk(min(n, 2), -1).values
    rest = p.sum(-1) - p.amax(-1)
    return rest, (n - 1) * torch.exp(-scale_t * (top[..., 0] - top[..., -1]))


def gumbel_noise(*shape: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard Gumbel numbers; the uniform ones behind them are kept away from 0 and 1. Mean 0.5772, variance pi^2 / 6.

        g = -log(-log U)        (M-SPA-3)

    >>> gumbel_noise(3, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([3])
    """
    tiny = torch.finfo(dtype).eps
    u = torch.rand(*shape, generator=generator, dtype=dtype, device=where(generator)).clamp(tiny, 1 - tiny)
    return -torch.log(-torch.log(u))


def gumbel_softmax(logits: Tensor, temperature: Number, noise: Tensor) -> Tensor:  # (..., n)
    """A relaxed draw of a key: its argmax follows softmax(logits) at *every* temperature, its mean does not.

        y = softmax((logits + g) / temperature)        (M-SPA-3)

    One-hot as the temperature goes to 0, uniform as it grows.
    From Jang, Gu and Poole (2017), Categorical reparameterization with Gumbel-softmax; Maddison, Mnih and Teh (2017),
    The concrete distribution: a continuous relaxation of discrete random variables.

    >>> gumbel_softmax(torch.tensor([0.0, 0.0]), 1.0, torch.tensor([1.0986, 0.0]))  # odds 3
    tensor([0.7500, 0.2500])
    """
    return torch.softmax((logits + noise) / above_zero("temperature", temperature, logits.dtype), -1)


def straight_through(soft: Tensor) -> Tensor:  # (..., n)
    """One-hot going forward, the relaxed sample's gradient going back.

        one_hot(argmax y) + y - stop_gradient(y)        (M-SPA-2, M-SPA-3)

    From Bengio, Leonard and Courville (2013), Estimating or propagating gradients through stochastic neurons for
    conditional computation.

    >>> straight_through(torch.tensor([0.75, 0.25]))
    tensor([1., 0.])
    """
    hard = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard + (soft - soft.detach())


__all__ = public(globals())
