"""What length-dependent scales do to entropy: their calibration, their equivalents, and a slope that measures them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require
from partita.theory.information.entropy import entropy

__all__ = [
    "bias_growth",
    "calibrate_kappa",
    "crossover_length",
    "equivalent_kappa",
    "head_sharpness",
    "kappa_entropy",
    "length_slope",
    "reference_length_slope",
    "row_score_variance",
    "score_variance",
    "stationary_length",
]


def score_variance(
    dim: int,
    query_variance: Number = 1.0,
    key_variance: Number = 1.0,
    query_mean: Number = 0.0,
    key_mean: Number = 0.0,
) -> Tensor:
    """Variance of <q, k> for independent entries; 1/sqrt(dim) makes it sd_q * sd_k when the means are 0.

        Var = dim * [ (vq + mq^2)(vk + mk^2) - mq^2 mk^2 ],       mean = dim * mq * mk

    Dividing scores by dim instead gives v^2 / dim, not a constant. Not for the diagonal of self-attention.
    Spec: M-SCL-1.

    >>> score_variance(64).item(), score_variance(1, 1.0, 1.0, 0.5, 0.5).item()
    (64.0, 1.5)
    """
    vq, vk, mq, mk = number(query_variance), number(key_variance), number(query_mean), number(key_mean)
    return dim * ((vq + mq**2) * (vk + mk**2) - mq**2 * mk**2)


def row_score_variance(query: Tensor, key_variance: Number = 1.0) -> Tensor:  # (..., dim) -> (...)
    """Variance of the scores of *one* query over its keys, which is what its softmax sees.

        |q|^2 * key_variance

    Spec: M-SCL-1.

    >>> row_score_variance(torch.tensor([3.0, 4.0]))
    tensor(25.)
    """
    return query.square().sum(-1) * number(key_variance).to(query.dtype)


def equivalent_kappa(n: Number, dim: Number) -> Tensor:
    """The kappa for which kappa log(n) / dim equals 1 / sqrt(dim) at this length.

        kappa = sqrt(dim) / log n

    Infinite at n = 1. Spec: M-SCL-9, M-SCL-7.

    >>> round(equivalent_kappa(512, 64).item(), 3)
    1.282
    """
    return number(dim).sqrt() / number(n).log()


def crossover_length(dim: Number) -> Tensor:
    """The length at which log(n) / dim equals 1 / sqrt(dim).

        n = exp(sqrt(dim))

    2981 for dim 64, 82 000 for 128, 6.7e9 for 512: not "usually close". Spec: M-SCL-9.

    >>> round(crossover_length(64).item())
    2981
    """
    return number(dim).sqrt().exp()


def calibrate_kappa(n0: Number, dim: Number, sigma: Number | None = None, growth: Number = 1.0) -> Tensor:
    """The kappa that makes kappa log(n) / dim hold entropy constant to first order around the length n0.

        kappa = dim / (sigma * sqrt(log n0)),      sigma = sd of raw scores, sqrt(dim) for unit-variance vectors (None)

    There H = log(n0) / 2 and the sharpness is sqrt(log n0). Gaussian scores. Spec: M-SCL-16.

    Under an additive position bias, independent of the scores, H = H_bias(n) - sharpness^2 / 2, so that kappa is
    smaller by sqrt(growth), growth = dH_bias / d log n as `bias_growth` gives it: 1 without a bias, 0 where the bias
    alone has already ended the dilution.

    >>> round(calibrate_kappa(4096, 64).item(), 2)  # sqrt(64 / 8.318)
    2.77
    """
    n0, dim = number(n0), number(dim)
    require(n0 > 1, f"n0 must exceed 1, as log 1 = 0; got {n0}.")
    sigma = dim.sqrt() if sigma is None else number(sigma)
    require(sigma > 0, f"sigma is the standard deviation of scores and must be positive; got {sigma}.")
    growth = number(growth)
    require(growth >= 0, f"growth is how fast the bias alone widens a row, and not negative; got {growth}.")
    return dim / sigma * (growth / n0.log()).sqrt()


def bias_growth(bias: Tensor, n0: int) -> Tensor:
    """How fast the entropy of a position bias alone grows with the length: dH_bias / d log n at n0.

        H_bias(n) = H(softmax(bias_0 ... bias_{n-1})),      bias_t what a key at distance t gets        (M-ATT-9)

    1 for no bias (H_bias = log n), 0 for one that has decayed: ALiBi with slope m widens no further beyond some 1 / m.

    >>> bias_growth(torch.zeros(2000), 1000)
    tensor(1.0000, dtype=torch.float64)
    >>> bool(bias_growth(-0.1 * torch.arange(2000), 1000) < 1e-6)
    True

    bias: by distance, (..., more than n0 entries). Spec: M-ATT-9.
    """
    require(bias.shape[-1] > n0 >= 2, f"bias must reach beyond n0 = {n0} >= 2; got {bias.shape[-1]} distances.")
    short, long = (entropy(bias[..., : n0 + d].double()) for d in (-1, 1))
    return (long - short) / math.log((n0 + 1) / (n0 - 1))


def stationary_length(kappa: Number, dim: Number, sigma: Number | None = None) -> Tensor:
    """The length around which kappa log(n) / dim holds entropy constant; its logarithm, as it is often astronomic.

        log n0 = (dim / (kappa * sigma))^2

    kappa = 1 with unit-variance vectors: log n0 = dim. Spec: M-SCL-16.

    >>> stationary_length(1.0, 64).item()
    64.0
    """
    dim = number(dim)
    sigma = dim.sqrt() if sigma is None else number(sigma)
    return (dim / (number(kappa) * sigma)) ** 2


def kappa_entropy(n: Number, kappa: Number, dim: Number, sigma: Number | None = None) -> Tensor:
    """Entropy of Gaussian scores under kappa log(n) / dim, below condensation.

        H = log n - (c log n)^2 / 2,       c = kappa * sigma / dim

    Spec: M-SCL-16.

    >>> kappa_entropy(torch.tensor(4.0).double().exp(), 1.0, 4.0).item()  # c = 1/2: 4 - 4/2
    2.0
    """
    log_n, dim = number(n).log(), number(dim)
    sigma = dim.sqrt() if sigma is None else number(sigma)
    return log_n - (number(kappa) * sigma / dim * log_n) ** 2 / 2


def reference_length_slope(n: Number, n_train: Number) -> Tensor:
    """dH / d log n under the scale (log n / log n_train) / sqrt(dim), for unit-variance Gaussian scores.

        1 - log n / (log n_train)^2

    At n = n_train only 1 / log n_train of the growth is removed. Spec: M-SCL-7.
    The factor log n is that of Chiang and Cholak (2022), Overcoming a theoretical limitation of self-attention.

    >>> round(reference_length_slope(512, 512).item(), 3)
    0.84
    """
    return 1 - number(n).log() / number(n_train).log() ** 2


def head_sharpness(heads: Number, dim_model: Number, n: Number, kappa: Number = 1.0) -> Tensor:
    """Sharpness under kappa log(n) / dim_head with unit-variance vectors: it grows like sqrt(heads) only.

        kappa * log(n) * sqrt(heads / dim_model)

    Spec: M-SCL-8.

    >>> round(head_sharpness(1, 512, 1024).item(), 3), round(head_sharpness(4, 512, 1024).item(), 3)
    (0.306, 0.613)
    """
    return number(kappa) * number(n).log() * (number(heads) / number(dim_model)).sqrt()


def length_slope(
    policy: Callable[[int], float],
    sampler: Callable[[int], Tensor],
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:  # slope, mean entropy per length
    """How much of the growth of log n shows in the entropy: 0 is invariance, 1 is no control.

        slope of the least-squares line of  mean H(softmax(policy(n) * scores))  against log n

    `sampler(n)` gives scores (rows, n). State the sampler and the range with the number. Spec: M-SCL-0, M-SCL-17.

    >>> slope, _ = length_slope(lambda n: 1.0, lambda n: torch.zeros(1, n, dtype=torch.float64), [4, 16, 64])
    >>> round(slope.item(), 6)  # equal scores: H = log n
    1.0
    """
    require(len(lengths) >= 2, "a slope needs at least two lengths.")
    means = torch.stack([entropy(policy(n) * sampler(n)).mean().double() for n in lengths])
    x = torch.tensor([float(n) for n in lengths], dtype=torch.float64, device=means.device).log()
    x = x - x.mean()
    return (x * means).sum() / x.square().sum(), means
