"""Errata of the document on noise and entropy, equations (2) to (80)."""

from __future__ import annotations

from itertools import product
from math import exp, inf, log, log1p, log10

import torch
from torch import Tensor

from partita_theory import geometry, information, law, layer, robustness, selection, sharpness, spectrum
from partita_theory.errata._samples import (
    F64,
    NOISE,
    generator,
    mean_entropy,
    noisy_sd,
    one_above,
    power,
    randn,
    softmax,
    uniform,
    vector,
)
from partita_theory.errata.row import Book, Numbers
from partita_theory.geometry import kl
from partita_theory.information import entropy, entropy_of

book = Book("noise")
LONG = one_above(100_000, 3.0)


def _grid(n: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, n, dtype=F64)
    return x, x[:, None]


@book.add("(2)", "W", "M-ROB-1")
def _factor() -> Numbers:
    """printed: out = n * mean(e^s v) / mean(e^s)
    right: no factor n
    quantity: output of a row of 8 keys
    """
    s, v = randn(8), randn(8, seed=1)
    ratio = (s.exp() * v).mean() / s.exp().mean()
    return 8 * ratio, ratio, softmax(s) @ v


def _tie_spread(values: Tensor) -> Numbers:
    """Relative standard deviation of a sum over a two-way tie, of these values."""
    parts = values / 2
    total = (NOISE.sample(40_000, 2, generator=generator()).exp() * parts).sum(-1)
    return 0.0, (NOISE.cv2() * parts.square().sum()).sqrt() / parts.sum(), total.std() / total.mean()


def _spread(n: int, draws: int) -> Numbers:
    """Standard deviation of the output for scores and values on a grid."""
    s, v = _grid(n)
    return 0.0, robustness.noise_covariance(softmax(s), v, NOISE.cv2()).sqrt(), noisy_sd(s, v, draws)


@book.add("(6)", "C", "M-ROB-2", tolerance=0.01)
def _numerator() -> Numbers:
    """printed: the noisy average of e^s v is the clean one times E[e^noise]
    right: in expectation; its fluctuation is set by n_eff = 1 / sum p^2
    quantity: relative sd of the numerator for a two-way tie, sigma 0.5
    """
    return _tie_spread(vector(1, 2))


@book.add("(7)", "C", "M-ROB-2", tolerance=0.01)
def _denominator() -> Numbers:
    """printed: the same for the denominator
    right: the same
    quantity: relative sd of the denominator for a two-way tie, sigma 0.5
    """
    return _tie_spread(vector(1, 1))


def _iqr(b: float, n: int, seed: int) -> Tensor:
    e = robustness.LaplaceNoise(b).sample(1000, n, generator=generator(seed))
    out = softmax(e) @ _grid(n)[0]
    return out.quantile(0.75) - out.quantile(0.25)


@book.add("(8)", "C", "M-ROB-4", tolerance=0.12)
def _large_numbers() -> Numbers:
    """printed: by the law of large numbers the error falls like n^-1/2
    right: not for Laplace noise with b = 2: no convergence
    quantity: interquartile range at n = 8192 over that at n = 256
    """
    return 32**-0.5, 32 ** robustness.laplace_error_exponent(2.0), _iqr(2.0, 8192, 1) / _iqr(2.0, 256, 2)


@book.add("(9)", "C", "M-ROB-2", tolerance=0.015)
def _tie_output() -> Numbers:
    """printed: noisy output = clean output
    right: only for n_eff >> 1: two keys of a thousand spread as two alone
    quantity: sd of the output for a two-way tie inside n = 1000, sigma 0.5
    """
    s, v = torch.full((1000, 1), -40.0, dtype=F64), torch.zeros(1000, 1, dtype=F64)
    s[:2], v[0], v[1] = 0.0, 1.0, -1.0
    alone = softmax(NOISE.sample(40_000, 2, generator=generator())) @ vector(1, -1)
    return 0.0, alone.std(), noisy_sd(s[:, 0], v, 4000)


@book.add("(10)", "C", "M-ROB-2", tolerance=0.12)
def _bias_order() -> Numbers:
    """printed: bias O(n^-1/2)
    right: bias -cv^2 sum p^2 (v - out) = O(1/n); the sd is O(n^-1/2)
    quantity: exponent of the measured bias between n = 8 and n = 64
    """
    exact, found = [], []
    for n, draws in ((8, 75_000), (64, 18_750)):
        s, v = _grid(n)
        exact.append(robustness.noise_bias(softmax(s), v, NOISE.cv2()))
        # With each sample its mirror image: the first-order fluctuation cancels, the bias does not.
        e = NOISE.sample(draws, n, generator=generator(n))
        found.append(((softmax(s + e) + softmax(s - e)) / 2 @ v).mean() - softmax(s) @ v)
    return -0.5, power((8, 64), exact), power((8, 64), found)


