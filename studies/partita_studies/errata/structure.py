"""Errata of the same document: equations (57) to (80), adversaries, heads, spectra, selection."""

from __future__ import annotations

from itertools import product
from math import log

import torch

from partita.theory.geometry import jacobian_norms, jensen_shannon, kl
from partita.theory.information import entropy, entropy_of, entropy_penalty_gradient
from partita.theory.layer import distance_bias, sinusoidal_positions
from partita.theory.robustness import attack_l2, attack_linf, attack_linf_exact, output_sensitivity
from partita.theory.selection import gumbel_noise, gumbel_softmax
from partita.theory.sharpness import gaussian_entropy
from partita.theory.spectrum import effective_rank, eigenvalue_entropy, von_neumann_entropy
from partita_studies.errata._samples import F64, generator, mean_entropy, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("noise")


def _case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return 2 * randn(8, seed=seed), randn(8, 2, seed=seed + 500), randn(2, seed=seed + 900)


@book.add(
    "(57)",
    "N",
    printed="|d| <= eps, the norm unnamed, solved by a sign vector",
    right="in l2 the optimum is the top singular vector",
    spec="M-ROB-9",
    quantity="first-order gain per unit of l2 budget (printed: of the sign vector of that length)",
)
def _unnamed_norm() -> Reading:
    s, v, _ = _case(0)
    jac = output_sensitivity(s, v)
    best = attack_l2(s, v, 1.0)
    sign = best.perturbation.sign() / 8**0.5
    return Reading(float((sign @ jac).norm()), float(best.predicted), float(torch.linalg.matrix_norm(jac, 2)))


@book.add(
    "(62)",
    "W",
    printed="d = eps sign<v_i - out, u> maximises the change",
    right="to first order only; exactly, the threshold is the final value",
    spec="M-ROB-10",
    quantity="mean gain at eps = 1.5 over 40 cases, best of 2^8 sign patterns",
)
def _sign_rule() -> Reading:
    patterns = torch.tensor(list(product((-1.0, 1.0), repeat=8)), dtype=F64)
    printed = right = measured = 0.0
    for seed in range(40):
        s, v, u = _case(seed)
        c = v @ (u / u.norm())
        printed += float(attack_linf(s, v, u, 1.5).achieved) / 40
        right += float(attack_linf_exact(s, v, u, 1.5).achieved) / 40
        measured += float((torch.softmax(s + 1.5 * patterns, -1) @ c).max() - torch.softmax(s, -1) @ c) / 40
    return Reading(printed, right, measured)


@book.add(
    "(67)",
    "C",
    printed="unscaled scores, d -> infinity: H -> 0",
    right="n fixed and d >> 2 log n; below, H = log n - d / 2",
    spec="M-SCL-13",
    quantity="entropy of 10^4 unscaled scores at d = 4",
    tolerance=0.15,
)
def _unscaled() -> Reading:
    # Given the query the scores are normal of variance |q|^2, whose mean is d; the sharpness is held at sqrt(d).
    return Reading(0.0, float(gaussian_entropy(1e4, 2.0)), mean_entropy(randn(200, 10_000), 2.0))


@book.add(
    "(71)",
    "C",
    printed="entropy of all heads = sum of their entropies",
    right="an upper bound, equality for independent draws",
    spec="M-INF-6",
    quantity="joint entropy of two identical heads",
)
def _identical() -> Reading:
    p = torch.softmax(randn(6), -1)
    h = float(entropy_of(p))
    return Reading(2 * h, h, float(entropy_of(torch.diag(p).flatten())))


@book.add(
    "(72)",
    "W",
    printed="H = -sum e log e over the eigenvalues of A",
    right="rho = A^T A / tr: von Neumann's entropy, which is not the row entropy",
    spec="M-SPE-3",
    quantity="-tr rho log rho of a random 16 x 16 matrix (printed: real part of the eigenvalue sum)",
)
def _eigenvalues() -> Reading:
    a = torch.softmax(2 * randn(16, 16), -1)
    rho = a.T @ a / (a.T @ a).trace()
    e = torch.linalg.eigvalsh(rho).clamp(min=1e-300)
    printed = eigenvalue_entropy(a).real
    return Reading(float(printed), float(von_neumann_entropy(a)), float(-(e * e.log()).sum()))


@book.add(
    "(73)",
    "W",
    printed="effective rank = exp(H)",
    right="exp(H) is the width of a row; rank comes from singular values",
    spec="M-SPE-2",
    quantity="effective rank of the uniform 16 x 16 matrix",
)
def _rank() -> Reading:
    a = torch.full((16, 16), 1 / 16, dtype=F64)
    return Reading(float(entropy_of(a).exp().mean()), float(effective_rank(a)), float(torch.linalg.matrix_rank(a)))


@book.add(
    "(74)",
    "N",
    printed="positions are added to q and k",
    right="to the embedding, before the projections",
    spec="M-ATT-10",
    quantity="score of two tokens of a model that embeds positions",
)
def _insertion() -> Reading:
    x, y, p = randn(8), randn(8, seed=1), sinusoidal_positions(10, 8)
    wq, wk = randn(8, 8, seed=2) / 8**0.5, randn(8, 8, seed=3) / 8**0.5
    after = (x @ wq + p[2]) @ (y @ wk + p[7])
    before = ((x + p[2]) @ wq) @ ((y + p[7]) @ wk)
    measured = torch.einsum("i,ij,kj,k->", x + p[2], wq, wk, y + p[7])
    return Reading(float(after), float(before), float(measured))


