"""Any score law through its cumulant function: the entropy it predicts and where the prediction ends."""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require

__all__ = [
    "Prediction",
    "bernoulli_cumulant",
    "gaussian_cumulant",
    "laplace_cumulant",
    "laplace_method_edge",
    "laplace_method_interior",
    "predicted_entropy",
    "uniform_cumulant",
]

CumulantFunction = Callable[[Tensor], Tensor]


class Prediction(NamedTuple):
    """Entropy, log-partition, and whether the row is past condensation (then both are only formal)."""

    entropy: Tensor
    log_partition: Tensor
    condensed: Tensor


def predicted_entropy(n: Number, scale: Number, cumulant: CumulantFunction) -> Prediction:
    """Entropy of a softmax over n independent scores from the log of their exponential moment.

        H = log n - [scale * K'(scale) - K(scale)],      K(scale) = log E exp(scale * s)

    The bracket is a large-deviation rate; once it reaches log n the row has condensed on O(1) keys. K' is taken by
    autograd. Spec: M-SCL-11.
    The rate function is that of Cramer (1938), Sur un nouveau theoreme-limite de la theorie des probabilites.

    >>> p = predicted_entropy(1000, 1.0, gaussian_cumulant(0.0, 1.0))
    >>> round(p.entropy.item(), 4), p.condensed.item()  # log 1000 - 1/2
    (6.4078, False)
    """
    n = number(n)
    require(n >= 1, f"n counts visible keys, so n >= 1; got {n}.")
    at = number(scale).double().detach().requires_grad_()
    with torch.enable_grad():
        value = cumulant(at)
        (slope,) = torch.autograd.grad(value.sum(), at)
    rate = at.detach() * slope - value.detach()
    return Prediction(n.log() - rate, n.log() + value.detach(), rate >= n.log())


def gaussian_cumulant(mean: float = 0.0, sigma: float = 1.0) -> CumulantFunction:
    """K for normal scores.

        K(t) = mean * t + sigma^2 t^2 / 2

    Spec: M-SCL-12.

    >>> gaussian_cumulant(1.0, 2.0)(torch.tensor(1.0))
    tensor(3.)
    """
    return lambda t: mean * t + sigma**2 * t**2 / 2


def uniform_cumulant(low: float = 0.0, high: float = 1.0) -> CumulantFunction:
    """K for scores uniform on an interval of width w.

        K(t) = high * t + log((1 - exp(-t w)) / (t w))

    Written from the upper end, so that a large t does not overflow; needs t > 0. Spec: M-SCL-11, M-SCL-15.

    >>> round(uniform_cumulant(0.0, 1.0)(torch.tensor(1.0)).item(), 4)  # log(e - 1)
    0.5413
    """
    require(high > low, f"an interval needs high > low; got [{low}, {high}].")
    return lambda t: high * t + torch.log(-torch.expm1(-t * (high - low))) - torch.log(t * (high - low))


def laplace_cumulant(b: float = 1.0) -> CumulantFunction:
    """K for Laplace scores of width b; it exists for t < 1/b only.

        K(t) = -log(1 - b^2 t^2)

    Spec: M-SCL-11.

    >>> laplace_cumulant(1.0)(torch.tensor(0.5))  # -log 0.75
    tensor(0.2877)
    """

    def cumulant(t: Tensor) -> Tensor:
        require(
            t.detach().abs() * b < 1, f"E exp(t s) is infinite for Laplace scores when t >= 1/b = {1 / b}; got t = {t}."
        )
        return -torch.log1p(-((b * t) ** 2))

    return cumulant


def bernoulli_cumulant(share: float, height: float = 1.0) -> CumulantFunction:
    """K for scores that are `height` with this probability and 0 otherwise.

        K(t) = log(1 - share + share * exp(height t))

    Spec: M-SCL-11.

    >>> bernoulli_cumulant(0.5)(torch.tensor(0.0))
    tensor(0.)
    """
    require(0 < share < 1, f"share is a probability strictly between 0 and 1; got {share}.")
    return lambda t: torch.logaddexp(torch.full_like(t, log(1 - share)), height * t + log(share))


def laplace_method_interior(scale: Number, peak: Number, log_density: Number, curvature: Number) -> Tensor:
    """Laplace's method for log of the integral of exp(scale * s) p(s), maximum inside the support.

        scale * s* + log p(s*) + log(2 pi)/2 - log|(log p)''(s*)|/2

    Exact for a normal density. Spec: M-SCL-11.

    >>> round(laplace_method_interior(2.0, 2.0, -2.0 - 0.9189385, -1.0).item(), 4)  # N(0,1) at scale 2: 2^2 / 2
    2.0
    """
    c = number(curvature)
    require(c < 0, f"at an interior maximum the curvature is negative; got {c}.")
    return number(scale) * number(peak) + number(log_density) + 0.5 * log(2 * pi) - 0.5 * (-c).log()


def laplace_method_edge(scale: Number, edge: Number, width: Number) -> Tensor:
    """The same for a uniform density of this width, where the maximum sits at the edge of the support.

        scale * edge - log(scale * width)

    Off by log(1 - exp(-scale * width)). Spec: M-SCL-11.

    >>> round(laplace_method_edge(8.0, 1.0, 2.0).item(), 3)  # 8 - log 16
    5.227
    """
    s, w = number(scale), number(width)
    require((s > 0) & (w > 0), f"scale and width must be positive; got {s} and {w}.")
    return s * number(edge) - (s * w).log()
