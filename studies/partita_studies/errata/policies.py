"""Errata of the same document: equations (49) to (63) and prose, policies and control."""

from __future__ import annotations

from math import exp, inf, log, nan, pi

import torch

from partita.gibbs import Gibbs
from partita.scale import InverseSqrt, KappaLog, Mixed, Policy
from partita.support import causal, mask
from partita.theory.information import entropy
from partita.theory.layer import layer_norm, sinusoidal_similarity
from partita.theory.sharpness import (
    controller_step,
    crossover_length,
    effective_temperature,
    entropy_scale,
    head_sharpness,
    laplace_method_edge,
    score_variance,
)
from partita_studies.errata._samples import F64, generator, mean_entropy, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("scale")


def _hidden() -> Gibbs:
    return Gibbs(torch.ones(1, 1, dtype=F64), randn(3, 1), support=mask(torch.zeros(1, 3, dtype=torch.bool)))


@book.add(
    "(49)",
    "C",
    printed="-inf outside the support, then softmax",
    right="a row with an empty support is 0",
    spec="M-ATT-6",
    quantity="sum of the weights of a row without keys",
)
def _empty_support() -> Reading:
    printed = torch.softmax(torch.full((3,), -torch.inf), -1).sum()
    return Reading(float(printed), 0.0, float(_hidden().probs().sum()))


@book.add(
    "(51)",
    "C",
    printed="scale = kappa log card S / d",
    right="0 for one key (scale before masking), none for no key",
    spec="M-SCL-5",
    quantity="weight of the only visible key under that scale",
)
def _one_key() -> Reading:
    scale = log(1) / 8
    s = torch.tensor([2.0, 5.0], dtype=F64)
    printed = torch.softmax(scale * torch.tensor([2.0, -torch.inf], dtype=F64), -1)[0]
    p = Gibbs(torch.ones(1, 1, dtype=F64), s[:, None], scale=scale, support=mask(torch.tensor([[True, False]])))
    return Reading(float(printed), 1.0, float(p.probs()[0, 0]))


@book.add(
    "(56)",
    "N",
    printed="h heads sharpen h times",
    right="the scale grows by h, the sharpness by sqrt(h)",
    spec="M-SCL-8",
    quantity="sharpness with 16 heads over that with 1, d_model = 512",
    tolerance=0.2,
)
def _heads() -> Reading:
    sd = [(randn(20_000, d, seed=d) * randn(20_000, d, seed=d + 1)).sum(-1).std() / d for d in (512, 32)]
    return Reading(16.0, float(head_sharpness(16, 512, 1024) / head_sharpness(1, 512, 1024)), float(sd[1] / sd[0]))


@book.add(
    "(59)",
    "W",
    printed="log n / d is close to 1 / sqrt(d) for common n and d",
    right="their ratio is log n / sqrt(d); equal only at n = e^sqrt(d)",
    spec="M-SCL-9",
    quantity="log of the length at which they are equal, d = 512 (printed: common, read as log 4096)",
)
def _close() -> Reading:
    low, high = 1.0, 100.0
    for _ in range(60):
        mid = (low + high) / 2
        low, high = (mid, high) if mid / 512 < 512**-0.5 else (low, mid)
    return Reading(log(4096), float(crossover_length(512).log()), low)


@book.add(
    "(60)",
    "N",
    printed="1/sqrt(d) + 0.1 log n / d is a mixture",
    right="always sharper than 1/sqrt(d): 8.7 % at d = 64, n = 1024",
    spec="M-SCL-3",
    quantity="log-odds of two of 1024 keys under the mixed scale over those under 1/sqrt(d) (printed: none)",
)
def _mixture() -> Reading:
    q, k = randn(1, 64), randn(1024, 64, seed=1)

    def odds(policy: Policy) -> float:
        p = Gibbs(q, k, scale=policy).probs()[0]
        return float((p[0] / p[1]).log())

    return Reading(1.0, 1 + 0.1 * log(1024) / 8, odds(Mixed()) / odds(InverseSqrt()))


@book.add(
    "(61)",
    "W",
    printed="scale <- scale * target / H",
    right="scale <- scale + (H - target) / (scale Var), bracketed",
    spec="M-SCL-10",
    quantity="scale after 12 steps from 0.8 of the root, over the root",
    tolerance=1e-6,
)
def _feedback() -> Reading:
    s = randn(300)
    root = entropy_scale(s, 3.0).scale
    printed = right = 0.8 * root
    for _ in range(12):
        printed, right = controller_step(s, printed, 3.0, "printed"), controller_step(s, right, 3.0, "newton")
    low, high = 0.0, 100.0
    for _ in range(80):  # measured: plain bisection
        mid = (low + high) / 2
        low, high = (mid, high) if float(entropy(mid * s)) > 3 else (low, mid)
    return Reading(float(printed) / low, float(right) / low, 1.0)


@book.add(
    "(63)",
    "C",
    printed="T = d / (kappa log n)",
    right="infinite at n = 1: scale 0",
    spec="M-TMP-3",
    quantity="temperature of a row of one key (printed: division by zero)",
)
def _temperature() -> Reading:
    return Reading(nan, float(effective_temperature(1, 64)), inf)


