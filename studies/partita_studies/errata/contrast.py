"""Errata of the document on contrastive losses, equations (4.4.x)."""

from __future__ import annotations

from itertools import product
from math import inf, log

import torch
from torch.nn.functional import cross_entropy, normalize

from partita.theory.contrast import info_nce, info_nce_gradients
from partita.theory.geometry import kl, soft_cross_entropy, total_variation
from partita.theory.information import (
    entropy_of,
    gaussian_information,
    mutual_information_bound,
    mutual_information_sum,
    product_of_marginals,
    total_correlation,
)
from partita_studies.errata._samples import F64, critic_losses, gradient, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("contrast")


@book.add(
    "(4.4.3)",
    "N",
    printed="negatives are x_k, k != i, sum over all N",
    right="negatives are k != j; the anchor itself is no candidate",
    spec="M-INC-1",
    quantity="mean loss of 16 views at temperature 0.1",
)
def _self_term() -> Reading:
    base = normalize(randn(8, 16), dim=-1)
    views = torch.cat([normalize(base + 0.1 * randn(8, 16, seed=s), dim=-1) for s in (1, 2)])
    sim, partner = views @ views.T / 0.1, (torch.arange(16) + 8) % 16
    explicit = []
    for i in range(16):
        others = [j for j in range(16) if j not in (i, int(partner[i]))]
        explicit.append(info_nce(views[i], torch.cat([views[partner[i]][None], views[others]]), temperature=0.1))
    masked = sim.masked_fill(torch.eye(16, dtype=torch.bool), -torch.inf)
    return Reading(
        float(cross_entropy(sim, partner)), float(cross_entropy(masked, partner)), float(torch.stack(explicit).mean())
    )


@book.add(
    "(4.4.4)",
    "W",
    printed="P(c = i | q) = exp(s_ij / t) / sum, for every j",
    right="P(c = j | q)",
    spec="M-INC-1",
    quantity="probability of the one event c = i",
)
def _event() -> Reading:
    s = randn(6) / 0.5
    p = torch.softmax(s, -1)
    return Reading(float(p.sum()), float(p[0]), float(s[0].exp() / s.exp().sum()))


@book.add(
    "(4.4.8)",
    "C",
    printed="log N - loss tells I",
    right="in expectation, N candidates, and never above log N",
    spec="M-INC-2",
    quantity="estimate with 16 candidates and the optimal critic where I = 17 nats",
    tolerance=0.02,
)
def _cap() -> Reading:
    rho = 0.9999
    loss = critic_losses(16, 200, rho=rho, critic=rho)
    bound = mutual_information_bound(loss, 16)
    return Reading(float(gaussian_information(rho, 4)), float(bound.cap), float(bound.value))


def _pair(which: int) -> Reading:
    """Slope of the loss when one key moves along the query: printed, right, autograd."""
    q, k, t = randn(5), randn(6, 5, seed=1), 0.5
    p = torch.softmax(k @ q / t, -1)
    mean = p @ k
    printed = (q - mean) * p[0] / t if which == 0 else (mean - q) * p[which] / t
    right = info_nce_gradients(q, k, temperature=t).keys[which]
    measured = gradient(lambda x: info_nce(q, x, temperature=t), k)[which]
    return Reading(float(printed @ q), float(right @ q), float(measured @ q))


@book.add(
    "(4.4.15)",
    "W",
    printed="d loss / d k+ = (q - E[k]) P+ / t",
    right="-(1 - P+) q / t",
    spec="M-INC-3",
    quantity="slope of the loss as the positive moves along q",
)
def _pull() -> Reading:
    return _pair(0)


@book.add(
    "(4.4.16)",
    "W",
    printed="d loss / d k_m = (E[k] - q) P_m / t",
    right="P_m q / t",
    spec="M-INC-3",
    quantity="slope of the loss as a negative moves along q",
)
def _push() -> Reading:
    return _pair(2)


@book.add(
    "(4.4.23)",
    "N",
    printed="A_ij = softmax of the scalar q_i . k_j",
    right="softmax of the row, component j",
    spec="M-ATT-1",
    quantity="weight of the first of four keys",
)
def _scalar() -> Reading:
    s = randn(4)
    return Reading(
        float(torch.softmax(s[:1], -1)[0]), float(torch.softmax(s, -1)[0]), float(s[0].exp() / s.exp().sum())
    )


@book.add(
    "(4.4.27)",
    "W",
    printed="KL to the product of marginals = sum_t I(x_t; x_-t)",
    right="= sum_{t>=2} I(x_t; x_<t), the total correlation",
    spec="M-GEO-6",
    quantity="KL of the XOR triple from its product of marginals",
)
def _xor() -> Reading:
    table = torch.zeros(2, 2, 2, dtype=F64)
    for a, b in product(range(2), repeat=2):
        table[a, b, a ^ b] = 0.25
    direct = kl(table.flatten(), product_of_marginals(table).flatten())
    return Reading(float(mutual_information_sum(table)), float(total_correlation(table)), float(direct))


@book.add(
    "u1",
    "C",
    printed="-sum p log p^ = -log p^_c",
    right="only for one-hot targets",
    spec="M-LOSS-1",
    quantity="cross entropy of target (.9, .05, .05)",
)
def _one_hot() -> Reading:
    z, y = torch.tensor([1.0, 0.5, 0.2], dtype=F64), torch.tensor([0.9, 0.05, 0.05], dtype=F64)
    log_p = torch.log_softmax(z, -1)
    return Reading(float(-log_p[0]), float(soft_cross_entropy(z, y)), float(-(y * log_p).sum()))


