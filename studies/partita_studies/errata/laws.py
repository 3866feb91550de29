"""Errata of the same document: equations (28) to (45), score laws."""

from __future__ import annotations

from math import log, pi, sqrt

import torch

from partita.theory.information import score_cumulants
from partita.theory.layer import layer_norm, rms_norm
from partita.theory.sharpness import (
    extreme_location,
    gaussian_entropy,
    gaussian_mean_score,
    kappa_entropy,
    laplace_method_edge,
    laplace_method_interior,
    uniform_entropy,
)
from partita_studies.errata._samples import F64, generator, mean_entropy, rand, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("scale")


def _condensed_log_z() -> Reading:
    """log Z of 10^5 normal scores at scale 6, past the transition at 4.8, where the maximum rules."""
    measured = torch.logsumexp(6 * randn(60, 100_000), -1).mean()
    # The largest scores are Poisson points of rate b e^{-b(s - b)}, so Z e^{-6b} is a stable number of index m = b / 6
    # with E exp(-t S) = exp(-Gamma(1 - m) t^m), whose mean logarithm is log Gamma(1 - m) / m + gamma (1/m - 1).
    b = extreme_location(1e5)
    m = float(b / 6)
    right = 6 * float(b) + (torch.lgamma(torch.tensor(1 - m)).item() + 0.5772156649 * (1 - m)) / m
    return Reading(log(1e5) + 18.0, right, float(measured))


@book.add(
    "(28)",
    "C",
    printed="Z = n * integral of e^{scale s} p(s)",
    right="below condensation only; past it the largest scores decide",
    spec="M-SCL-11",
    quantity="log Z of 10^5 normal scores at scale 6",
    tolerance=0.6,
)
def _integral() -> Reading:
    return _condensed_log_z()


@book.add(
    "(29)",
    "C",
    printed="log Z = log n + log of the integral",
    right="as (28)",
    spec="M-SCL-11",
    quantity="log Z of 10^5 normal scores at scale 6",
    tolerance=0.6,
)
def _log_integral() -> Reading:
    return _condensed_log_z()


@book.add(
    "(30)",
    "W",
    printed="scale s* - log(2 pi)/2 + log(scale)/2",
    right="scale s* + log p(s*) + log(2 pi)/2 - log|curvature|/2",
    spec="M-SCL-11",
    quantity="log E e^{2 s}, s standard normal",
    tolerance=1e-6,
)
def _laplace_method() -> Reading:
    right = laplace_method_interior(2.0, 2.0, -2.0 - 0.5 * log(2 * pi), -1.0)
    x = torch.linspace(-30, 30, 600_001, dtype=F64)
    exact = torch.trapezoid(torch.exp(2 * x - x**2 / 2) / sqrt(2 * pi), x).log()
    return Reading(4 - 0.5 * log(2 * pi) + 0.5 * log(2.0), float(right), float(exact))


def _uniform() -> torch.Tensor:
    return 2 * rand(20, 100_000) - 1


@book.add(
    "(31)",
    "W",
    printed="log Z = log n + scale * max",
    right="log n + scale b - log(scale w) for uniform scores",
    spec="M-SCL-11",
    quantity="log Z of 10^5 scores uniform on [-1, 1] at scale 8",
    tolerance=0.03,
)
def _edge() -> Reading:
    right = log(1e5) + float(laplace_method_edge(8.0, 1.0, 2.0))
    return Reading(log(1e5) + 8, right, float(torch.logsumexp(8 * _uniform(), -1).mean()))


@book.add(
    "(32)",
    "W",
    printed="H = log n",
    right="log n + 1 - log(scale w) for uniform scores",
    spec="M-SCL-15",
    quantity="entropy of 10^5 scores uniform on [-1, 1] at scale 8",
    tolerance=0.03,
)
def _uniform_entropy() -> Reading:
    return Reading(log(1e5), float(uniform_entropy(1e5, 8.0, 2.0)), mean_entropy(_uniform(), 8.0))


