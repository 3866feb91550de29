"""Errata of the document on scales that grow with log n: equations (10) to (24), the derivation."""

from __future__ import annotations

from math import log, sqrt

import torch

from partita.theory.information import entropy, entropy_lower_bound, score_cumulants
from partita.theory.sharpness import (
    calibrate_kappa,
    expected_maximum,
    gaussian_entropy,
    gaussian_log_partition,
    gaussian_mean_score,
    growth_exponent,
    kappa_entropy,
    margin_entropy,
    uniform_scale,
)
from partita_studies.errata._samples import F64, mean_entropy, rand, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("scale")


def _rows() -> torch.Tensor:
    return randn(100, 10_000)


@book.add(
    "(10)",
    "C",
    printed="log mean e^{scale s} = scale * mean s",
    right="a lower bound; off by (scale sigma)^2 / 2 for Gaussian scores",
    spec="M-ENT-6",
    quantity="log mean e^{2 s} for 10^4 normal scores",
    tolerance=0.1,
)
def _mean_field() -> Reading:
    s = _rows()
    measured = (torch.logsumexp(2 * s, -1) - log(10_000)).mean()
    return Reading(2 * float(s.mean()), 2.0, float(measured))


@book.add(
    "(11)",
    "C",
    printed="log Z = log n + scale * mean s",
    right="log n + scale mean + (scale sigma)^2 / 2 for Gaussian scores",
    spec="M-ENT-6",
    quantity="log Z at scale 1, n = 10^4",
    tolerance=0.05,
)
def _log_z() -> Reading:
    s = _rows()
    measured = torch.logsumexp(s, -1).mean()
    return Reading(log(10_000) + float(s.mean()), float(gaussian_log_partition(1e4, 1.0)), float(measured))


@book.add(
    "(13)",
    "C",
    printed="E_p[s] = max s",
    right="an upper bound; mean + scale sigma^2 for Gaussian scores",
    spec="M-ENT-6",
    quantity="mean score under the weights at scale 1, n = 10^4",
    tolerance=0.05,
)
def _maximum() -> Reading:
    s = _rows()
    return Reading(
        float(s.amax(-1).mean()), float(gaussian_mean_score(1.0)), float(score_cumulants(s, 1.0).mean.mean())
    )


def _estimate(scale: float) -> Reading:
    """Entropy from the mean and the maximum, from the variance, and measured."""
    s = _rows()
    printed = entropy_lower_bound(s, scale).mean()
    return Reading(float(printed), float(gaussian_entropy(1e4, scale)), mean_entropy(s, scale))


@book.add(
    "(14)",
    "C",
    printed="H = log n - scale (max - mean)",
    right="H >= that; log n - (scale sigma)^2 / 2 for Gaussian scores",
    spec="M-ENT-6",
    quantity="entropy at scale 1, n = 10^4",
    tolerance=0.05,
)
def _entropy_one() -> Reading:
    return _estimate(1.0)


@book.add(
    "(16)",
    "C",
    printed="the same",
    right="the same; negative already at scale 2.5 where H is 6",
    spec="M-ENT-6",
    quantity="entropy at scale 2, n = 10^4",
    tolerance=0.1,
)
def _entropy_two() -> Reading:
    return _estimate(2.0)


@book.add(
    "(17)",
    "C",
    printed="log n - scale (max - mean) = C holds entropy at C",
    right="it holds a lower bound at C",
    spec="M-SCL-2",
    quantity="entropy when the scale is set by it for C = 4, n = 10^4 (right: log n - (scale sigma)^2 / 2)",
    tolerance=0.1,
)
def _condition() -> Reading:
    s = _rows()
    scale = (log(10_000) - 4) / (s.amax(-1) - s.mean(-1))
    measured = entropy(scale[:, None] * s).mean()
    return Reading(4.0, log(10_000) - float((scale**2 / 2).mean()), float(measured))


@book.add(
    "(18)",
    "C",
    printed="scale proportional to log n holds entropy for a fixed margin",
    right="affine, not proportional: log n + log log n - log C",
    spec="M-SCL-15",
    quantity="entropy at n = 2^16 with scale log n, margin 1 (printed: as at 2^4)",
    tolerance=0.02,
)
def _affine() -> Reading:
    z = torch.zeros(2**16, dtype=F64)
    z[0] = log(2**16)
    right = margin_entropy(2**16, log(2**16))
    return Reading(float(margin_entropy(16, log(16))), float(right), float(entropy(z)))


@book.add(
    "(19)",
    "C",
    printed="the scale grows like log n whatever the scores",
    right="the law depends on the tail: proportional to n for uniform scores",
    spec="M-SCL-15",
    quantity="exponent in n of the scale that keeps H = 2 for uniform scores, 2^8 to 2^12 (printed: that of log n)",
    tolerance=0.05,
)
def _tail() -> Reading:
    from_log = float(growth_exponent(torch.tensor([2.0**8, 2.0**12]), torch.tensor([8.0, 12.0]), of_log=False))
    right = growth_exponent(
        torch.tensor([2.0**8, 2.0**12]), uniform_scale(torch.tensor([2.0**8, 2.0**12]), 2.0), of_log=False
    )
    scales = []
    for n in (2**8, 2**12):
        u = rand(64, n, seed=n)
        low, high = 1.0, 1e6
        for _ in range(40):  # bisection on the mean entropy
            mid = sqrt(low * high)
            low, high = (mid, high) if mean_entropy(u, mid) > 2 else (low, mid)
        scales.append(low)
    measured = log(scales[1] / scales[0]) / log(2**4)
    return Reading(from_log, float(right), measured)