@book.add("(16)", "W", "M-ROB-2", tolerance=1e-3)
def _ratio() -> Numbers:
    """printed: E[X/Y] = EX/EY + (Cov EX - Var(Y) EX) / EY^3
    right: EX/EY - Cov/EY^2 + Var(Y) EX/EY^3
    quantity: mean of a ratio of two correlated numbers
    """
    common = randn(1_000_000)
    x, y = 3 + 0.3 * common, 2 + 0.05 * common + 0.15 * randn(1_000_000, seed=1)
    cov, var = 0.015, 0.0025 + 0.0225
    return 3 / 2 + (cov * 3 - var * 3) / 8, robustness.ratio_expansion(3.0, 2.0, cov, var), (x / y).mean()


@book.add("(17)", "C", "M-ROB-2", tolerance=0.1)
def _variance() -> Numbers:
    """printed: Var(sum e^s e^noise) = O(n) for any scores
    right: sigma^2 sum e^{2s}: as large as n^2 when one score grows with log n
    quantity: exponent of the variance in n for one score at log n (printed: 1)
    """
    right, found = [], []
    for n in (256, 4096):
        s = one_above(n, log(n))
        right.append(NOISE.cv2() * NOISE.exponential_moment() ** 2 * (2 * s).exp().sum())
        found.append((s + NOISE.sample(2000, n, generator=generator(n))).exp().sum(-1).var())
    return 1.0, power((256, 4096), right), power((256, 4096), found)


@book.add("(18)", "N", "M-ROB-2", tolerance=0.03)
def _clt() -> Numbers:
    """printed: by the central limit theorem the average converges
    right: the law of large numbers; the CLT describes the n^-1/2 fluctuation
    quantity: sd at n = 1024 over sd at n = 64 (printed: 0, converged)
    """
    return 0.0, 0.25, noisy_sd(*_grid(1024), 4000, seed=1024) / noisy_sd(*_grid(64), 4000, seed=64)


@book.add("(25)", "C", "M-ROB-2", tolerance=1e-3)
def _cancels() -> Numbers:
    """printed: the noise cancels
    right: sd = cv sqrt(sum p^2 (v - out)^2)
    quantity: sd of the output at n = 64, sigma 0.5
    """
    return _spread(64, 40_000)


@book.add("(27)", "C", "M-ROB-3", tolerance=1e-5)
def _laplace() -> Numbers:
    """printed: the integral converges up to b = 1 (left open)
    right: 1 / (1 - b^2) for b < 1, infinite for b >= 1
    quantity: E[exp(noise)] for Laplace noise, b = 0.3 (printed: none, read as 1 / (1 - b))
    """
    x = torch.linspace(-40, 40, 1_600_001, dtype=F64)
    exact = torch.trapezoid(torch.exp(x - x.abs() / 0.3) / 0.6, x)
    return 1 / 0.7, robustness.LaplaceNoise(0.3).exponential_moment(), exact


# the next order is 2.5e-3 at 16 keys; five standard errors of the draws are 1.1e-3
@book.add("u3", "C", "M-ROB-2", tolerance=4e-3)
def _opening() -> Numbers:
    """printed: noisy output = clean output
    right: as (9)
    quantity: sd of the output at n = 16, sigma 0.5
    """
    return _spread(16, 60_000)


@book.add("P30", "P", "M-ROB-4", tolerance=0.1)
def _finite_mean() -> Numbers:
    """printed: a finite E[e^noise] suffices for the n^-1/2 rate
    right: for 1/2 < b < 1 the rate is n^-(1 - b)
    quantity: exponent of the interquartile error for Laplace noise, b = 0.7
    """
    errors = [_iqr(0.7, 256, 3), _iqr(0.7, 8192, 4)]
    return -0.5, robustness.laplace_error_exponent(0.7), power((256, 8192), errors)


@book.add("P33", "P", "M-GIB-2")
def _overflow() -> Numbers:
    """printed: large scores make e^s overflow
    right: not after the maximum is taken out
    quantity: log-partition of scores 1000 and 999
    """
    s = vector(1000, 999)
    return s.exp().sum().log(), 1000 + log1p(exp(-1)), torch.logsumexp(s, -1)