@book.add(
    "(76)",
    "W",
    printed="adding +H to the loss encourages high entropy",
    right="it lowers H; -H raises it",
    spec="M-INF-5",
    quantity="entropy of 10 logits after descending +H (printed: log 10)",
    tolerance=0.01,
)
def _penalty() -> Reading:
    z = randn(10)
    for _ in range(2000):
        z = z - 0.5 * entropy_penalty_gradient(z, -1.0)
    return Reading(log(10), 0.0, float(entropy(z)))


@book.add(
    "(77)",
    "W",
    printed="p_i = e^{s_i} / sum_N, for every neighbour j",
    right="p_ij = e^{s_ij} / sum_{l in N(i)} e^{s_il}",
    spec="M-ATT-5",
    quantity="sum of the weights of three neighbours",
)
def _neighbours() -> Reading:
    s = torch.tensor([1.0, 0.0, -1.0], dtype=F64)
    return Reading(float(3 * s[0].exp() / s.exp().sum()), 1.0, float(torch.softmax(s, -1).sum()))


@book.add(
    "(78)",
    "C",
    printed="log card N(i) < log n",
    right="<=: equal when everything is a neighbour",
    spec="M-ATT-12",
    quantity="log n minus the largest entropy of a row that sees all 7 keys (printed: positive, read as log 7/6)",
)
def _all_neighbours() -> Reading:
    return Reading(log(7 / 6), 0.0, log(7) - float(entropy(torch.zeros(7, dtype=F64))))


@book.add(
    "P32",
    "P",
    printed="uniform attention is the most vulnerable",
    right="under l2 budgets it is the least: |J|_2 = 1/n",
    spec="M-ROB-11",
    quantity="|J|_2 of the uniform row of 64 (printed: at least that of a tie)",
)
def _vulnerable() -> Reading:
    uniform = torch.full((64,), 1 / 64, dtype=F64)
    return Reading(0.5, 1 / 64, float(jacobian_norms(uniform).two_two))


@book.add(
    "P35",
    "P",
    printed="diversity of heads = spread of their entropies",
    right="Jensen-Shannon divergence",
    spec="M-INF-6",
    quantity="mean divergence of two one-hot heads on different keys from their mean (printed: spread of entropies)",
)
def _diversity() -> Reading:
    heads = torch.eye(2, dtype=F64)
    measured = torch.stack([kl(h, heads.mean(0)) for h in heads]).mean()
    spread = entropy_of(heads)
    return Reading(float(spread.max() - spread.min()), float(jensen_shannon(heads)), float(measured))


@book.add(
    "P36",
    "P",
    printed="all other eigenvalues lie strictly inside the disc",
    right="for positive matrices; a packed mask repeats eigenvalue 1",
    spec="M-SPE-1",
    quantity="number of eigenvalues 1 of two packed sequences",
)
def _packed() -> Reading:
    a = torch.block_diag(torch.softmax(randn(5, 5), -1), torch.softmax(randn(6, 6, seed=1), -1))
    return Reading(1.0, 2.0, float(((torch.linalg.eigvals(a) - 1).abs() < 1e-9).sum()))


@book.add(
    "P37",
    "P",
    printed="random positions raise entropy",
    right="they add variance and lower it by 1/2 for variance 1",
    spec="M-ATT-10",
    quantity="change of the mean entropy of 1024 scores (printed: not negative)",
    tolerance=0.03,
)
def _random_positions() -> Reading:
    s, extra = randn(300, 1024), randn(300, 1024, seed=1)
    return Reading(0.0, -0.5, mean_entropy(s + extra) - mean_entropy(s))


@book.add(
    "P38",
    "P",
    printed="a relative bias lowers entropy",
    right="it depends: one that cancels the content raises H to log n",
    spec="M-ATT-9",
    quantity="entropy of 64 keys whose content is minus the bias (printed: as without the bias, or less)",
)
def _bias_sign() -> Reading:
    bias = distance_bias(1, 64, 0.05)[0]
    return Reading(float(entropy(-bias)), log(64), float(entropy(-bias + bias)))


@book.add(
    "P39",
    "P",
    printed="label smoothing is entropy regularisation: KL(p || u)",
    right="it is KL(u || p)",
    spec="M-LOSS-9",
    quantity="what smoothing adds per epsilon at p = (.9, .09, .01): mean -log p minus log 3",
)
def _smoothing() -> Reading:
    p, u = torch.tensor([0.9, 0.09, 0.01], dtype=F64), torch.full((3,), 1 / 3, dtype=F64)
    return Reading(float(kl(p, u)), float(kl(u, p)), float(-p.log().mean()) - log(3))


@book.add(
    "P40",
    "P",
    printed="Gumbel-softmax samples follow softmax",
    right="their argmax does; the mean sample at temperature 1 is 0.569, not 0.665",
    spec="M-SPA-3",
    quantity="mean of the first component for logits (2, 1, 0)",
    tolerance=5e-3,
)
def _gumbel() -> Reading:
    z = torch.tensor([2.0, 1.0, 0.0], dtype=F64)
    y = gumbel_softmax(z, 1.0, gumbel_noise(100_000, 3, generator=generator()))
    return Reading(float(torch.softmax(z, -1)[0]), 0.569, float(y.mean(0)[0]))
