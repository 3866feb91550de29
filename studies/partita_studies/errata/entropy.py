"""Errata of the same document: equations (32) to (56), the range of entropy."""

from __future__ import annotations

from math import log

import torch

from partita.theory.geometry import fisher_free, fisher_homogeneous, fisher_quadratic_form, kl, smooth_max
from partita.theory.information import (
    attention_information,
    entropy,
    entropy_floor,
    entropy_of,
    floor_gap,
)
from partita.theory.law import gibbs_law, one_hot_bound
from partita.theory.selection import hard_choice
from partita.theory.sharpness import condensed_entropy, frozen_index, gaussian_entropy
from partita_studies.errata._samples import F64, mean_entropy, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("noise")


@book.add(
    "(32)",
    "C",
    printed="a large sigma makes the row one-hot",
    right="at fixed n, and sigma >> sqrt(2 log n)",
    spec="M-SCL-12",
    quantity="entropy of 10^6 Gaussian scores of sd 2 (printed: 0)",
    tolerance=0.05,
)
def _one_hot() -> Reading:
    return Reading(0.0, float(gaussian_entropy(1e6, 2.0)), mean_entropy(randn(4, 1_000_000), 2.0))


@book.add(
    "(33)",
    "C",
    printed="then H = 0",
    right="O(1): psi(1) - psi(1 - m) past the transition",
    spec="M-SCL-13",
    quantity="entropy of 2^14 Gaussian scores at three times the transition",
    tolerance=0.08,
)
def _frozen() -> Reading:
    n, x = 2**14, 3 * (2 * log(2**14)) ** 0.5
    return Reading(0.0, float(condensed_entropy(frozen_index(n, x))), mean_entropy(randn(300, n), x))


@book.add(
    "(35)",
    "W",
    printed="Gaussian scores of sd 1: H = log n - 0.4745",
    right="log n - 1/2",
    spec="M-SCL-12",
    quantity="log n - H at n = 10^4",
    tolerance=5e-3,
)
def _half_nat() -> Reading:
    gap = log(1e4) - mean_entropy(randn(400, 10_000))
    return Reading(float(floor_gap(2.0)), log(1e4) - float(gaussian_entropy(1e4, 1.0)), gap)


@book.add(
    "(36)",
    "W",
    printed="normal scores have the floor log n - 0.4745",
    right="unbounded scores have floor 0",
    spec="M-INF-2",
    quantity="entropy of 1000 normal scores as their sd grows (10^4 here)",
    tolerance=0.05,
)
def _floor_of_normal() -> Reading:
    return Reading(log(1000) - 0.4745, 0.0, mean_entropy(randn(200, 1000), 1e4))


@book.add(
    "(37)",
    "W",
    printed="H_max - H_min = log n - 0.4745",
    right="0.4745 for cosine scores at temperature 1",
    spec="M-INF-2",
    quantity="range of the entropy of 1000 cosine scores at temperature 1",
    tolerance=1e-4,
)
def _range() -> Reading:
    n = 1000
    k = torch.arange(1, n, dtype=F64)
    r = torch.tensor(2.0, dtype=F64).exp()
    two_level = torch.log(k * r + n - k) - 2 * k * r / (k * r + n - k)
    return Reading(log(n) - 0.4745, float(floor_gap(2.0)), log(n) - float(two_level.min()))


@book.add(
    "(39)",
    "C",
    printed="temperature -> 0: H -> 0",
    right="H -> log of the number of maximisers",
    spec="M-GIB-3",
    quantity="entropy of (1, 1, 0) at temperature 1e-6",
)
def _ties() -> Reading:
    s = torch.tensor([1.0, 1.0, 0.0], dtype=F64)
    return Reading(0.0, log(2), float(entropy(s * 1e6)))


@book.add(
    "(43)",
    "W",
    printed="H in [0, log n - 0.4745] for cosine scores",
    right="H in [log n - 0.4745, log n]",
    spec="M-INF-2",
    quantity="share of 2000 random rows of 256 cosines inside the interval",
)
def _interval() -> Reading:
    unit = torch.nn.functional.normalize(randn(2000, 8), dim=-1)
    keys = torch.nn.functional.normalize(randn(256, 8, seed=1), dim=-1)
    h = entropy(unit @ keys.T)
    inside = ((h >= log(256) - 0.4745) & (h <= log(256))).double().mean()
    # The printed interval would hold all rows, so it claims that none lies in the right one.
    return Reading(0.0, 1.0, float(inside))


@book.add(
    "(45)",
    "C",
    printed="H in [0, log n] at temperature 0.07",
    right="the floor is tiny but positive and grows with n",
    spec="M-INF-2",
    quantity="log of the least entropy of 256 cosines at temperature 0.07, in decades",
    tolerance=0.01,
)
def _tiny() -> Reading:
    w = 2 / 0.07
    rest = 255 * torch.exp(torch.tensor(-w, dtype=F64))
    least = torch.log1p(rest) + w * rest / (1 + rest)
    return Reading(float("-inf"), float(entropy_floor(256, 0.07).log10()), float(least.log10()))