@book.add("(32)", "C", "M-SCL-12", tolerance=0.05)
def _one_hot() -> Numbers:
    """printed: a large sigma makes the row one-hot
    right: at fixed n, and sigma >> sqrt(2 log n)
    quantity: entropy of 10^6 Gaussian scores of sd 2 (printed: 0)
    """
    return 0.0, sharpness.gaussian_entropy(1e6, 2.0), mean_entropy(randn(4, 1_000_000), 2.0)


@book.add("(33)", "C", "M-SCL-13", tolerance=0.08)
def _frozen() -> Numbers:
    """printed: then H = 0
    right: O(1): psi(1) - psi(1 - m) past the transition
    quantity: entropy of 2^14 Gaussian scores at three times the transition
    """
    n, x = 2**14, 3 * (2 * log(2**14)) ** 0.5
    return 0.0, sharpness.condensed_entropy(sharpness.frozen_index(n, x)), mean_entropy(randn(300, n), x)


@book.add("(35)", "W", "M-SCL-12", tolerance=5e-3)
def _half_nat() -> Numbers:
    """printed: Gaussian scores of sd 1: H = log n - 0.4745
    right: log n - 1/2
    quantity: log n - H at n = 10^4
    """
    gap = log(1e4) - mean_entropy(randn(400, 10_000))
    return information.floor_gap(2.0), log(1e4) - sharpness.gaussian_entropy(1e4, 1.0), gap


@book.add("(36)", "W", "M-INF-2", tolerance=0.05)
def _floor_of_normal() -> Numbers:
    """printed: normal scores have the floor log n - 0.4745
    right: unbounded scores have floor 0
    quantity: entropy of 1000 normal scores as their sd grows (10^4 here)
    """
    return log(1000) - 0.4745, 0.0, mean_entropy(randn(200, 1000), 1e4)


def _least_of_cosines() -> Tensor:
    """The least entropy of 1000 scores in [-1, 1]: k of them at the top, the others at the bottom."""
    k, r = torch.arange(1, 1000, dtype=F64), exp(2.0)
    return (torch.log(k * r + 1000 - k) - 2 * k * r / (k * r + 1000 - k)).min()


@book.add("(37)", "W", "M-INF-2", tolerance=1e-4)
def _range() -> Numbers:
    """printed: H_max - H_min = log n - 0.4745
    right: 0.4745 for cosine scores at temperature 1
    quantity: range of the entropy of 1000 cosine scores at temperature 1
    """
    return log(1000) - 0.4745, information.floor_gap(2.0), log(1000) - _least_of_cosines()


@book.add("P55", "P", "M-INF-2", tolerance=1e-4)
def _from_the_floor() -> Numbers:
    """printed: the entropy ranges over [0.4745, log n]
    right: over [log n - 0.4745, log n], of cosine scores at temperature 1; of unbounded ones over [0, log n]
    quantity: least entropy of 1000 cosine scores at temperature 1
    """
    return 0.4745, log(1000) - information.floor_gap(2.0), _least_of_cosines()


@book.add("(39)", "C", "M-GIB-3")
def _ties() -> Numbers:
    """printed: temperature -> 0: H -> 0
    right: H -> log of the number of maximisers
    quantity: entropy of (1, 1, 0) at temperature 1e-6
    """
    return 0.0, log(2), entropy(vector(1, 1, 0) * 1e6)


@book.add("(43)", "W", "M-INF-2")
def _interval() -> Numbers:
    """printed: H in [0, log n - 0.4745] for cosine scores
    right: H in [log n - 0.4745, log n]
    quantity: share of 2000 random rows of 256 cosines inside the interval
    """
    rows, keys = (torch.nn.functional.normalize(x, dim=-1) for x in (randn(2000, 8), randn(256, 8, seed=1)))
    h = entropy(rows @ keys.T)
    # The printed interval would hold all rows, so it claims that none lies in the right one.
    return 0.0, 1.0, ((h >= log(256) - 0.4745) & (h <= log(256))).double().mean()


@book.add("(45)", "C", "M-INF-2", tolerance=0.01)
def _tiny() -> Numbers:
    """printed: H in [0, log n] at temperature 0.07
    right: the floor is tiny but positive and grows with n
    quantity: log of the least entropy of 256 cosines at temperature 0.07, in decades
    """
    w = 2 / 0.07
    rest = 255 * exp(-w)
    return -inf, information.entropy_floor(256, 0.07).log10(), log10(log1p(rest) + w * rest / (1 + rest))


