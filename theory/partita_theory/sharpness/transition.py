"""Entropy as a function of length and sharpness: Gaussian scores, other score laws, condensation, a needle."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from partita.scale import critical_scale as critical_scale
from partita_theory._domain import Number, bisect, count, not_negative, number, require, where


def condensation_sharpness(n: Number) -> Tensor:
    """The sharpness (scale * sd of scores) at which a row of n Gaussian scores condenses on a few keys.

        sqrt(2 log n)        (M-SCL-12)

    The transition of Derrida (1981), Random-energy model: an exactly solvable model of disordered systems.

    >>> round(condensation_sharpness(65536).item(), 2)
    4.71
    """
    return (2 * count(n).log()).sqrt()


def gaussian_entropy(n: Number, sharpness: Number, *, finite: bool = False) -> Tensor:
    """Mean entropy of a softmax over n independent Gaussian scores: the law of many keys, or `finite` the exact mean.

        H = log n - sharpness^2 / 2        (M-SCL-12)

    finite: E log Z - x d(E log Z)/dx,    E log Z = integral over t of (exp(-t) - E[exp(-t exp(x s))]^n) / t

    The law warns above 0.6 sqrt(2 log n), where its gap to log n is too large by 12, 6, 3 % for n = 2^8, 2^12, 2^16.
    The mean of finite rows holds on both sides of the transition; it is summed on a grid, a pair of numbers at a time.

    >>> round(gaussian_entropy(1024, 1.0).item(), 4)  # 6.9315 - 0.5
    6.4315
    >>> round(gaussian_entropy(4096, math.log(4096) ** 0.5, finite=True).item(), 3)  # where the law has log(4096) / 2
    4.632
    """
    if finite:
        sizes, sharp = torch.broadcast_tensors(number(n).double(), number(sharpness).double())
        require((sizes >= 1) & (sharp >= 0), f"n counts keys and sharpness is not negative; got {n} and {sharpness}.")
        found = [_exact_entropy(float(a), float(x)) for a, x in zip(sizes.reshape(-1), sharp.reshape(-1), strict=True)]
        return torch.tensor(found, dtype=torch.float64).reshape(sizes.shape)
    n, x = number(n), number(sharpness) ** 2
    limit = condensation_sharpness(n)
    if bool((x.sqrt() > 0.6 * limit).any()):
        warnings.warn(
            f"sharpness {x.sqrt()} exceeds 0.6 * sqrt(2 log n) = {0.6 * limit}: "
            "the Gaussian law overstates the gap to log n; finite=True gives the mean.",
            stacklevel=2,
        )
    return n.log() - x / 2


def _exact_entropy(n: float, x: float) -> float:
    """E H of n scores x * s, s standard normal.

    The trapezoid rule over u = log t and over s: both integrands are analytic and fall off, so a coarse grid is exact
    to rounding.
    """
    if n == 1 or x == 0:
        return log(n)
    top, step = math.sqrt(2 * log(n)) + 9, 0.25
    s = torch.arange(-top, top, min(0.1, step / x), dtype=torch.float64)
    weight = torch.softmax(-(s**2) / 2, -1)
    log_z = mean = 0.0
    for u in torch.arange(-(log(n) + x * top + 40), x * top + 6, step, dtype=torch.float64).split(256):
        a = (u[:, None] + x * s).exp()
        none = torch.log1p((torch.expm1(-a) @ weight).clamp(min=-1.0))  # log E exp(-t exp(x s))
        slope = torch.where(a < 700, a * torch.exp(-a), 0.0) @ (weight * s)
        log_z += step * float((torch.exp(-u.exp()) - torch.exp(n * none)).sum())
        mean += step * float((n * torch.exp((n - 1) * none) * slope).sum())
    return log_z - x * mean


def gaussian_log_partition(n: Number, sharpness: Number, mean: Number = 0.0) -> Tensor:
    """Log-partition of a row of Gaussian logits with this mean and standard deviation.

        log Z = log n + mean + sharpness^2 / 2,  below the transition: past it the maximum decides  (M-SCL-12, M-SCL-11)

    >>> gaussian_log_partition(1, 2.0, 1.0).item()
    3.0
    """
    return number(n).log() + number(mean) + number(sharpness) ** 2 / 2


def gaussian_mean_score(scale: Number, mean: Number = 0.0, sigma: Number = 1.0) -> Tensor:
    """Mean score under the softmax weights: shifted by scale * sigma^2, far below the maximum.

        E_p[s] = mean + scale * sigma^2        (M-SCL-12)

    >>> gaussian_mean_score(2.0, 1.0, 3.0).item()  # 1 + 2 * 9
    19.0
    """
    return number(mean) + number(scale) * number(sigma) ** 2


def gaussian_sharpness(n: Number, entropy: Number) -> Tensor:
    """The sharpness that gives a row of n Gaussian scores this entropy: it grows like sqrt(log n), not log n.

        sqrt(2 (log n - entropy)),     0 when the target is not below log n        (M-SCL-14)

    True for targets well above log(n) / 2; at n = 2^13..2^20 the exact value is larger by 0-1 % for entropy 8, 2-6 %
    for 6, 12-17 % for 4, 47-52 % for 2: at n = 4096 a target of 4 gives 4.53 and one of 2 gives 3.53 nats
    (`gaussian_entropy(..., finite=True)`).

    >>> gaussian_sharpness(torch.tensor(10.0, dtype=torch.float64).exp(), 2.0).item()  # sqrt(16)
    4.0
    """
    return (2 * (number(n).log() - number(entropy)).clamp(min=0)).sqrt()


def expected_maximum(n: Number, *, corrected: bool = True) -> Tensor:
    """Mean of the largest of n standard normal numbers.

        a = sqrt(2 log n);      corrected:  a - (log log n + log 4 pi) / (2 a) + 0.5772 / a        (M-SCL-13)

    >>> round(expected_maximum(1000, corrected=False).item(), 3), round(expected_maximum(1000).item(), 3)
    (3.717, 3.272)
    """
    n = count(n, 2)
    a = condensation_sharpness(n)
    return a - (n.log().log() + log(4 * pi)) / (2 * a) + 0.5772156649015329 / a if corrected else a


def condensed_entropy(index: Number) -> Tensor:
    """Mean entropy of Poisson-Dirichlet weights: what is left of a condensed row.

        H = psi(1) - psi(1 - m),      0 <= m < 1,     infinite at m = 1, the transition        (M-SCL-13)

    After Derrida (1981) and Ruelle (1987), A mathematical reformulation of Derrida's REM and GREM.

    >>> round(condensed_entropy(0.5).item(), 4)  # 2 log 2
    1.3863
    """
    m = number(index)
    require((m >= 0) & (m < 1), f"the index of a condensed row lies in [0, 1); got {m}.")
    return torch.digamma(torch.ones_like(m)) - torch.digamma(1 - m)


def condensed_index(entropy: Number) -> Tensor:
    """The index whose weights have this mean entropy: the inverse of `condensed_entropy`, by bisection.

        psi(1) - psi(1 - m) = entropy        (M-SCL-13, M-SCL-14)

    >>> round(1 / condensed_index(2.0).item(), 3)
    1.661
    """
    target = not_negative("entropy is a mean of -log p", entropy)
    zero, one = torch.zeros_like(target), torch.ones_like(target)
    # 2^-60 is below the rounding of float64
    return bisect(lambda m: torch.digamma(one) - torch.digamma(1 - m) < target, zero, one, steps=60)


def extreme_location(n: Number) -> Tensor:
    """Where the largest of n standard normal numbers typically is: closer than sqrt(2 log n).

        n * phi(b) / b = 1,     n >= 3        (M-SCL-13, M-SCL-19)

    From Hall (1979), On the rate of convergence of normal extremes.

    >>> round(extreme_location(4096).item(), 2), round((2 * torch.tensor(4096.0).log()).sqrt().item(), 2)
    (3.51, 4.08)
    """
    n = number(n)
    require(n >= 3, f"the equation has its root above 0.4 only for n >= 3; got {n}.")
    low, high = torch.full_like(n, 0.1), (2 * n.log()).sqrt() + 1
    return bisect(lambda b: n.log() - b**2 / 2 - 0.5 * log(2 * pi) - b.log() > 0, low, high)


def frozen_index(n: Number, sharpness: Number, *, finite: bool = True) -> Tensor:
    """The Poisson-Dirichlet index of a row of n Gaussian scores beyond the transition.

        m = b_n / sharpness        (finite False:  sqrt(2 log n) / sharpness)        (M-SCL-13)

    Convergence in n is logarithmically slow; b_n (`extreme_location`) is the better number at practical lengths.

    >>> round(frozen_index(torch.tensor(50.0).double().exp(), 20.0, finite=False).item(), 9)  # sqrt(100) / 20
    0.5
    """
    top = extreme_location(n) if finite else condensation_sharpness(n)
    m = top / number(sharpness)
    require(m < 1, f"sharpness {sharpness} is below the transition {top}: use gaussian_entropy.")
    return m


def frozen_sharpness(n: Number, entropy: Number) -> Tensor:
    """The sharpness that holds this entropy as n grows without bound: again sqrt(log n), with a larger factor.

        sqrt(2 log n) / m(entropy)        (M-SCL-14)

    >>> round((frozen_sharpness(1e6, 2.0) / (2 * torch.tensor(1e6).double().log()).sqrt()).item(), 3)
    1.661
    """
    return condensation_sharpness(n) / condensed_index(entropy)


CumulantFunction = Callable[[Tensor], Tensor]


class Prediction(NamedTuple):
    """Entropy, log-partition, and whether the row is past condensation (then both are only formal)."""

    entropy: Tensor
    log_partition: Tensor
    condensed: Tensor


def predicted_entropy(n: Number, scale: Number, cumulant: CumulantFunction) -> Prediction:
    """Entropy of a softmax over n independent scores from the log of their exponential moment.

        H = log n - [scale * K'(scale) - K(scale)],      K(scale) = log E exp(scale * s)        (M-SCL-11)

    The bracket is a large-deviation rate; once it reaches log n the row has condensed on O(1) keys.
    The rate function is that of Cramer (1938), Sur un nouveau theoreme-limite de la theorie des probabilites.

    >>> p = predicted_entropy(1000, 1.0, gaussian_cumulant(0.0, 1.0))
    >>> round(p.entropy.item(), 4), p.condensed.item()  # log 1000 - 1/2
    (6.4078, False)
    """
    n, at = count(n), number(scale).double().detach().requires_grad_()
    with torch.enable_grad():
        value = cumulant(at)
        (slope,) = torch.autograd.grad(value.sum(), at)
    rate = at.detach() * slope - value.detach()
    return Prediction(n.log() - rate, n.log() + value.detach(), rate >= n.log())


def gaussian_cumulant(mean: float = 0.0, sigma: float = 1.0) -> CumulantFunction:
    """K for normal scores.

        K(t) = mean * t + sigma^2 t^2 / 2        (M-SCL-12)

    >>> gaussian_cumulant(1.0, 2.0)(torch.tensor(1.0))
    tensor(3.)
    """
    return lambda t: mean * t + sigma**2 * t**2 / 2


def uniform_cumulant(low: float = 0.0, high: float = 1.0) -> CumulantFunction:
    """K for scores uniform on an interval of width w.

        K(t) = high * t + log((1 - exp(-t w)) / (t w)),     t > 0        (M-SCL-11, M-SCL-15)

    >>> round(uniform_cumulant(0.0, 1.0)(torch.tensor(1.0)).item(), 4)  # log(e - 1)
    0.5413
    """
    require(high > low, f"an interval needs high > low; got [{low}, {high}].")
    return lambda t: high * t + torch.log(-torch.expm1(-t * (high - low))) - torch.log(t * (high - low))


def laplace_cumulant(b: float = 1.0) -> CumulantFunction:
    """K for Laplace scores of width b; it exists for t < 1/b only.

        K(t) = -log(1 - b^2 t^2)        (M-SCL-11)

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

        K(t) = log(1 - share + share * exp(height t))        (M-SCL-11)

    >>> bernoulli_cumulant(0.5)(torch.tensor(0.0))
    tensor(0.)
    """
    require(0 < share < 1, f"share is a probability strictly between 0 and 1; got {share}.")
    return lambda t: torch.logaddexp(torch.full_like(t, log(1 - share)), height * t + log(share))


def laplace_method_interior(scale: Number, peak: Number, log_density: Number, curvature: Number) -> Tensor:
    """Laplace's method for log E exp(scale * s), maximum of the density inside its support; exact for a normal one.

        scale * s* + log p(s*) + log(2 pi)/2 - log|(log p)''(s*)|/2        (M-SCL-11)

    >>> round(laplace_method_interior(2.0, 2.0, -2.0 - 0.9189385, -1.0).item(), 4)  # N(0,1) at scale 2: 2^2 / 2
    2.0
    """
    c = number(curvature)
    require(c < 0, f"at an interior maximum the curvature is negative; got {c}.")
    return number(scale) * number(peak) + number(log_density) + 0.5 * log(2 * pi) - 0.5 * (-c).log()


def laplace_method_edge(scale: Number, edge: Number, width: Number) -> Tensor:
    """The same for a uniform density of this width, where the maximum sits at the edge of the support.

        scale * edge - log(scale * width),     off by log(1 - exp(-scale * width))        (M-SCL-11)

    >>> round(laplace_method_edge(8.0, 1.0, 2.0).item(), 3)  # 8 - log 16
    5.227
    """
    s, w = number(scale), number(width)
    require((s > 0) & (w > 0), f"scale and width must be positive; got {s} and {w}.")
    return s * number(edge) - (s * w).log()


def critical_scale_from_gaps(edges: Tensor, counts: Tensor, *, least: int = 2) -> Tensor:  # (E,), (..., E) -> (...)
    """`critical_scale` from the gap-counting function at some edges, as `Gibbs.gaps` streams it: at most the true one.

        N(x) = #{ j : max_k s_k - s_j <= x },     critical = max over x > 0 of log N(x) / x
        >=  max over edges with at least `least` keys of log N(edge) / edge        (M-COL-6, M-COL-5)

    Above it every gap is worth its competitors, N(x) exp(-scale x) < 1, and the row condenses on a few keys; below it
    the competitors at the gap that decides outweigh the best. The laws sqrt(log n), log n and n are those of Gaussian
    scores, of one key with a margin, of bounded scores.
    From Hayase and Karakida (2026), A unified framework for critical scaling of inverse temperature in self-attention,
    arXiv 2605.12697: their upper-tail accumulation scale, as restated elsewhere (their own text was not at hand).

    >>> critical_scale_from_gaps(torch.tensor([0.5, 1.0, 2.0]), torch.tensor([[1, 4, 4]]))  # log 4 at a gap of 1
    tensor([1.3863])
    """
    require(edges > 0, f"edges must be positive; got {edges}.")
    require(least >= 2, f"least counts the best key and its competitors, at least 2; got {least}.")
    wide = edges if edges.is_floating_point() else edges.double()
    each = counts.clamp(min=1).to(wide.dtype).log() / wide
    return torch.where(counts >= least, each, 0.0).amax(-1)


def critical_mass_bound(ratio: Number) -> Tensor:
    """The most that all keys together can weigh, the best one counting 1, at this multiple of the critical scale.

        sum_j exp(-scale gap_j) <= zeta(scale / critical)          so p_max >= 1 / zeta(ratio), whatever n   (M-COL-6)

    since gap_j >= log(j) / critical. inf at and below the critical scale, where there is no bound for all n: there,
    with the gap x that decides, the mass is at least N(x)^(1 - ratio).

    >>> round(critical_mass_bound(2.0).item(), 4)  # pi^2 / 6
    1.6449
    """
    ratio = number(ratio)
    above = torch.where(ratio > 1, ratio, 2.0)
    return torch.where(ratio > 1, torch.special.zeta(above, torch.ones_like(above)), torch.inf)


def gaussian_critical_scale(n: Number, sigma: Number = 1.0) -> Tensor:
    """The typical critical scale of n Gaussian scores: the rate at which competitors gather below their maximum.

        n phi(a) / sigma,   n (1 - Phi(a)) = 1          near sqrt(2 log n) / sigma        (M-COL-6, M-SCL-14)

    N(x) is about exp(rate * x) near the maximum, as for scores with an exponential tail, whose rate does not grow.

    >>> round(gaussian_critical_scale(1e6).item(), 2), round((2 * math.log(1e6)) ** 0.5, 2)
    (4.95, 5.26)
    """
    size = number(n)
    require(size > 1, f"n counts keys, more than one; got {size}.")
    level = -torch.special.ndtri(1 / size)
    return size * torch.exp(-(level**2) / 2) / math.sqrt(2 * math.pi) / number(sigma)


def needle_threshold(n: Number, sigma: Number = 1.0, *, finite: bool = True) -> Tensor:
    """The height of a key among n Gaussian scores around which a large scale begins to let it dominate.

        sigma * b_n        (finite False:  sigma * sqrt(2 log n))        (M-SCL-19)

    There it beats the others with chance 1/e; `needle_chance` has the crossover, which sharpens with n only slowly.

    >>> round(needle_threshold(4096).item(), 2)
    3.51
    """
    top = extreme_location(n) if finite else condensation_sharpness(n)
    return number(sigma) * top


def needle_chance(n: Number, height: Number, sigma: Number = 1.0) -> Tensor:
    """The mean weight of a key of this height among n - 1 Gaussian scores at a large scale: the chance that it is best.

        Phi(height / sigma)^(n - 1)        (M-SCL-19)

    No threshold: at n = 10^5 it is 0.10, 0.46, 0.77 and 0.92 at 0.85, 0.9, 0.95 and 1 times sqrt(2 log n).

    >>> round(needle_chance(4096, needle_threshold(4096)).item(), 2)  # near 1/e
    0.39
    >>> round(needle_chance(1e5, 0.95 * needle_threshold(1e5, finite=False)).item(), 2)
    0.77
    """
    return torch.exp((count(n, 2) - 1) * torch.special.log_ndtr(number(height).double() / number(sigma)))


def needle_weight(height: Number, scale: Number, log_background: Number) -> Tensor:
    """Weight of a key of this height when all others have this log-partition.

        p = sigmoid(scale * height - log_background)        (M-SCL-19)

    >>> needle_weight(1.0, 2.0, 2.0).item()
    0.5
    """
    return torch.sigmoid(number(scale) * number(height) - number(log_background))


def needle_weight_typical(n: Number, height: Number, scale: Number, sigma: Number = 1.0) -> Tensor:
    """The same for n - 1 Gaussian scores, with the log-partition they have below condensation.

        p = sigmoid(scale * height - log(n - 1) - (scale sigma)^2 / 2)        (M-SCL-19)

    Largest at scale = height / sigma^2, which is flat and small where the height is well below the threshold.

    >>> needle_weight_typical(2, 1.0, 2.0).item()  # 2 - 0 - 2
    0.5
    """
    n, x = count(n, 2), number(scale) * number(sigma)
    return needle_weight(height, scale, (n - 1).log() + x**2 / 2)


def needle_weight_samples(
    n: int,
    height: float,
    scales: Tensor,  # (m,)
    *,
    draws: int = 64,
    sigma: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # (draws, m)
    """Weight of the needle in sampled backgrounds, for several scales at once on the same backgrounds.

        p = sigmoid(scale * height - logsumexp(scale * sigma * g)),    g standard normal        (M-SCL-19)

    >>> needle_weight_samples(9, 1.0, torch.tensor([0.0]), draws=1)  # scale 0: one of nine
    tensor([[0.1111]])
    """
    drawn = torch.randn(draws, n - 1, generator=generator, dtype=scales.dtype, device=where(generator))
    background = sigma * drawn.to(scales.device)
    log_z = torch.stack([torch.logsumexp(s * background, -1) for s in scales], -1)
    return needle_weight(height, scales, log_z)