@book.add(
    "(23)",
    "W",
    printed="log-n growth and unit-variance scores give log n / d",
    right="they give log n / sqrt(d)",
    spec="M-SCL-2",
    quantity="sharpness (scale * sd of scores) at d = 64, n = 1024 that a gap of log n / (sd of scores) asks for",
    tolerance=0.3,
)
def _combining() -> Reading:
    scores = randn(4000, 64) @ randn(64, seed=1) * (8 / randn(64, seed=1).norm())
    sd = float(scores.std())
    return Reading(log(1024) / 64 * sd, log(1024), log(1024) / 8 * sd)


@book.add(
    "(24)",
    "C",
    printed="kappa is usually 1",
    right="kappa = d / (sigma sqrt(log n0)) is stationary at n0",
    spec="M-SCL-16",
    quantity="dH / dlog n around 4096 of normal scores, by sums over their density, kappa calibrated (printed: 1)",
    tolerance=1e-4,
)
def _kappa() -> Reading:
    s = torch.linspace(-40.0, 40.0, 80_001, dtype=F64)  # in units of sigma = sqrt(64)
    weight = torch.exp(-(s**2) / 2)
    weight = weight / weight.sum()

    def entropy_at(log_n: float, kappa: float) -> float:
        """log n minus the divergence of the tilted law from the law of the scores, summed, not in closed form."""
        tilted = torch.softmax(weight.log() + kappa * log_n / 64 * 8 * s, -1)
        seen = tilted > 0
        return log_n - float((tilted[seen] * (tilted[seen] / weight[seen]).log()).sum())

    def slope(kappa: float) -> float:
        x, step = log(4096), 1e-3
        return (entropy_at(x + step, kappa) - entropy_at(x - step, kappa)) / (2 * step)

    return Reading(slope(1.0), 0.0, slope(float(calibrate_kappa(4096, 64))))


@book.add(
    "(38)",
    "C",
    printed="max s = mean + sigma sqrt(2 log n)",
    right="minus (log log n + log 4 pi) / (2 sqrt(2 log n)), plus 0.577 / sqrt(2 log n)",
    spec="M-SCL-13",
    quantity="mean of the largest of 1000 normal numbers",
    tolerance=0.06,
)
def _largest() -> Reading:
    return Reading(
        float(expected_maximum(1000, corrected=False)),
        float(expected_maximum(1000)),
        float(randn(4000, 1000).amax(-1).mean()),
    )


@book.add(
    "(40)",
    "C",
    printed="max - mean = sigma sqrt(2 log n)",
    right="as (38)",
    spec="M-SCL-13",
    quantity="mean of max - mean of 10^4 normal scores",
    tolerance=0.15,  # 100 rows, whose largest scatter by 0.3 each: four standard errors, and 0.03 of the expansion
)
def _spread() -> Reading:
    s = _rows()
    measured = (s.amax(-1) - s.mean(-1)).mean()
    return Reading(float(expected_maximum(1e4, corrected=False)), float(expected_maximum(1e4)), float(measured))


@book.add(
    "u4-u6",
    "C",
    printed="mean field and maximum together give H",
    right="as (10), (13), (16)",
    spec="M-ENT-6",
    quantity="entropy at scale 1.5, n = 10^4",
    tolerance=0.08,
)
def _opening() -> Reading:
    return _estimate(1.5)


@book.add(
    "u7",
    "W",
    printed="s grows like d, so the scale is log n / d",
    right="like sqrt(d) for independent entries",
    spec="M-SCL-1",
    quantity="sd of scores of unit-variance vectors, d = 64",
    tolerance=0.3,
)
def _grows() -> Reading:
    return Reading(64.0, 8.0, float((randn(20_000, 64) * randn(20_000, 64, seed=1)).sum(-1).std()))


@book.add(
    "u8",
    "C",
    printed="scale = log n / d holds entropy",
    right="as (24): with kappa = 1 it grows",
    spec="M-SCL-16",
    quantity="entropy at n = 4096 minus that at 256, sd of scores 8, d = 64 (printed: 0)",
    tolerance=0.05,
)
def _closing() -> Reading:
    right = kappa_entropy(4096, 1.0, 64) - kappa_entropy(256, 1.0, 64)
    h = [mean_entropy(randn(200, n, seed=n), log(n) / 8) for n in (256, 4096)]
    return Reading(0.0, float(right), h[1] - h[0])


@book.add(
    "P43",
    "P",
    printed="the terms in n cannot cancel",
    right="scale = (log n - C) / (max - mean) cancels them, with max - mean about sigma sqrt(2 log n)",
    spec="M-SCL-14",
    quantity="log n - scale (max - mean) at n = 2^12 minus that at 2^8, C = 3, normal scores (printed: as at scale 1)",
    tolerance=0.15,
)
def _cancel() -> Reading:
    def left(n: int, scale: float) -> float:
        return float(entropy_lower_bound(randn(1000, n, seed=n), scale).mean())

    short, long = 2**8, 2**12
    scales = [(log(n) - 3) / float(expected_maximum(n)) for n in (short, long)]
    return Reading(left(long, 1.0) - left(short, 1.0), 0.0, left(long, scales[1]) - left(short, scales[0]))