def _divergence_length(p: Tensor, d: Tensor, eps: float) -> Tensor:
    """Squared length of d in the Fisher metric: the symmetric divergence is the metric to third order."""
    return (kl(p, p + eps * d) + kl(p + eps * d, p)) / eps**2


@book.add("(49)", "C", "M-GEO-3", tolerance=1e-2)
def _fisher() -> Numbers:
    """printed: Fisher metric g_ij = [i=j]/p_i - 1 in the coordinates p
    right: in homogeneous coordinates; free ones have [i=j]/p_i + 1/p_n
    quantity: first entry of the metric in free coordinates at (.5, .3, .2)
    """
    p = vector(0.5, 0.3, 0.2)
    measured = _divergence_length(p, vector(1, 0, -1), 1e-4)
    return geometry.fisher_homogeneous(p)[0, 0], geometry.fisher_free(p)[0, 0], measured


@book.add("(50)", "N", "M-GEO-4", tolerance=1e-3)
def _not_at_uniform() -> Numbers:
    """printed: the gradient of entropy points at uniform
    right: -p (log p + H) in the Fisher metric; parallel to u - p only for n = 2
    quantity: cosine between the two at (.9, .09, .01)
    """
    p = vector(0.9, 0.09, 0.01)
    away, flow = 1 / 3 - p, -p * (p.log() + entropy_of(p))
    moved = softmax((1 - 1e-5) * p.log()) - p  # measured: where tempering, the exact flow, takes p
    cosine = torch.nn.functional.cosine_similarity
    return 1.0, cosine(flow, away, dim=0), cosine(moved, away, dim=0)


@book.add("(53)", "C", "M-GIB-5", tolerance=1e-3)
def _smooth() -> Numbers:
    """printed: logsumexp is the maximum if one score dominates
    right: its lead must exceed log n by far
    quantity: log-partition of a lead of 3 among 10^5
    """
    return 3.0, log(1e5 - 1 + 20.0855369), geometry.smooth_max(LONG)


@book.add("(54)", "C", "M-GIB-3")
def _largest() -> Numbers:
    """printed: then the row is one-hot
    right: p_max = 1 / (1 + (n - 1) e^-gap)
    quantity: largest weight there
    """
    return 1.0, law.one_hot_bound(1e5, 3.0), law.gibbs_law(LONG).probs.max()


@book.add("(56)", "C", "M-SPA-2")
def _soft_hard() -> Numbers:
    """printed: soft output = value of the best key
    right: they differ by up to (1 - p_max) diam(V)
    quantity: distance between them for values 1 (best) and 0 (others)
    """
    v = one_above(100_000, 1.0)[:, None]
    gap = (law.gibbs_law(LONG).probs @ v - selection.hard_choice(LONG, v)).norm()
    return 0.0, 1 - law.one_hot_bound(1e5, 3.0), gap


@book.add("P31", "P", "M-ENT-2")
def _distance() -> Numbers:
    """printed: entropy is the distance to uniform
    right: log n minus entropy is
    quantity: KL(p || uniform) of a row of 9
    """
    p = softmax(2 * randn(9))
    return entropy_of(p), log(9) - entropy_of(p), kl(p, uniform(9))


@book.add("P34", "P", "M-INF-7")
def _spread_values() -> Numbers:
    """printed: high entropy keeps more information about the values
    right: spreading transmits less: log(1 + |p|^2 / noise) / 2
    quantity: information of a uniform row of 64, noise 0.1, by determinants (printed: of a one-hot row, or more)
    """
    p, cov = uniform(64), torch.eye(65, dtype=F64)
    cov[0, 0] = p.square().sum() + 0.1
    cov[0, 1:] = cov[1:, 0] = p
    measured = 0.5 * (cov[0, 0].log() - torch.logdet(cov))
    hot = information.attention_information(one_above(64, 1.0), 1.0, 0.1)
    return hot, information.attention_information(p, 1.0, 0.1), measured


@book.add("(48)", "N", "M-GEO-3", tolerance=1e-4)
def _length() -> Numbers:
    """printed: the Fisher metric in coordinates p, unnamed
    right: any coordinates give sum d^2 / p on tangent vectors
    quantity: squared length of (.1, -.05, -.05) at (.5, .3, .2), from the divergence (printed: Euclidean)
    """
    p, d = vector(0.5, 0.3, 0.2), vector(0.1, -0.05, -0.05)
    return d @ d, geometry.fisher_quadratic_form(p, d), _divergence_length(p, d, 1e-3)