@book.add(
    "(49)",
    "C",
    printed="Fisher metric g_ij = [i=j]/p_i - 1 in the coordinates p",
    right="in homogeneous coordinates; free ones have [i=j]/p_i + 1/p_n",
    spec="M-GEO-3",
    quantity="first entry of the metric in free coordinates at (.5, .3, .2)",
    tolerance=1e-2,
)
def _fisher() -> Reading:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    eps = 1e-4
    moved = p + eps * torch.tensor([1.0, 0.0, -1.0], dtype=F64)
    measured = (kl(p, moved) + kl(moved, p)) / eps**2  # the symmetric divergence is the metric to third order
    return Reading(float(fisher_homogeneous(p)[0, 0]), float(fisher_free(p)[0, 0]), float(measured))


@book.add(
    "(50)",
    "N",
    printed="the gradient of entropy points at uniform",
    right="-p (log p + H) in the Fisher metric; parallel to u - p only for n = 2",
    spec="M-GEO-4",
    quantity="cosine between the two at (.9, .09, .01)",
    tolerance=1e-3,
)
def _not_at_uniform() -> Reading:
    p = torch.tensor([0.9, 0.09, 0.01], dtype=F64)
    away, flow = 1 / 3 - p, -p * (p.log() + entropy_of(p))
    eps = 1e-5  # measured: the direction in which tempering, the exact flow, moves p
    moved = torch.softmax((1 - eps) * p.log(), -1) - p
    cosine = torch.nn.functional.cosine_similarity
    return Reading(1.0, float(cosine(flow, away, dim=0)), float(cosine(moved, away, dim=0)))


def _long() -> torch.Tensor:
    z = torch.zeros(100_000, dtype=F64)
    z[0] = 3
    return z


@book.add(
    "(53)",
    "C",
    printed="logsumexp is the maximum if one score dominates",
    right="its lead must exceed log n by far",
    spec="M-GIB-5",
    quantity="log-partition of a lead of 3 among 10^5",
    tolerance=1e-3,
)
def _smooth() -> Reading:
    return Reading(3.0, log(1e5 - 1 + 20.0855369), float(smooth_max(_long())))


@book.add(
    "(54)",
    "C",
    printed="then the row is one-hot",
    right="p_max = 1 / (1 + (n - 1) e^-gap)",
    spec="M-GIB-3",
    quantity="largest weight there",
)
def _largest() -> Reading:
    return Reading(1.0, float(one_hot_bound(1e5, 3.0)), float(gibbs_law(_long()).probs.max()))


@book.add(
    "(56)",
    "C",
    printed="soft output = value of the best key",
    right="they differ by up to (1 - p_max) diam(V)",
    spec="M-SPA-2",
    quantity="distance between them for values 1 (best) and 0 (others)",
)
def _soft_hard() -> Reading:
    z = _long()
    v = torch.zeros(100_000, 1, dtype=F64)
    v[0] = 1
    soft = gibbs_law(z).probs @ v
    return Reading(0.0, 1 - float(one_hot_bound(1e5, 3.0)), float((soft - hard_choice(z, v)).norm()))


@book.add(
    "P31",
    "P",
    printed="entropy is the distance to uniform",
    right="log n minus entropy is",
    spec="M-ENT-2",
    quantity="KL(p || uniform) of a row of 9",
)
def _distance() -> Reading:
    p = torch.softmax(2 * randn(9), -1)
    h = float(entropy_of(p))
    return Reading(h, log(9) - h, float(kl(p, torch.full((9,), 1 / 9, dtype=F64))))


@book.add(
    "P34",
    "P",
    printed="high entropy keeps more information about the values",
    right="spreading transmits less: log(1 + |p|^2 / noise) / 2",
    spec="M-INF-7",
    quantity="information of a uniform row of 64, noise 0.1, by determinants (printed: of a one-hot row, or more)",
)
def _spread() -> Reading:
    p = torch.full((64,), 1 / 64, dtype=F64)
    cov = torch.eye(65, dtype=F64)
    cov[0, 0] = p.square().sum() + 0.1
    cov[0, 1:] = cov[1:, 0] = p
    measured = 0.5 * (cov[0, 0].log() - torch.logdet(cov))
    hot = attention_information(torch.eye(64, dtype=F64)[0], 1.0, 0.1)
    return Reading(float(hot), float(attention_information(p, 1.0, 0.1)), float(measured))


@book.add(
    "(48)",
    "N",
    printed="the Fisher metric in coordinates p, unnamed",
    right="any coordinates give sum d^2 / p on tangent vectors",
    spec="M-GEO-3",
    quantity="squared length of (.1, -.05, -.05) at (.5, .3, .2), from the divergence (printed: Euclidean)",
    tolerance=1e-4,
)
def _length() -> Reading:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    d = torch.tensor([0.1, -0.05, -0.05], dtype=F64)
    eps = 1e-3
    measured = (kl(p, p + eps * d) + kl(p + eps * d, p)) / eps**2
    return Reading(float(d @ d), float(fisher_quadratic_form(p, d)), float(measured))