@book.add(
    "P45",
    "P",
    printed="entropy in bits with ln",
    right="divide by ln 2",
    spec="M-ENT-5",
    quantity="bits that name one of 1024 keys",
)
def _bits() -> Reading:
    return Reading(log(1024), float(entropy(torch.zeros(1024, dtype=F64), base=2)), 10.0)


def _slope(policy_low: float, policy_high: float) -> float:
    """dH / dlog n between 2^9 and 2^14 for unit-variance vectors of dim 64."""
    h = []
    for n, scale in ((2**9, policy_low), (2**14, policy_high)):
        g = generator(n)
        q = torch.randn(200, 64, generator=g, dtype=F64)
        h.append(mean_entropy(q.norm(dim=-1, keepdim=True) * torch.randn(200, n, generator=g, dtype=F64), scale))
    return (h[1] - h[0]) / log(2**5)


@book.add(
    "P46",
    "P",
    printed="with log n / d entropy is stable",
    right="it grows nearly as log n",
    spec="M-SCL-17",
    quantity="dH / dlog n from 2^9 to 2^14 under log n / d, d = 64",
    tolerance=0.05,
)
def _stable() -> Reading:
    x = log(2**9), log(2**14)
    right = 1 - (x[1] ** 2 - x[0] ** 2) / (2 * 64) / (x[1] - x[0])
    return Reading(0.0, right, _slope(x[0] / 64, x[1] / 64))


@book.add(
    "P47",
    "P",
    printed="LayerNorm partly gives length invariance",
    right="it contains no n: slope 1",
    spec="M-RMK-2",
    quantity="dH / dlog n of normalised vectors under 1/sqrt(d)",
    tolerance=0.03,
)
def _norm_slope() -> Reading:
    h = []
    for n in (64, 1024):
        q, k = layer_norm(randn(200, 64)), layer_norm(randn(n, 64, seed=n))
        h.append(mean_entropy(q @ k.T, 1 / 8))
    return Reading(0.5, 1.0, (h[1] - h[0]) / log(16))


@book.add(
    "P48",
    "P",
    printed="log n_max / d is a compromise",
    right="a constant scale: no invariance",
    spec="M-SCL-4",
    quantity="dH / dlog n from 2^9 to 2^14 under log(65536) / d, d = 64 (printed: half of none)",
    tolerance=0.04,
)
def _compromise() -> Reading:
    return Reading(0.5, 1.0, _slope(log(65536) / 64, log(65536) / 64))


@book.add(
    "P49",
    "P",
    printed="similarity of sinusoids falls with distance",
    right="it oscillates: the first rise is at lag 5 to 6",
    spec="M-ATT-10",
    quantity="similarity at lag 6 minus that at lag 5, d = 64 (printed: negative, read as from lag 4 to 5)",
    tolerance=1e-9,
)
def _oscillates() -> Reading:
    similarity = sinusoidal_similarity(torch.arange(7), 64)
    direct = sum(
        torch.cos(torch.tensor(6 * w, dtype=F64)) - torch.cos(torch.tensor(5 * w, dtype=F64))
        for w in (10000 ** (-2 * k / 64) for k in range(32))
    )
    return Reading(float(similarity[5] - similarity[4]), float(similarity[6] - similarity[5]), float(direct))


@book.add(
    "P50",
    "P",
    printed="change the kernel's scalar scale",
    right="rows see different lengths: fold the scale into each query",
    spec="M-SCL-20",
    quantity="entropy of row 2 of 1024 causal rows under log n_i / d, d = 64 (printed: under log 1024 / d)",
)
def _per_row() -> Reading:
    q, k = randn(1024, 64), randn(1024, 64, seed=1)
    folded = KappaLog().fold(q, torch.arange(1, 1025, dtype=F64))
    printed, right = (Gibbs(x, k, scale=s, support=causal()) for x, s in ((q, log(1024) / 64), (folded, 1.0)))
    measured = entropy(log(2) / 64 * (k[:2] @ q[1]))  # dense, by hand: row 2 sees two keys
    return Reading(float(printed.entropy()[1]), float(right.entropy()[1]), float(measured))


@book.add(
    "P52",
    "P",
    printed="dividing by d keeps the variance",
    right="it gives sigma^4 / d",
    spec="M-SCL-1",
    quantity="variance of q . k / d at d = 64",
    tolerance=1e-3,
)
def _divide() -> Reading:
    measured = ((randn(50_000, 64) * randn(50_000, 64, seed=1)).sum(-1) / 64).var()
    return Reading(1.0, float(score_variance(64)) / 64**2, float(measured))


@book.add(
    "P53",
    "P",
    printed="Laplace's method with a uniform density, interior maximum",
    right="the maximum is at the edge: scale b - log(scale w)",
    spec="M-SCL-11",
    quantity="log E e^{8 s}, s uniform on [-1, 1]",
    tolerance=1e-5,
)
def _uniform_density() -> Reading:
    exact = log((exp(8) - exp(-8)) / 16)
    return Reading(8 - 0.5 * log(2 * pi) + 0.5 * log(8), float(laplace_method_edge(8.0, 1.0, 2.0)), exact)
