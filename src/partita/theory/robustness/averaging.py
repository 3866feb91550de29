"""How noise on the scores reaches the output of a softmax average: exactly, in expectation, and by simulation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.support import Support
from partita.theory._domain import Number, number
from partita.theory.robustness.noise import Noise

__all__ = [
    "NoiseEffect",
    "ratio_expansion",
    "monte_carlo_noise",
    "noise_bias",
    "noise_covariance",
    "noise_effect",
    "noise_identity",
    "noise_sd_bound",
]


class NoiseEffect(NamedTuple):
    """Bias and standard deviation of an output under noisy scores, per coordinate of the value."""

    bias: Tensor
    sd: Tensor


def noise_identity(
    probs: Tensor,  # (..., n)
    values: Tensor,  # (..., n, dim_value)
    noise: Tensor,  # (..., n)
    moment: Number = 1.0,
) -> Tensor:  # (..., dim_value)
    """The exact change of the output when these numbers are added to the scores; no factor n anywhere.

        out~ - out = sum_i p_i w_i (v_i - out) / (1 + sum_i p_i w_i),      w_i = exp(noise_i) / moment - 1

    True for every moment > 0: E[exp(noise)] makes w centred. Spec: M-ROB-1.

    >>> p, v = torch.tensor([0.5, 0.5]), torch.tensor([[0.0], [1.0]])
    >>> noise_identity(p, v, torch.tensor([1.0, 3.0]).log())  # weights 1 and 3: 3/4 - 1/2
    tensor([0.2500])
    """
    w = noise.exp() / number(moment).to(noise.dtype) - 1
    out = (probs[..., None] * values).sum(-2, keepdim=True)
    shift = (probs * w)[..., None] * (values - out)
    return shift.sum(-2) / (1 + (probs * w).sum(-1))[..., None]


def noise_bias(
    probs: Tensor,  # (..., n)
    values: Tensor,  # (..., n, dim_value)
    cv2: Number,
) -> Tensor:  # (..., dim_value)
    """The mean error of an output under independent noise on the scores, to first order in 1 / n_eff.

        E[out~] - out = -cv^2 * sum_i p_i^2 (v_i - out)

    O(1/n) for spread-out rows, exactly 0 for uniform ones. Spec: M-ROB-2.

    >>> noise_bias(torch.tensor([0.75, 0.25]), torch.tensor([[0.0], [1.0]]), 1.0)  # -(9/16 * -1/4 + 1/16 * 3/4)
    tensor([0.0938])
    """
    out = (probs[..., None] * values).sum(-2, keepdim=True)
    return -number(cv2).to(probs.dtype) * (probs.square()[..., None] * (values - out)).sum(-2)


def noise_covariance(
    probs: Tensor,  # (..., n)
    values: Tensor,  # (..., n, dim_value)
    cv2: Number,
) -> Tensor:  # (..., dim_value, dim_value)
    """The covariance of an output under independent noise on the scores, to first order in 1 / n_eff.

        Cov = cv^2 * sum_i p_i^2 (v_i - out)(v_i - out)^T

    Its root is O(1/sqrt(n)) for spread-out rows: larger than the bias. Spec: M-ROB-2.

    >>> noise_covariance(torch.tensor([0.5, 0.5]), torch.tensor([[0.0], [1.0]]), 1.0)  # 2 * 1/4 * 1/4
    tensor([[0.1250]])
    """
    centred = values - (probs[..., None] * values).sum(-2, keepdim=True)
    weighted = probs.square()[..., None] * centred
    return number(cv2).to(probs.dtype) * weighted.transpose(-1, -2) @ centred


def noise_sd_bound(probs: Tensor, values: Tensor, cv2: Number) -> Tensor:  # (..., dim_value)
    """A bound on the first-order standard deviation from the largest weight and the spread of the values.

        sd <= cv * sqrt(p_max * Var_p(v))

    Spec: M-ROB-2.

    >>> noise_sd_bound(torch.tensor([0.5, 0.5]), torch.tensor([[0.0], [1.0]]), 1.0)  # sqrt(1/2 * 1/4)
    tensor([0.3536])
    """
    centred = values - (probs[..., None] * values).sum(-2, keepdim=True)
    variance = (probs[..., None] * centred.square()).sum(-2)
    return (number(cv2).to(probs.dtype) * probs.amax(-1)[..., None] * variance).sqrt()


def noise_effect(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    value: Tensor,  # (..., n_key, dim_value)
    cv2: Number,
    *,
    scale: Number = 1.0,
    bias: Tensor | None = None,
    support: Support | None = None,
) -> NoiseEffect:  # fields (..., n_query, dim_value)
    """Predicted bias and standard deviation of attention under noisy scores, streaming.

    Squared weights are a Gibbs law at twice the scale, E2 its expectation:

        sum_i p_i^2 f(v_i) = c * E2[f(v)],    c = sum p^2 = Z(2z) / Z(z)^2
        bias = -cv^2 c (E2[v] - out),      sd^2 = cv^2 c (E2[v^2] - 2 out E2[v] + out^2)

    Needs n_eff = 1/c large. 0 on empty rows. Spec: M-ROB-2.

    >>> e = noise_effect(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([[0.0], [1.0]]), 1.0)
    >>> round(e.sd.item() ** 2, 4), abs(e.bias.item())  # 2 * 1/4 * 1/4, and no bias for a uniform row
    (0.125, 0.0)
    """
    once = Gibbs(query, key, scale=scale, bias=bias, support=support)
    twice = Gibbs(query, key, scale=2 * scale, bias=None if bias is None else 2 * bias, support=support)
    log_z = once.log_partition()
    mass = torch.where(log_z.isneginf(), 0.0, torch.exp(twice.log_partition() - 2 * log_z))[..., None]
    out = once.expectation(value)
    first, second = twice.expectation(torch.cat([value, value.square()], -1)).chunk(2, -1)
    factor = number(cv2).to(mass.dtype) * mass
    variance = factor * (second - 2 * out * first + out.square())
    return NoiseEffect(-factor * (first - out), variance.clamp(min=0).sqrt())


def ratio_expansion(mean_x: Number, mean_y: Number, covariance: Number, variance_y: Number) -> Tensor:
    """The mean of a ratio of two fluctuating numbers, to second order.

        E[X/Y] = EX/EY - Cov(X,Y)/EY^2 + Var(Y) EX/EY^3

    Spec: M-ROB-2.

    >>> ratio_expansion(1.0, 2.0, 0.0, 0.4).item()  # 0.5 + 0.4 / 8
    0.55
    """
    x, y, c, v = number(mean_x), number(mean_y), number(covariance), number(variance_y)
    return x / y - c / y**2 + v * x / y**3


def monte_carlo_noise(
    scores: Tensor,  # (n,)
    values: Tensor,  # (n, dim_value)
    noise: Noise,
    *,
    draws: int = 1000,
    generator: torch.Generator | None = None,
    chunk: int = 4096,
) -> tuple[NoiseEffect, NoiseEffect]:
    """Bias and standard deviation measured by adding noise many times, and the standard error of each.

        out~ = softmax(scores + noise) @ values

    The comparator of `noise_bias` and `noise_covariance`. The error of sd assumes near-normal outputs. Spec: M-ROB-2.

    >>> from partita.theory.robustness import GaussianNoise
    >>> effect, error = monte_carlo_noise(torch.zeros(4), torch.ones(4, 1), noise=GaussianNoise(1.0), draws=10)
    >>> effect.sd.item() < 1e-6  # equal values cannot move
    True
    """
    out = torch.softmax(scores, -1) @ values
    count, total, square = 0, torch.zeros_like(out), torch.zeros_like(out)
    while count < draws:
        m = min(draws - count, max(1, chunk * 256 // scores.shape[-1]))
        drawn = noise.sample(m, scores.shape[-1], generator=generator, dtype=scores.dtype)
        moved = torch.softmax(scores + drawn, -1) @ values
        total += (moved - out).sum(0)
        square += (moved - out).square().sum(0)
        count += m
    mean = total / count
    sd = (square / count - mean.square()).clamp(min=0).sqrt()
    return NoiseEffect(mean, sd), NoiseEffect(sd / count**0.5, sd / (2 * count) ** 0.5)
