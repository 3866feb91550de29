"""Errata of the document on contrastive losses, equations (4.4.x) and what it says of information."""

from __future__ import annotations

from itertools import product
from math import exp, inf, log

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from partita_theory import contrast, geometry, information
from partita_theory.errata._samples import F64, critic_losses, gradient, randn, softmax, vector
from partita_theory.errata.row import Book, Numbers
from partita_theory.geometry import kl
from partita_theory.information import entropy_of

book = Book("contrast")


@book.add("(4.4.3)", "N", "M-INC-1")
def _self_term() -> Numbers:
    """printed: negatives are x_k, k != i, sum over all N
    right: negatives are k != j; the anchor itself is no candidate
    quantity: mean loss of 16 views at temperature 0.1
    """
    base = normalize(randn(8, 16), dim=-1)
    views = torch.cat([normalize(base + 0.1 * randn(8, 16, seed=s), dim=-1) for s in (1, 2)])
    sim, partner = views @ views.T / 0.1, (torch.arange(16) + 8) % 16
    explicit = []
    for i, j in enumerate(partner.tolist()):
        candidates = torch.stack([views[j], *(views[k] for k in range(16) if k not in (i, j))])
        explicit.append(contrast.info_nce(views[i], candidates, temperature=0.1))
    masked = sim.masked_fill(torch.eye(16, dtype=torch.bool), -inf)
    return cross_entropy(sim, partner), cross_entropy(masked, partner), torch.stack(explicit).mean()


@book.add("(4.4.4)", "W", "M-INC-1")
def _event() -> Numbers:
    """printed: P(c = i | q) = exp(s_ij / t) / sum, for every j
    right: P(c = j | q)
    quantity: probability of the one event c = i
    """
    s = randn(6) / 0.5
    return softmax(s).sum(), softmax(s)[0], s[0].exp() / s.exp().sum()


@book.add("(4.4.8)", "C", "M-INC-2", tolerance=0.02)
def _cap() -> Numbers:
    """printed: log N - loss tells I
    right: in expectation, N candidates, and never above log N
    quantity: estimate with 16 candidates and the optimal critic where I = 17 nats
    """
    bound = information.mutual_information_bound(critic_losses(16, 200, rho=0.9999, critic=0.9999), 16)
    return information.gaussian_information(0.9999, 4), bound.cap, bound.value


def _pair(which: int) -> Numbers:
    """Slope of the loss when one key moves along the query: printed, right, autograd."""
    q, k, t = randn(5), randn(6, 5, seed=1), 0.5
    p = softmax(k @ q / t)
    printed = (q - p @ k) * p[0] / t if which == 0 else (p @ k - q) * p[which] / t
    right = contrast.info_nce_gradients(q, k, temperature=t).keys[which]
    measured = gradient(lambda x: contrast.info_nce(q, x, temperature=t), k)[which]
    return printed @ q, right @ q, measured @ q


@book.add("(4.4.15)", "W", "M-INC-3")
def _pull() -> Numbers:
    """printed: d loss / d k+ = (q - E[k]) P+ / t
    right: -(1 - P+) q / t
    quantity: slope of the loss as the positive moves along q
    """
    return _pair(0)


@book.add("(4.4.16)", "W", "M-INC-3")
def _push() -> Numbers:
    """printed: d loss / d k_m = (E[k] - q) P_m / t
    right: P_m q / t
    quantity: slope of the loss as a negative moves along q
    """
    return _pair(2)


@book.add("(4.4.23)", "N", "M-ATT-1")
def _scalar() -> Numbers:
    """printed: A_ij = softmax of the scalar q_i . k_j
    right: softmax of the row, component j
    quantity: weight of the first of four keys
    """
    s = randn(4)
    return softmax(s[:1])[0], softmax(s)[0], s[0].exp() / s.exp().sum()


@book.add("(4.4.27)", "W", "M-GEO-6")
def _xor() -> Numbers:
    """printed: KL to the product of marginals = sum_t I(x_t; x_-t)
    right: = sum_{t>=2} I(x_t; x_<t), the total correlation
    quantity: KL of the XOR triple from its product of marginals
    """
    table = torch.zeros(2, 2, 2, dtype=F64)
    for a, b in product(range(2), repeat=2):
        table[a, b, a ^ b] = 0.25
    direct = kl(table.flatten(), information.product_of_marginals(table).flatten())
    return information.mutual_information_sum(table), information.total_correlation(table), direct