@book.add(
    "(33)",
    "N",
    printed="a second-order expansion of the centred form",
    right="exact: shift invariance",
    spec="M-GIB-2",
    quantity="third-order residual of centring five logits (printed: of the order of the cube of their spread)",
    tolerance=1e-12,
)
def _centring() -> Reading:
    z = randn(5)
    gap = (torch.softmax(z - z.max(), -1) - torch.softmax(z, -1)).abs().max()
    return Reading(float((z.max() - z.mean()) ** 3), 0.0, float(gap))


@book.add(
    "(37)",
    "W",
    printed="E_p[s] = max - (max - mean), the plain mean",
    right="mean + scale sigma^2 for Gaussian scores",
    spec="M-SCL-12",
    quantity="mean score under the weights, scale 1, n = 10^4",
    tolerance=0.05,
)
def _tilted() -> Reading:
    s = randn(100, 10_000)
    return Reading(float(s.mean()), float(gaussian_mean_score(1.0)), float(score_cumulants(s, 1.0).mean.mean()))


@book.add(
    "(39)",
    "N",
    printed="the sample mean is the expectation",
    right="up to sigma / sqrt(n)",
    spec="M-SCL-12",
    quantity="sd of the mean of 10^4 normal scores, times 100",
    tolerance=0.1,
)
def _sample_mean() -> Reading:
    return Reading(0.0, 1.0, 100 * float(randn(400, 10_000).mean(-1).std()))


@book.add(
    "(41)",
    "W",
    printed="H = log n - scale sigma sqrt(2 log n)",
    right="log n - (scale sigma)^2 / 2 below the transition",
    spec="M-SCL-12",
    quantity="entropy of 1024 normal scores at scale 1",
    tolerance=0.03,
)
def _entropy() -> Reading:
    return Reading(log(1024) - sqrt(2 * log(1024)), float(gaussian_entropy(1024, 1.0)), mean_entropy(randn(1000, 1024)))


@book.add(
    "(42)",
    "W",
    printed="invariance means H = C log n",
    right="that is full dependence on n: with kappa = 1, d = 64, H grows with log n",
    spec="M-SCL-17",
    quantity="H at n = 4096 minus H at n = 16 under log n / d (printed: 0, if it were an invariance)",
    tolerance=0.1,
)
def _redefined() -> Reading:
    h = {}
    for n in (16, 4096):
        g = generator(n)
        q = torch.randn(300, 64, generator=g, dtype=F64)
        scores = q.norm(dim=-1, keepdim=True) * torch.randn(300, n, generator=g, dtype=F64)
        h[n] = mean_entropy(scores, log(n) / 64)
    right = kappa_entropy(4096, 1.0, 64) - kappa_entropy(16, 1.0, 64)
    return Reading(0.0, float(right), h[4096] - h[16])


@book.add(
    "(44)",
    "N",
    printed="LayerNorm without an epsilon",
    right="epsilon under the root",
    spec="M-RMK-2",
    quantity="first entry of a normalised constant vector",
)
def _layer_norm() -> Reading:
    x = torch.full((8,), 5.0, dtype=F64)
    return Reading(
        float(layer_norm(x, eps=0.0)[0]), float(layer_norm(x)[0]), float(torch.nn.functional.layer_norm(x, (8,))[0])
    )


@book.add(
    "(45)",
    "N",
    printed="RMSNorm without an epsilon",
    right="epsilon under the root",
    spec="M-RMK-2",
    quantity="first entry of a normalised zero vector",
)
def _rms_norm() -> Reading:
    x = torch.zeros(8, dtype=F64)
    return Reading(
        float(rms_norm(x, eps=0.0)[0]), float(rms_norm(x)[0]), float(torch.nn.functional.rms_norm(x, (8,), eps=1e-6)[0])
    )
