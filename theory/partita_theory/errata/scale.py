"""Errata of the document on scales that grow with log n, equations (10) to (63)."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, exp, inf, log, nan, pi, sqrt

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.scale import InverseSqrt, KappaLog, Mixed, Policy
from partita.support import causal
from partita_theory import information, layer, sharpness
from partita_theory._domain import Number, bisect
from partita_theory.errata._samples import (
    F64,
    generator,
    mean_entropy,
    one_above,
    query_entropy,
    query_slope,
    randn,
    softmax,
    vector,
    weights,
)
from partita_theory.errata.row import Book, Numbers
from partita_theory.information import entropy

book = Book("scale")


def _rows() -> Tensor:
    return randn(100, 10_000)


@book.add("(10)", "C", "M-ENT-6", tolerance=0.1)
def _mean_field() -> Numbers:
    """printed: log mean e^{scale s} = scale * mean s
    right: a lower bound; off by (scale sigma)^2 / 2 for Gaussian scores
    quantity: log mean e^{2 s} for 10^4 normal scores
    """
    measured = torch.logsumexp(2 * _rows(), -1).mean() - log(10_000)
    return 2 * _rows().mean(), 2.0, measured


@book.add("(11)", "C", "M-ENT-6", tolerance=0.05)
def _log_z() -> Numbers:
    """printed: log Z = log n + scale * mean s
    right: log n + scale mean + (scale sigma)^2 / 2 for Gaussian scores
    quantity: log Z at scale 1, n = 10^4
    """
    s = _rows()
    return log(10_000) + s.mean(), sharpness.gaussian_log_partition(1e4, 1.0), torch.logsumexp(s, -1).mean()


@book.add("(13)", "C", "M-ENT-6", tolerance=0.05)
def _maximum() -> Numbers:
    """printed: E_p[s] = max s
    right: an upper bound; mean + scale sigma^2 for Gaussian scores
    quantity: mean score under the weights at scale 1, n = 10^4
    """
    return _mean_score(_rows(), _rows().amax(-1))


def _mean_score(rows: Tensor, printed: Tensor) -> Numbers:
    """Mean score under the weights, next to a printed stand-in for it."""
    return printed.mean(), sharpness.gaussian_mean_score(1.0), information.score_cumulants(rows, 1.0).mean.mean()


def _estimate(scale: float) -> Numbers:
    """Entropy from the mean and the maximum, from the variance, and measured."""
    s = _rows()
    printed = information.entropy_lower_bound(s, scale).mean()
    return printed, sharpness.gaussian_entropy(1e4, scale), mean_entropy(s, scale)


@book.add("(14)", "C", "M-ENT-6", tolerance=0.05)
def _entropy_one() -> Numbers:
    """printed: H = log n - scale (max - mean)
    right: H >= that; log n - (scale sigma)^2 / 2 for Gaussian scores
    quantity: entropy at scale 1, n = 10^4
    """
    return _estimate(1.0)


@book.add("(16)", "C", "M-ENT-6", tolerance=0.1)
def _entropy_two() -> Numbers:
    """printed: the same
    right: the same; negative already at scale 2.5 where H is 6
    quantity: entropy at scale 2, n = 10^4
    """
    return _estimate(2.0)


@book.add("(17)", "C", "M-SCL-2", tolerance=0.1)
def _condition() -> Numbers:
    """printed: log n - scale (max - mean) = C holds entropy at C
    right: it holds a lower bound at C
    quantity: entropy when the scale is set by it for C = 4, n = 10^4 (right: log n - (scale sigma)^2 / 2)
    """
    s = _rows()
    scale = (log(10_000) - 4) / (s.amax(-1) - s.mean(-1))
    return 4.0, log(10_000) - (scale**2 / 2).mean(), entropy(scale[:, None] * s).mean()


@book.add("(18)", "C", "M-SCL-15", tolerance=0.02)
def _affine() -> Numbers:
    """printed: scale proportional to log n holds entropy for a fixed margin
    right: affine, not proportional: log n + log log n - log C
    quantity: entropy at n = 2^16 with scale log n, margin 1 (printed: as at 2^4)
    """
    lead = log(2**16)
    return sharpness.margin_entropy(16, log(16)), sharpness.margin_entropy(2**16, lead), entropy(one_above(2**16, lead))


@book.add("(19)", "C", "M-SCL-15", tolerance=0.05)
def _tail() -> Numbers:
    """printed: the scale grows like log n whatever the scores
    right: the law depends on the tail: proportional to n for uniform scores
    quantity: exponent in n of the scale that keeps H = 2 for uniform scores, 2^8 to 2^12 (printed: that of log n)
    """
    sizes = vector(2**8, 2**12)
    from_log = sharpness.growth_exponent(sizes, vector(8, 12), of_log=False)
    right = sharpness.growth_exponent(sizes, sharpness.uniform_scale(sizes, 2.0), of_log=False)

    def found(n: int) -> Tensor:
        u = torch.rand(64, n, generator=generator(n), dtype=F64)
        return bisect(lambda x: entropy(x.exp() * u).mean() > 2, vector(0), vector(log(1e6)), 40)

    return from_log, right, (found(2**12) - found(2**8)) / log(2**4)


@book.add("(23)", "W", "M-SCL-2", tolerance=0.3)
def _combining() -> Numbers:
    """printed: log-n growth and unit-variance scores give log n / d
    right: they give log n / sqrt(d)
    quantity: sharpness (scale * sd of scores) at d = 64, n = 1024 that a gap of log n / (sd of scores) asks for
    """
    direction = randn(64, seed=1)
    sd = (randn(4000, 64) @ direction * (8 / direction.norm())).std()
    return log(1024) / 64 * sd, log(1024), log(1024) / 8 * sd


@book.add("(24)", "C", "M-SCL-16", tolerance=0.05)
def _kappa() -> Numbers:
    """printed: kappa is usually 1
    right: d / (sigma sqrt(log n0)), stationary at n0 to leading order; rows of that many keys keep a slope of 0.15
    quantity: dH / dlog n from 2048 to 8192 of normal scores, d = 64, kappa for n0 = 4096 (printed: with kappa = 1)
    """
    lengths, kappa = (2048, 8192), float(sharpness.calibrate_kappa(4096, 64))

    def slope(entropy_at: Callable[[int, float], Number], kappa: float) -> Number:
        short, long = (entropy_at(n, kappa * log(n) / 8) for n in lengths)
        return (long - short) / log(lengths[1] / lengths[0])

    def exact(n: int, sharp: float) -> Tensor:
        return sharpness.gaussian_entropy(n, sharp, finite=True)

    def sampled(n: int, sharp: float) -> Number:
        parts = [mean_entropy(randn(500, n, seed=k), sharp) for k in range(6)]
        return sum(parts) / len(parts)

    return slope(exact, 1.0), slope(exact, kappa), slope(sampled, kappa)


def _top(n: float, rows: Tensor) -> Numbers:
    """The largest of n normal numbers: the leading term, the corrected one, the mean over rows."""
    return sharpness.expected_maximum(n, corrected=False), sharpness.expected_maximum(n), rows.amax(-1).mean()


@book.add("(38)", "C", "M-SCL-13", tolerance=0.06)
def _largest() -> Numbers:
    """printed: max s = mean + sigma sqrt(2 log n)
    right: minus (log log n + log 4 pi) / (2 sqrt(2 log n)), plus 0.577 / sqrt(2 log n)
    quantity: mean of the largest of 1000 normal numbers
    """
    return _top(1000, randn(4000, 1000))


# 100 rows, whose largest scatter by 0.3 each: four standard errors, and 0.03 of the expansion
@book.add("(40)", "C", "M-SCL-13", tolerance=0.15)
def _spread() -> Numbers:
    """printed: max - mean = sigma sqrt(2 log n)
    right: as (38)
    quantity: mean of max - mean of 10^4 normal scores
    """
    return _top(1e4, _rows() - _rows().mean(-1, keepdim=True))


@book.add("u4-u6", "C", "M-ENT-6", tolerance=0.08)
def _opening() -> Numbers:
    """printed: mean field and maximum together give H
    right: as (10), (13), (16)
    quantity: entropy at scale 1.5, n = 10^4
    """
    return _estimate(1.5)


@book.add("u7", "W", "M-SCL-1", tolerance=0.3)
def _grows() -> Numbers:
    """printed: s grows like d, so the scale is log n / d
    right: like sqrt(d) for independent entries
    quantity: sd of scores of unit-variance vectors, d = 64
    """
    return 64.0, 8.0, (randn(20_000, 64) * randn(20_000, 64, seed=1)).sum(-1).std()


@book.add("u8", "C", "M-SCL-16", tolerance=0.05)
def _closing() -> Numbers:
    """printed: scale = log n / d holds entropy
    right: as (24): with kappa = 1 it grows
    quantity: entropy at n = 4096 minus that at 256, sd of scores 8, d = 64 (printed: 0)
    """
    right = sharpness.kappa_entropy(4096, 1.0, 64) - sharpness.kappa_entropy(256, 1.0, 64)
    h = [mean_entropy(randn(200, n, seed=n), log(n) / 8) for n in (256, 4096)]
    return 0.0, right, h[1] - h[0]


@book.add("P43", "P", "M-SCL-14", tolerance=0.15)
def _cancel() -> Numbers:
    """printed: the terms in n cannot cancel
    right: scale = (log n - C) / (max - mean) cancels them, with max - mean about sigma sqrt(2 log n)
    quantity: log n - scale (max - mean) at n = 2^12 minus that at 2^8, C = 3, normal scores (printed: as at scale 1)
    """

    def left(n: int, scale: Number) -> Tensor:
        return information.entropy_lower_bound(randn(1000, n, seed=n), scale).mean()

    def solved(n: int) -> Tensor:
        return left(n, (log(n) - 3) / sharpness.expected_maximum(n))

    short, long = 2**8, 2**12
    return left(long, 1.0) - left(short, 1.0), 0.0, solved(long) - solved(short)


def _condensed_log_z() -> Numbers:
    """log Z of 10^5 normal scores at scale 6, past the transition at 4.8, where the maximum rules."""
    # The largest scores are Poisson points of rate b e^{-b(s - b)}, so Z e^{-6b} is a stable number of index m = b / 6
    # with E exp(-t S) = exp(-Gamma(1 - m) t^m), whose mean logarithm is log Gamma(1 - m) / m + gamma (1/m - 1).
    b = sharpness.extreme_location(1e5)
    m = b / 6
    right = 6 * b + (torch.lgamma(1 - m) + 0.5772156649 * (1 - m)) / m
    return log(1e5) + 18.0, right, torch.logsumexp(6 * randn(60, 100_000), -1).mean()


@book.add("(28)", "C", "M-SCL-11", tolerance=0.6)
def _integral() -> Numbers:
    """printed: Z = n * integral of e^{scale s} p(s)
    right: below condensation only; past it the largest scores decide
    quantity: log Z of 10^5 normal scores at scale 6
    """
    return _condensed_log_z()


@book.add("(29)", "C", "M-SCL-11", tolerance=0.6)
def _log_integral() -> Numbers:
    """printed: log Z = log n + log of the integral
    right: as (28)
    quantity: log Z of 10^5 normal scores at scale 6
    """
    return _condensed_log_z()


@book.add("(30)", "W", "M-SCL-11")
def _laplace_method() -> Numbers:
    """printed: scale s* - log(2 pi)/2 + log(scale)/2
    right: scale s* + log p(s*) + log(2 pi)/2 - log|curvature|/2
    quantity: log E e^{2 s}, s standard normal
    """
    right = sharpness.laplace_method_interior(2.0, 2.0, -2.0 - 0.5 * log(2 * pi), -1.0)
    x = torch.linspace(-30, 30, 600_001, dtype=F64)
    exact = torch.trapezoid(torch.exp(2 * x - x**2 / 2) / sqrt(2 * pi), x).log()
    return 4 - 0.5 * log(2 * pi) + 0.5 * log(2.0), right, exact


def _uniform() -> Tensor:
    return 2 * torch.rand(20, 100_000, generator=generator(), dtype=F64) - 1


@book.add("(31)", "W", "M-SCL-11", tolerance=0.03)
def _edge() -> Numbers:
    """printed: log Z = log n + scale * max
    right: log n + scale b - log(scale w) for uniform scores
    quantity: log Z of 10^5 scores uniform on [-1, 1] at scale 8
    """
    right = log(1e5) + sharpness.laplace_method_edge(8.0, 1.0, 2.0)
    return log(1e5) + 8, right, torch.logsumexp(8 * _uniform(), -1).mean()


@book.add("(32)", "W", "M-SCL-15", tolerance=0.03)
def _uniform_entropy() -> Numbers:
    """printed: H = log n
    right: log n + 1 - log(scale w) for uniform scores
    quantity: entropy of 10^5 scores uniform on [-1, 1] at scale 8
    """
    return log(1e5), sharpness.uniform_entropy(1e5, 8.0, 2.0), mean_entropy(_uniform(), 8.0)


@book.add("(33)", "N", "M-GIB-2", tolerance=1e-12)
def _centring() -> Numbers:
    """printed: a second-order expansion of the centred form
    right: exact: shift invariance
    quantity: third-order residual of centring five logits (printed: of the order of the cube of their spread)
    """
    z = randn(5)
    return (z.max() - z.mean()) ** 3, 0.0, (softmax(z - z.max()) - softmax(z)).abs().max()


@book.add("(37)", "W", "M-SCL-12", tolerance=0.05)
def _tilted() -> Numbers:
    """printed: E_p[s] = max - (max - mean), the plain mean
    right: mean + scale sigma^2 for Gaussian scores
    quantity: mean score under the weights, scale 1, n = 10^4
    """
    return _mean_score(randn(100, 10_000), _rows())


@book.add("(39)", "N", "M-SCL-12", tolerance=0.1)
def _sample_mean() -> Numbers:
    """printed: the sample mean is the expectation
    right: up to sigma / sqrt(n)
    quantity: sd of the mean of 10^4 normal scores, times 100
    """
    return 0.0, 1.0, 100 * randn(400, 10_000).mean(-1).std()


@book.add("(41)", "W", "M-SCL-12", tolerance=0.03)
def _entropy() -> Numbers:
    """printed: H = log n - scale sigma sqrt(2 log n)
    right: log n - (scale sigma)^2 / 2 below the transition
    quantity: entropy of 1024 normal scores at scale 1
    """
    return log(1024) - sqrt(2 * log(1024)), sharpness.gaussian_entropy(1024, 1.0), mean_entropy(randn(1000, 1024))


@book.add("(42)", "W", "M-SCL-17", tolerance=0.1)
def _redefined() -> Numbers:
    """printed: invariance means H = C log n
    right: that is full dependence on n: with kappa = 1, d = 64, H grows with log n
    quantity: H at n = 4096 minus H at n = 16 under log n / d (printed: 0, if it were an invariance)
    """
    right = sharpness.kappa_entropy(4096, 1.0, 64) - sharpness.kappa_entropy(16, 1.0, 64)
    return 0.0, right, query_entropy(4096, log(4096) / 64, 300) - query_entropy(16, log(16) / 64, 300)


@book.add("(44)", "N", "M-RMK-2")
def _layer_norm() -> Numbers:
    """printed: LayerNorm without an epsilon
    right: epsilon under the root
    quantity: first entry of a normalised constant vector
    """
    x = torch.full((8,), 5.0, dtype=F64)
    return layer.layer_norm(x, eps=0.0)[0], layer.layer_norm(x)[0], torch.nn.functional.layer_norm(x, (8,))[0]


@book.add("(45)", "N", "M-RMK-2")
def _rms_norm() -> Numbers:
    """printed: RMSNorm without an epsilon
    right: epsilon under the root
    quantity: first entry of a normalised zero vector
    """
    x = torch.zeros(8, dtype=F64)
    return layer.rms_norm(x, eps=0.0)[0], layer.rms_norm(x)[0], torch.nn.functional.rms_norm(x, (8,), eps=1e-6)[0]


@book.add("(49)", "C", "M-ATT-6")
def _empty_support() -> Numbers:
    """printed: -inf outside the support, then softmax
    right: a row with an empty support is 0
    quantity: sum of the weights of a row without keys
    """
    printed = softmax(torch.full((3,), -torch.inf)).sum()
    return printed, 0.0, weights(randn(3), visible=torch.zeros(3, dtype=torch.bool)).sum()


@book.add("(51)", "C", "M-SCL-5")
def _one_key() -> Numbers:
    """printed: scale = kappa log card S / d
    right: 0 for one key (scale before masking), none for no key
    quantity: weight of the only visible key under that scale
    """
    scale = log(1) / 8
    printed = softmax(scale * vector(2, -inf))[0]
    return printed, 1.0, weights(vector(2, 5), scale=scale, visible=torch.tensor([True, False]))[0]


@book.add("(56)", "N", "M-SCL-8", tolerance=0.2)
def _heads() -> Numbers:
    """printed: h heads sharpen h times
    right: the scale grows by h, the sharpness by sqrt(h)
    quantity: sharpness with 16 heads over that with 1, d_model = 512
    """
    sd = [(randn(20_000, d, seed=d) * randn(20_000, d, seed=d + 1)).sum(-1).std() / d for d in (512, 32)]
    return 16.0, sharpness.head_sharpness(16, 512, 1024) / sharpness.head_sharpness(1, 512, 1024), sd[1] / sd[0]


@book.add("(59)", "W", "M-SCL-9")
def _close() -> Numbers:
    """printed: log n / d is close to 1 / sqrt(d) for common n and d
    right: their ratio is log n / sqrt(d); equal only at n = e^sqrt(d)
    quantity: log of the length at which they are equal, d = 512 (printed: common, read as log 4096)
    """
    measured = bisect(lambda x: x / 512 < 512**-0.5, vector(1), vector(100))
    return log(4096), sharpness.crossover_length(512).log(), measured


@book.add("(60)", "N", "M-SCL-3")
def _mixture() -> Numbers:
    """printed: 1/sqrt(d) + 0.1 log n / d is a mixture
    right: always sharper than 1/sqrt(d): 8.7 % at d = 64, n = 1024
    quantity: log-odds of two of 1024 keys under the mixed scale over those under 1/sqrt(d) (printed: none)
    """
    q, k = randn(1, 64), randn(1024, 64, seed=1)

    def odds(policy: Policy) -> float:
        p = Gibbs(q, k, scale=policy).probs()[0]
        return float((p[0] / p[1]).log())

    return 1.0, 1 + 0.1 * log(1024) / 8, odds(Mixed()) / odds(InverseSqrt())


@book.add("(61)", "W", "M-SCL-10")
def _feedback() -> Numbers:
    """printed: scale <- scale * target / H
    right: scale <- scale + (H - target) / (scale Var), bracketed
    quantity: scale after 12 steps from 0.8 of the root, over the root
    """
    s = randn(300)
    printed = right = 0.8 * sharpness.entropy_scale(s, 3.0).scale
    for _ in range(12):
        printed = sharpness.controller_step(s, printed, 3.0, "printed")
        right = sharpness.controller_step(s, right, 3.0, "newton")
    root = bisect(lambda x: entropy(x * s) > 3, vector(0), vector(100))
    return printed / root, right / root, 1.0


@book.add("(63)", "C", "M-TMP-3")
def _temperature() -> Numbers:
    """printed: T = d / (kappa log n)
    right: infinite at n = 1: scale 0
    quantity: temperature of a row of one key (printed: division by zero)
    """
    return nan, sharpness.effective_temperature(1, 64), inf


@book.add("P51", "P", "M-TMP-1")
def _reciprocal() -> Numbers:
    """printed: lambda = 1/T is the reciprocal of the scaling factor
    right: it is the scaling factor; T is its reciprocal
    quantity: log-odds of two scores that are 1 apart at temperature 4
    """
    p = softmax(vector(1, 0) / 4)
    return 4.0, sharpness.scale_of_temperature(4.0), (p[0] / p[1]).log()


@book.add("P45", "P", "M-ENT-5")
def _bits() -> Numbers:
    """printed: entropy in bits with ln
    right: divide by ln 2
    quantity: bits that name one of 1024 keys
    """
    return log(1024), entropy(torch.zeros(1024, dtype=F64), base=2), 10.0


@book.add("P46", "P", "M-SCL-17", tolerance=0.05)
def _stable() -> Numbers:
    """printed: with log n / d entropy is stable
    right: it grows nearly as log n
    quantity: dH / dlog n from 2^9 to 2^14 under log n / d, d = 64
    """
    low, high = log(2**9), log(2**14)
    right = 1 - (high**2 - low**2) / (2 * 64) / (high - low)
    return 0.0, right, query_slope(lambda n: log(n) / 64)


@book.add("P47", "P", "M-RMK-2", tolerance=0.03)
def _norm_slope() -> Numbers:
    """printed: LayerNorm partly gives length invariance
    right: it contains no n: slope 1
    quantity: dH / dlog n of normalised vectors under 1/sqrt(d)
    """
    q = layer.layer_norm(randn(200, 64))
    h = [mean_entropy(q @ layer.layer_norm(randn(n, 64, seed=n)).T, 1 / 8) for n in (64, 1024)]
    return 0.5, 1.0, (h[1] - h[0]) / log(16)


@book.add("P48", "P", "M-SCL-4", tolerance=0.04)
def _compromise() -> Numbers:
    """printed: log n_max / d is a compromise
    right: a constant scale: no invariance
    quantity: dH / dlog n from 2^9 to 2^14 under log(65536) / d, d = 64 (printed: half of none)
    """
    return 0.5, 1.0, query_slope(lambda n: log(65536) / 64)


@book.add("P49", "P", "M-ATT-10", tolerance=1e-9)
def _oscillates() -> Numbers:
    """printed: similarity of sinusoids falls with distance
    right: it oscillates: the first rise is at lag 5 to 6
    quantity: similarity at lag 6 minus that at lag 5, d = 64 (printed: negative, read as from lag 4 to 5)
    """
    similarity = layer.sinusoidal_similarity(torch.arange(7), 64)
    direct = sum(cos(6 * w) - cos(5 * w) for w in (10000 ** (-2 * k / 64) for k in range(32)))
    return similarity[5] - similarity[4], similarity[6] - similarity[5], direct


@book.add("P50", "P", "M-SCL-20")
def _per_row() -> Numbers:
    """printed: change the kernel's scalar scale
    right: rows see different lengths: fold the scale into each query
    quantity: entropy of row 2 of 1024 causal rows under log n_i / d, d = 64 (printed: under log 1024 / d)
    """
    q, k = randn(1024, 64), randn(1024, 64, seed=1)
    folded = KappaLog().fold(q, torch.arange(1, 1025, dtype=F64))
    rows = (Gibbs(x, k, scale=s, support=causal()).entropy() for x, s in ((q, log(1024) / 64), (folded, 1.0)))
    printed, right = (row[1] for row in rows)
    return printed, right, entropy(log(2) / 64 * (k[:2] @ q[1]))  # dense, by hand: row 2 sees two keys


@book.add("P52", "P", "M-SCL-1", tolerance=1e-3)
def _divide() -> Numbers:
    """printed: dividing by d keeps the variance
    right: it gives sigma^4 / d
    quantity: variance of q . k / d at d = 64
    """
    measured = ((randn(50_000, 64) * randn(50_000, 64, seed=1)).sum(-1) / 64).var()
    return 1.0, sharpness.score_variance(64) / 64**2, measured


@book.add("P53", "P", "M-SCL-11", tolerance=1e-5)
def _uniform_density() -> Numbers:
    """printed: Laplace's method with a uniform density, interior maximum
    right: the maximum is at the edge: scale b - log(scale w)
    quantity: log E e^{8 s}, s uniform on [-1, 1]
    """
    exact = log((exp(8) - exp(-8)) / 16)
    return 8 - 0.5 * log(2 * pi) + 0.5 * log(8), sharpness.laplace_method_edge(8.0, 1.0, 2.0), exact