@book.add("u1", "C", "M-LOSS-1")
def _one_hot() -> Numbers:
    """printed: -sum p log p^ = -log p^_c
    right: only for one-hot targets
    quantity: cross entropy of target (.9, .05, .05)
    """
    z, y = vector(1, 0.5, 0.2), vector(0.9, 0.05, 0.05)
    log_p = torch.log_softmax(z, -1)
    return -log_p[0], geometry.soft_cross_entropy(z, y), -(y * log_p).sum()


@book.add("P3", "P", "M-INC-2", tolerance=0.1)
def _fixed_critic() -> Numbers:
    """printed: more negatives make the bound tight
    right: a fixed critic saturates at E[f] - log E[exp f]
    quantity: estimate with 1024 candidates, a critic for rho 0.2, data with rho 0.9
    """
    rho, r, dim, n = 0.9, 0.2, 4, 1024
    limit = dim * (-0.5 * log(1 - r**2) - (1 - 2 * r * rho + r**2) / (2 * (1 - r**2)) + 0.5)
    loss = critic_losses(n, 400, rho=rho, critic=r, seed=5)
    return information.gaussian_information(rho, dim), limit, information.mutual_information_bound(loss, n).value


@book.add("P4", "P", "M-GIB-7")
def _no_target() -> Numbers:
    """printed: self-attention maximises mutual information
    right: there is no target in the operator: constant values give no gradient
    quantity: largest gradient of a score when all values are equal (printed: that of InfoNCE)
    """
    q, k = randn(5), randn(6, 5, seed=1)
    nce = contrast.info_nce_gradients(q, k).scores.abs().max()
    return nce, 0.0, gradient(lambda s: softmax(s).sum(), k @ q).abs().max()


@book.add("P5", "P", "M-RMK-5")
def _infinitely_many() -> Numbers:
    """printed: attention is InfoNCE with infinitely many negatives
    right: n candidates, cap log n
    quantity: largest information a row of 8 keys can report
    """
    loss = contrast.info_nce(vector(99), torch.eye(8, 1, dtype=F64))
    return inf, log(8), information.mutual_information_bound(loss, 8).value


@book.add("P6", "P", "M-INC-3")
def _weight_of_pull() -> Numbers:
    """printed: the pull on k+ is weighted by P+
    right: by 1 - P+
    quantity: t |d loss / d k+| / |q| for a badly placed positive
    """
    q, k = randn(5), randn(8, 5, seed=1)
    k[0] = -q
    p, g = softmax(k @ q)[0], gradient(lambda x: contrast.info_nce(q, x), k)[0]
    return p, 1 - p, g.norm() / q.norm()


@book.add("P7", "P", "M-INC-3")
def _mean_of_negatives() -> Numbers:
    """printed: d loss / d q = (mean of the negatives - k+) / t
    right: (1 - P+)(mean of the negatives - k+) / t
    quantity: length of the gradient by the query
    """
    q, k = randn(5), randn(8, 5, seed=1)
    k[0] = q
    p = softmax(k @ q)
    way = (p[1:] @ k[1:] / p[1:].sum() - k[0]).norm()
    return way, (1 - p[0]) * way, gradient(lambda x: contrast.info_nce(x, k), q).norm()


@book.add("P8", "P", "M-INC-7")
def _monotone() -> Numbers:
    """printed: a smaller temperature gives a larger gradient (1 / t)
    right: not monotone: an easy positive's gradient dies
    quantity: gradient at temperature 0.02 over gradient at 0.5, easy positive
    """
    c = vector(0.9, 0.3, 0.1, -0.2, 0.0)
    q, k = vector(1, 0), torch.stack([c, (1 - c**2).sqrt()], -1)

    def right(t: float) -> Tensor:
        return contrast.info_nce_gradients(q, k, temperature=t).query.square().sum()

    def measured(t: float) -> Tensor:
        return gradient(lambda x: contrast.info_nce(x, k, temperature=t), q).square().sum()

    return 25.0, (right(0.02) / right(0.5)).sqrt(), (measured(0.02) / measured(0.5)).sqrt()


