"""Errata of the document on attention layers, equations (5.1.x)."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from partita.gibbs import Gibbs
from partita.support import causal
from partita_theory import geometry, layer, robustness, sharpness, spectrum
from partita_theory.errata._samples import F64, generator, gradient, randn, softmax, vector, weights
from partita_theory.errata.row import Book, Numbers

book = Book("attention")


@book.add("(5.1.9)", "C", "M-ATT-7")
def _order() -> Numbers:
    """printed: add the mask to the scores, then scale
    right: scale, then mask
    quantity: weight of the only visible key at scale log 1 = 0
    """
    printed = softmax(0.0 * (vector(2, 5) + vector(0, -inf)))[0]
    return printed, 1.0, weights(vector(2, 5), scale=0.0, visible=torch.tensor([True, False]))[0]


@book.add("(5.1.10)", "N", "M-ATT-5")
def _diagonal() -> Numbers:
    """printed: the mask forbids position t itself
    right: j <= i includes the diagonal; outputs are read shifted by one
    quantity: weight of the first position on itself
    """
    x = randn(4, 3)
    return 0.0, 1.0, Gibbs(x, x, support=causal()).probs()[0, 0]


@book.add("P56", "P", "M-ATT-5")
def _lower_triangular() -> Numbers:
    """printed: the causal mask of zeros and -inf is lower triangular
    right: it is -inf above the diagonal and 0 elsewhere; what is lower triangular is the pattern that is visible
    quantity: weight of the first of 4 rows on the future, equal scores (printed: zeros above the diagonal hide nothing)
    """
    rows = torch.zeros(4, 2, dtype=F64)
    printed = softmax(torch.where(torch.ones(4, 4).tril().bool(), rows @ rows.T, 0.0))
    return printed[0, 1:].sum(), 0.0, Gibbs(rows, rows, support=causal()).probs()[0, 1:].sum()


@book.add("(5.1.11)", "C", "M-ATT-5")
def _stacked() -> Numbers:
    """printed: -1e9 at padding, stacked with the causal mask
    right: booleans on key columns, joined by and
    quantity: mass on forbidden keys where a row has none that is visible
    """
    printed = softmax(vector(-1e9, -2e9, -1e9)).sum()
    return printed, 0.0, weights(randn(3), visible=torch.zeros(3, dtype=torch.bool)).sum()


@book.add("P20", "P", "M-GIB-2")
def _shift() -> Numbers:
    """printed: adding a large constant makes softmax one-hot
    right: it changes nothing; multiplying does
    quantity: largest of five weights after adding 50
    """
    s = 0.5 * randn(5)
    return 1.0, softmax(s).max(), softmax(s + 50).max()


@book.add("P21", "P", "M-DER-1", tolerance=1e-9)
def _too_large() -> Numbers:
    """printed: without scaling gradients of softmax get too large
    right: |J|_2 <= 1/2 whatever the scores; large ones make it small
    quantity: largest |J|_2 over 2000 rows of scores from 0.1 to 100 in size, a tie among them (printed: the size)
    """
    scores = torch.logspace(-1, 2, 2000, dtype=F64)[:, None] * randn(2000, 5)
    scores[-1] = vector(100, 100, -200, -200, -200)
    return 100.0, 0.5, geometry.jacobian_norms(softmax(scores)).two_two.max()


@book.add("P22", "P", "M-SCL-1", tolerance=0.6)
def _one_row() -> Numbers:
    """printed: softmax sees Var(q . k) = d sd_q^2 sd_k^2
    right: one row sees |q|^2 sd_k^2
    quantity: variance of one query's scores over 200 000 keys, d = 16
    """
    q = 1.5 * randn(16, seed=3)
    return sharpness.score_variance(16), sharpness.row_score_variance(q), (randn(200_000, 16, seed=4) @ q).var()


@book.add("P23", "P", "M-ATT-6")
def _finite_mask() -> Numbers:
    """printed: -1e9 will do for -inf
    right: a row without keys has weight 0 everywhere
    quantity: weight of each of three forbidden keys
    """
    printed = softmax(torch.full((3,), -1e9) + randn(3).float())[0]
    return printed, 0.0, weights(randn(3), visible=torch.zeros(3, dtype=torch.bool))[0]


@book.add("P24", "P", "M-RMK-3")
def _svd_order() -> Numbers:
    """printed: x W: V^T first, then the stretch, then U
    right: rows meet U, then the stretch, then V^T
    quantity: first entry of x W
    """
    x, w = randn(4), randn(4, 4, seed=1)
    f = spectrum.row_svd(w)
    return (((x @ f.back) * f.stretch) @ f.rotate)[0], (((x @ f.rotate) * f.stretch) @ f.back)[0], (x @ w)[0]


@book.add("P25", "P", "M-INF-4", tolerance=0.1)
def _xavier() -> Numbers:
    """printed: Xavier initialisation keeps the variance
    right: it multiplies it by 2 d_in / (d_in + d_out)
    quantity: variance after a projection 512 -> 64 of unit-variance inputs
    """
    w = torch.nn.init.xavier_normal_(torch.empty(512, 64, dtype=F64), generator=generator(1))
    return 1.0, spectrum.xavier_gain(512, 64), (randn(500, 512) @ w).var()


@book.add("P26", "P", "M-DER-7", tolerance=0.04)
def _any_length() -> Numbers:
    """printed: with 1/sqrt(d) gradients are stable for any length
    right: |d out / d s| falls like n^-1/2
    quantity: sensitivity at n = 4096 over that at n = 64
    """

    def size(n: int) -> Tensor:
        norms = [robustness.output_sensitivity_norm(randn(n, seed=t), randn(n, 1, seed=t + 99)) for t in range(30)]
        return torch.stack(norms).mean()

    return 1.0, (64 / 4096) ** 0.5, size(4096) / size(64)


@book.add("P27", "P", "M-DER-6")
def _projection_gradient() -> Numbers:
    """printed: d Q / d W_Q = X^T in a chain of products
    right: d L / d W_Q = X^T (d L / d Q)
    quantity: first entry of the gradient of W_Q (printed: of X^T)
    """
    x, w, k, v = randn(5, 6), randn(6, 3, seed=1), randn(7, 3, seed=2), randn(7, 2, seed=3)
    g = gradient(lambda u: scaled_dot_product_attention(x @ u, k, v, scale=1.0).sum(), w)
    dq = layer.attention_backward(x @ w, k, v, torch.ones(5, 2, dtype=F64)).query
    return x.T[0, 0], layer.projection_gradients(x, dq)[0, 0], g[0, 0]


@book.add("P28", "P", "M-ATT-2")
def _rank() -> Numbers:
    """printed: a highly non-linear match
    right: bilinear, of rank at most d
    quantity: rank of the match of a head of dim 4 in a model of dim 32
    """
    return 32.0, 4.0, torch.linalg.matrix_rank(spectrum.match_form(randn(32, 4), randn(32, 4, seed=1)))


@book.add("P29", "P", "M-ATT-13")
def _cost() -> Numbers:
    """printed: total cost O(n^2 d)
    right: projections dominate for n < 2 d_model
    quantity: multiply-adds in millions at n = d_model = 512, summed over six products
    """
    cost = layer.attention_cost(512, 512, 8)
    shapes = [(512, 512, 512)] * 4 + [(8 * 512, 64, 512), (8 * 512, 512, 64)]
    counted = sum(a * b * c for a, b, c in shapes)
    return cost.attention / 1e6, (cost.attention + cost.projections) / 1e6, counted / 1e6