def _case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return 2 * randn(8, seed=seed), randn(8, 2, seed=seed + 500), randn(2, seed=seed + 900)


@book.add("(57)", "N", "M-ROB-9")
def _unnamed_norm() -> Numbers:
    """printed: |d| <= eps, the norm unnamed, solved by a sign vector
    right: in l2 the optimum is the top singular vector
    quantity: first-order gain per unit of l2 budget (printed: of the sign vector of that length)
    """
    s, v, _ = _case(0)
    jac, best = robustness.output_sensitivity(s, v), robustness.attack_l2(s, v, 1.0)
    sign = best.perturbation.sign() / 8**0.5
    return (sign @ jac).norm(), best.predicted, torch.linalg.matrix_norm(jac, 2)


@book.add("(62)", "W", "M-ROB-10")
def _sign_rule() -> Numbers:
    """printed: d = eps sign<v_i - out, u> maximises the change
    right: to first order only; exactly, the threshold is the final value
    quantity: mean gain at eps = 1.5 over 40 cases, best of 2^8 sign patterns
    """
    patterns = torch.tensor(list(product((-1.0, 1.0), repeat=8)), dtype=F64)
    gains = []
    for s, v, u in map(_case, range(40)):
        c = v @ (u / u.norm())
        best = (softmax(s + 1.5 * patterns) @ c).max() - softmax(s) @ c
        attacks = (robustness.attack_linf, robustness.attack_linf_exact)
        gains.append(torch.stack([*(attack(s, v, u, 1.5).achieved for attack in attacks), best]))
    printed, right, measured = torch.stack(gains).mean(0)
    return printed, right, measured


@book.add("(67)", "C", "M-SCL-13", tolerance=0.15)
def _unscaled() -> Numbers:
    """printed: unscaled scores, d -> infinity: H -> 0
    right: n fixed and d >> 2 log n; below, H = log n - d / 2
    quantity: entropy of 10^4 unscaled scores at d = 4
    """
    # Given the query the scores are normal of variance |q|^2, whose mean is d; the sharpness is held at sqrt(d).
    return 0.0, sharpness.gaussian_entropy(1e4, 2.0), mean_entropy(randn(200, 10_000), 2.0)


@book.add("(71)", "C", "M-INF-6")
def _identical() -> Numbers:
    """printed: entropy of all heads = sum of their entropies
    right: an upper bound, equality for independent draws
    quantity: joint entropy of two identical heads
    """
    p = softmax(randn(6))
    return 2 * entropy_of(p), entropy_of(p), entropy_of(torch.diag(p).flatten())


@book.add("(72)", "W", "M-SPE-3")
def _eigenvalues() -> Numbers:
    """printed: H = -sum e log e over the eigenvalues of A
    right: rho = A^T A / tr: von Neumann's entropy, which is not the row entropy
    quantity: -tr rho log rho of a random 16 x 16 matrix (printed: real part of the eigenvalue sum)
    """
    a = softmax(2 * randn(16, 16))
    rho = a.T @ a / (a.T @ a).trace()
    measured = torch.special.entr(torch.linalg.eigvalsh(rho).clamp(min=0)).sum()
    return spectrum.eigenvalue_entropy(a).real, spectrum.von_neumann_entropy(a), measured


@book.add("(73)", "W", "M-SPE-2")
def _rank() -> Numbers:
    """printed: effective rank = exp(H)
    right: exp(H) is the width of a row; rank comes from singular values
    quantity: effective rank of the uniform 16 x 16 matrix
    """
    a = uniform(16).expand(16, 16)
    return entropy_of(a).exp().mean(), spectrum.effective_rank(a), torch.linalg.matrix_rank(a)


@book.add("(74)", "N", "M-ATT-10")
def _insertion() -> Numbers:
    """printed: positions are added to q and k
    right: to the embedding, before the projections
    quantity: score of two tokens of a model that embeds positions
    """
    x, y, p = randn(8), randn(8, seed=1), layer.sinusoidal_positions(10, 8)
    wq, wk = randn(8, 8, seed=2) / 8**0.5, randn(8, 8, seed=3) / 8**0.5
    after = (x @ wq + p[2]) @ (y @ wk + p[7])
    before = ((x + p[2]) @ wq) @ ((y + p[7]) @ wk)
    measured = torch.einsum("i,ij,kj,k->", x + p[2], wq, wk, y + p[7])
    return after, before, measured