@book.add("P54", "P", "M-INC-7", tolerance=2e-3)
def _too_hot() -> Numbers:
    """printed: too high a temperature lets the representations collapse
    right: the best batch is the same at every temperature: a simplex, cosine -1/(N - 1) between different pairs
    quantity: mean cosine of 4 different pairs after descent at temperature 10 from a start near collapse
    """
    x = torch.ones(4, 8, dtype=F64) + 0.1 * randn(4, 8)

    def loss(x: Tensor) -> Tensor:
        unit = normalize(x, dim=-1)
        return cross_entropy(unit @ unit.T / 10, torch.arange(4))

    for _ in range(400):
        x = normalize(x - 20 * gradient(loss, x), dim=-1)
    return 1.0, -1 / 3, (x @ x.T)[~torch.eye(4, dtype=torch.bool)].mean()


@book.add("P11", "P", "M-GEO-6")
def _shuffle() -> Numbers:
    """printed: shuffling a sequence gives the product of marginals
    right: positions must be resampled across sequences
    quantity: total variation between shuffles of (0, 1) and the product law
    """
    shuffled = vector(0.0, 0.5, 0.5, 0.0)
    product_law = information.product_of_marginals(shuffled.reshape(2, 2)).flatten()
    return 0.0, geometry.total_variation(shuffled, product_law), (shuffled - 0.25).abs().sum() / 2


@book.add("P12", "P", "M-LOSS-11")
def _zipf() -> Numbers:
    """printed: a language model's softmax is InfoNCE: I >= log V - CE
    right: everything is enumerated: I >= H(X) - CE
    quantity: bound for Zipf words with an independent context, where I = 0
    """
    p = 1 / torch.arange(1, 1001, dtype=F64)
    p = p / p.sum()
    ce = -(p * p.log()).sum()
    return log(1000) - ce, information.token_information_gain(ce, entropy_of(p)), 0.0


def _laws() -> tuple[Tensor, Tensor]:
    return softmax(randn(6)), softmax(randn(6, seed=1))


@book.add("P1", "P", "M-NCE-4")
def _consistent() -> Numbers:
    """printed: NCE needs k -> infinity for its guarantee
    right: consistent for every k > 0: the gradient at m = P is 0
    quantity: largest gradient at the true law for k = 1/2 (printed: the distance of that k from the limit)
    """
    p, q = _laws()
    off, limit = (contrast.nce_population_gradient(p.log() + 0.1, p, q, k) for k in (0.5, 1e9))
    measured = gradient(lambda f: contrast.nce_population_loss(f, p, q, 0.5), p.log())
    return (off - limit).abs().max(), 0.0, measured.abs().max()


@book.add("P2", "P", "M-NCE-4", tolerance=1e-4)
def _diverges() -> Numbers:
    """printed: as k grows the NCE loss tends to KL(P || m)
    right: its gradient does; the value is log k + sum P log(p_n / m) + sum m
    quantity: population loss at k = 10^6
    """
    p, q = _laws()
    f = torch.log_softmax(randn(6, seed=2), -1)
    value = log(1e6) + (p * (q.log() - f)).sum() + f.exp().sum()
    return kl(p, f.exp()), value, contrast.nce_population_loss(f, p, q, 1e6)


@book.add("P10", "P", "M-GIB-8", tolerance=5e-4)
def _projection() -> Numbers:
    """printed: softmax is a projection onto the simplex
    right: it is not idempotent; the projection is sparsemax
    quantity: first weight after softmax of (.7, .2, .1)
    """
    p = vector(0.7, 0.2, 0.1)
    return geometry.simplex_projection(p)[0], 0.464, softmax(p)[0]


@book.add("P13", "P", "M-GIB-6")
def _exact() -> Numbers:
    """printed: softmax with cross entropy approximates a KL
    right: CE = H(y) + KL(y || p), exactly
    quantity: cross entropy of a soft target
    """
    z, y = randn(5), softmax(randn(5, seed=1))
    floor, fault = geometry.cross_entropy_decomposition(z, y)
    return fault, floor + fault, geometry.soft_cross_entropy(z, y)


@book.add("P14", "P", "M-RMK-6")
def _hinge() -> Numbers:
    """printed: every loss is an information quantity
    right: hinge is no negative log-likelihood: its mass is not constant
    quantity: exp(-hinge) summed over both labels at margin 1 (printed: as at margin 0)
    """
    zero, one = geometry.hinge_mass(vector(0, 1))
    return zero, one, 1 + exp(-2)