@book.add(
    "P3",
    "P",
    printed="more negatives make the bound tight",
    right="a fixed critic saturates at E[f] - log E[exp f]",
    spec="M-INC-2",
    quantity="estimate with 1024 candidates, a critic for rho 0.2, data with rho 0.9",
    tolerance=0.1,
)
def _fixed_critic() -> Reading:
    rho, r, dim, n = 0.9, 0.2, 4, 1024
    limit = dim * (-0.5 * log(1 - r**2) - (1 - 2 * r * rho + r**2) / (2 * (1 - r**2)) + 0.5)
    loss = critic_losses(n, 400, rho=rho, critic=r, seed=5)
    return Reading(float(gaussian_information(rho, dim)), limit, float(mutual_information_bound(loss, n).value))


@book.add(
    "P4",
    "P",
    printed="self-attention maximises mutual information",
    right="there is no target in the operator: constant values give no gradient",
    spec="M-GIB-7",
    quantity="largest gradient of a score when all values are equal (printed: that of InfoNCE)",
)
def _no_target() -> Reading:
    q, k = randn(5), randn(6, 5, seed=1)
    nce = info_nce_gradients(q, k).scores.abs().max()
    flow = gradient(lambda s: torch.softmax(s, -1) @ torch.ones(6, dtype=F64), k @ q)
    return Reading(float(nce), 0.0, float(flow.abs().max()))


@book.add(
    "P5",
    "P",
    printed="attention is InfoNCE with infinitely many negatives",
    right="n candidates, cap log n",
    spec="M-RMK-5",
    quantity="largest information a row of 8 keys can report",
)
def _infinitely_many() -> Reading:
    best = mutual_information_bound(info_nce(torch.tensor([99.0]).double(), torch.eye(8, 1, dtype=F64)), 8)
    return Reading(inf, log(8), float(best.value))


@book.add(
    "P6",
    "P",
    printed="the pull on k+ is weighted by P+",
    right="by 1 - P+",
    spec="M-INC-3",
    quantity="t |d loss / d k+| / |q| for a badly placed positive",
)
def _weight_of_pull() -> Reading:
    q, k = randn(5), randn(8, 5, seed=1)
    k[0] = -q
    p = torch.softmax(k @ q, -1)[0]
    g = gradient(lambda x: info_nce(q, x), k)[0]
    return Reading(float(p), float(1 - p), float(g.norm() / q.norm()))


@book.add(
    "P7",
    "P",
    printed="d loss / d q = (mean of the negatives - k+) / t",
    right="(1 - P+)(mean of the negatives - k+) / t",
    spec="M-INC-3",
    quantity="length of the gradient by the query",
)
def _mean_of_negatives() -> Reading:
    q, k = randn(5), randn(8, 5, seed=1)
    k[0] = q
    p = torch.softmax(k @ q, -1)
    negatives = p[1:] @ k[1:] / p[1:].sum()
    g = gradient(lambda x: info_nce(x, k), q)
    return Reading(float((negatives - k[0]).norm()), float((1 - p[0]) * (negatives - k[0]).norm()), float(g.norm()))


@book.add(
    "P8",
    "P",
    printed="a smaller temperature gives a larger gradient (1 / t)",
    right="not monotone: an easy positive's gradient dies",
    spec="M-INC-7",
    quantity="gradient at temperature 0.02 over gradient at 0.5, easy positive",
)
def _monotone() -> Reading:
    c = torch.tensor([0.9, 0.3, 0.1, -0.2, 0.0], dtype=F64)
    q, k = torch.tensor([1.0, 0.0], dtype=F64), torch.stack([c, (1 - c**2).sqrt()], -1)

    def right(t: float) -> float:
        return float(info_nce_gradients(q, k, temperature=t).query.norm())

    def measured(t: float) -> float:
        return float(gradient(lambda x: info_nce(x, k, temperature=t), q).norm())

    return Reading(25.0, right(0.02) / right(0.5), measured(0.02) / measured(0.5))


@book.add(
    "P11",
    "P",
    printed="shuffling a sequence gives the product of marginals",
    right="positions must be resampled across sequences",
    spec="M-GEO-6",
    quantity="total variation between shuffles of (0, 1) and the product law",
)
def _shuffle() -> Reading:
    shuffled = torch.tensor([[0.0, 0.5], [0.5, 0.0]], dtype=F64)
    direct = sum(abs(float(shuffled[a, b]) - 0.25) for a, b in product(range(2), repeat=2)) / 2
    tv = total_variation(shuffled.flatten(), product_of_marginals(shuffled).flatten())
    return Reading(0.0, float(tv), direct)


@book.add(
    "P12",
    "P",
    printed="a language model's softmax is InfoNCE: I >= log V - CE",
    right="everything is enumerated: I >= H(X) - CE",
    spec="M-LOSS-11",
    quantity="bound for Zipf words with an independent context, where I = 0",
)
def _zipf() -> Reading:
    p = 1 / torch.arange(1, 1001, dtype=F64)
    p = p / p.sum()
    ce = -(p * p.log()).sum()
    return Reading(log(1000) - float(ce), float(entropy_of(p) - ce), 0.0)