@book.add("(76)", "W", "M-INF-5", tolerance=0.01)
def _penalty() -> Numbers:
    """printed: adding +H to the loss encourages high entropy
    right: it lowers H; -H raises it
    quantity: entropy of 10 logits after descending +H (printed: log 10)
    """
    z = randn(10)
    for _ in range(2000):
        z = z - 0.5 * information.entropy_penalty_gradient(z, -1.0)
    return log(10), 0.0, entropy(z)


@book.add("(77)", "W", "M-ATT-5")
def _neighbours() -> Numbers:
    """printed: p_i = e^{s_i} / sum_N, for every neighbour j
    right: p_ij = e^{s_ij} / sum_{l in N(i)} e^{s_il}
    quantity: sum of the weights of three neighbours
    """
    s = vector(1, 0, -1)
    return 3 * s[0].exp() / s.exp().sum(), 1.0, softmax(s).sum()


@book.add("(78)", "C", "M-ATT-12")
def _all_neighbours() -> Numbers:
    """printed: log card N(i) < log n
    right: <=: equal when everything is a neighbour
    quantity: log n minus the largest entropy of a row that sees all 7 keys (printed: positive, read as log 7/6)
    """
    return log(7 / 6), 0.0, log(7) - float(entropy(torch.zeros(7, dtype=F64)))


@book.add("P32", "P", "M-ROB-11")
def _vulnerable() -> Numbers:
    """printed: uniform attention is the most vulnerable
    right: under l2 budgets it is the least: |J|_2 = 1/n
    quantity: |J|_2 of the uniform row of 64 (printed: at least that of a tie)
    """
    return 0.5, 1 / 64, geometry.jacobian_norms(uniform(64)).two_two


@book.add("P35", "P", "M-INF-6")
def _diversity() -> Numbers:
    """printed: diversity of heads = spread of their entropies
    right: Jensen-Shannon divergence
    quantity: mean divergence of two one-hot heads on different keys from their mean (printed: spread of entropies)
    """
    heads = torch.eye(2, dtype=F64)
    spread = entropy_of(heads)
    return spread.max() - spread.min(), geometry.jensen_shannon(heads), kl(heads, heads.mean(0)).mean()


@book.add("P36", "P", "M-SPE-1")
def _packed() -> Numbers:
    """printed: all other eigenvalues lie strictly inside the disc
    right: for positive matrices; a packed mask repeats eigenvalue 1
    quantity: number of eigenvalues 1 of two packed sequences
    """
    a = torch.block_diag(softmax(randn(5, 5)), softmax(randn(6, 6, seed=1)))
    return 1.0, 2.0, ((torch.linalg.eigvals(a) - 1).abs() < 1e-9).sum()


@book.add("P37", "P", "M-ATT-10", tolerance=0.03)
def _random_positions() -> Numbers:
    """printed: random positions raise entropy
    right: they add variance and lower it by 1/2 for variance 1
    quantity: change of the mean entropy of 1024 scores (printed: not negative)
    """
    s, extra = randn(300, 1024), randn(300, 1024, seed=1)
    return 0.0, -0.5, mean_entropy(s + extra) - mean_entropy(s)


@book.add("P38", "P", "M-ATT-9")
def _bias_sign() -> Numbers:
    """printed: a relative bias lowers entropy
    right: it depends: one that cancels the content raises H to log n
    quantity: entropy of 64 keys whose content is minus the bias (printed: as without the bias, or less)
    """
    bias = layer.distance_bias(1, 64, 0.05)[0]
    return entropy(-bias), log(64), entropy(-bias + bias)


@book.add("P39", "P", "M-LOSS-9")
def _smoothing() -> Numbers:
    """printed: label smoothing is entropy regularisation: KL(p || u)
    right: it is KL(u || p)
    quantity: what smoothing adds per epsilon at p = (.9, .09, .01): mean -log p minus log 3
    """
    p, u = vector(0.9, 0.09, 0.01), uniform(3)
    return kl(p, u), kl(u, p), -p.log().mean() - log(3)


@book.add("P40", "P", "M-SPA-3", tolerance=5e-3)
def _gumbel() -> Numbers:
    """printed: Gumbel-softmax samples follow softmax
    right: their argmax does; the mean sample at temperature 1 is 0.569, not 0.665
    quantity: mean of the first component for logits (2, 1, 0)
    """
    z = vector(2, 1, 0)
    y = selection.gumbel_softmax(z, 1.0, selection.gumbel_noise(100_000, 3, generator=generator()))
    return softmax(z)[0], 0.569, y.mean(0)[0]
