"""Errata of the document on attention layers, equations (5.1.x)."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from partita.gibbs import Gibbs
from partita.support import causal, mask
from partita.theory.geometry import jacobian_norms
from partita.theory.layer import attention_backward, attention_cost, projection_gradients
from partita.theory.robustness import output_sensitivity_norm
from partita.theory.sharpness import row_score_variance, score_variance
from partita.theory.spectrum import match_form, row_svd, xavier_gain
from partita_studies.errata._samples import F64, generator, gradient, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("attention")


@book.add(
    "(5.1.9)",
    "C",
    printed="add the mask to the scores, then scale",
    right="scale, then mask",
    spec="M-ATT-7",
    quantity="weight of the only visible key at scale log 1 = 0",
)
def _order() -> Reading:
    s = torch.tensor([2.0, 5.0], dtype=F64)
    first = torch.softmax(0.0 * (s + torch.tensor([0.0, -torch.inf], dtype=F64)), -1)[0]
    p = Gibbs(torch.ones(1, 1, dtype=F64), s[:, None], scale=0.0, support=mask(torch.tensor([[True, False]])))
    return Reading(float(first), 1.0, float(p.probs()[0, 0]))


@book.add(
    "(5.1.10)",
    "N",
    printed="the mask forbids position t itself",
    right="j <= i includes the diagonal; outputs are read shifted by one",
    spec="M-ATT-5",
    quantity="weight of the first position on itself",
)
def _diagonal() -> Reading:
    x = randn(4, 3)
    return Reading(0.0, 1.0, float(Gibbs(x, x, support=causal()).probs()[0, 0]))


@book.add(
    "(5.1.11)",
    "C",
    printed="-1e9 at padding, stacked with the causal mask",
    right="booleans on key columns, joined by and",
    spec="M-ATT-5",
    quantity="mass on forbidden keys where a row has none that is visible",
)
def _stacked() -> Reading:
    printed = torch.softmax(torch.tensor([-1e9, -2e9, -1e9], dtype=F64), -1).sum()
    p = Gibbs(torch.ones(1, 1, dtype=F64), randn(3, 1), support=mask(torch.zeros(1, 3, dtype=torch.bool)))
    return Reading(float(printed), 0.0, float(p.probs().sum()))


@book.add(
    "P20",
    "P",
    printed="adding a large constant makes softmax one-hot",
    right="it changes nothing; multiplying does",
    spec="M-GIB-2",
    quantity="largest of five weights after adding 50",
)
def _shift() -> Reading:
    s = 0.5 * randn(5)
    return Reading(1.0, float(torch.softmax(s, -1).max()), float(torch.softmax(s + 50, -1).max()))


@book.add(
    "P21",
    "P",
    printed="without scaling gradients of softmax get too large",
    right="|J|_2 <= 1/2 whatever the scores; large ones make it small",
    spec="M-DER-1",
    quantity="largest |J|_2 over 2000 rows of scores from 0.1 to 100 in size, a tie among them (printed: the size)",
    tolerance=1e-9,
)
def _too_large() -> Reading:
    size = torch.logspace(-1, 2, 2000, dtype=F64)[:, None]
    scores = size * randn(2000, 5)
    scores[-1] = torch.tensor([100.0, 100.0, -200.0, -200.0, -200.0])
    return Reading(100.0, 0.5, float(jacobian_norms(torch.softmax(scores, -1)).two_two.max()))


@book.add(
    "P22",
    "P",
    printed="softmax sees Var(q . k) = d sd_q^2 sd_k^2",
    right="one row sees |q|^2 sd_k^2",
    spec="M-SCL-1",
    quantity="variance of one query's scores over 200 000 keys, d = 16",
    tolerance=0.6,
)
def _one_row() -> Reading:
    q = 1.5 * randn(16, seed=3)
    scores = randn(200_000, 16, seed=4) @ q
    return Reading(float(score_variance(16)), float(row_score_variance(q)), float(scores.var()))


@book.add(
    "P23",
    "P",
    printed="-1e9 will do for -inf",
    right="a row without keys has weight 0 everywhere",
    spec="M-ATT-6",
    quantity="weight of each of three forbidden keys",
)
def _finite_mask() -> Reading:
    printed = torch.softmax(torch.full((3,), -1e9) + randn(3).float(), -1)[0]
    p = Gibbs(torch.ones(1, 1, dtype=F64), randn(3, 1), support=mask(torch.zeros(1, 3, dtype=torch.bool)))
    return Reading(float(printed), 0.0, float(p.probs()[0, 0]))


@book.add(
    "P24",
    "P",
    printed="x W: V^T first, then the stretch, then U",
    right="rows meet U, then the stretch, then V^T",
    spec="M-RMK-3",
    quantity="first entry of x W",
)
def _svd_order() -> Reading:
    x, w = randn(4), randn(4, 4, seed=1)
    f = row_svd(w)
    printed = ((x @ f.back) * f.stretch) @ f.rotate
    right = ((x @ f.rotate) * f.stretch) @ f.back
    return Reading(float(printed[0]), float(right[0]), float((x @ w)[0]))


@book.add(
    "P25",
    "P",
    printed="Xavier initialisation keeps the variance",
    right="it multiplies it by 2 d_in / (d_in + d_out)",
    spec="M-INF-4",
    quantity="variance after a projection 512 -> 64 of unit-variance inputs",
    tolerance=0.1,
)
def _xavier() -> Reading:
    w = torch.nn.init.xavier_normal_(torch.empty(512, 64, dtype=F64), generator=generator(1))
    return Reading(1.0, float(xavier_gain(512, 64)), float((randn(500, 512) @ w).var()))


@book.add(
    "P26",
    "P",
    printed="with 1/sqrt(d) gradients are stable for any length",
    right="|d out / d s| falls like n^-1/2",
    spec="M-DER-7",
    quantity="sensitivity at n = 4096 over that at n = 64",
    tolerance=0.04,
)
def _any_length() -> Reading:
    def size(n: int) -> float:
        norms = [output_sensitivity_norm(randn(n, seed=t), randn(n, 1, seed=t + 99)) for t in range(30)]
        return float(torch.stack(norms).mean())

    return Reading(1.0, (64 / 4096) ** 0.5, size(4096) / size(64))


@book.add(
    "P27",
    "P",
    printed="d Q / d W_Q = X^T in a chain of products",
    right="d L / d W_Q = X^T (d L / d Q)",
    spec="M-DER-6",
    quantity="first entry of the gradient of W_Q (printed: of X^T)",
)
def _projection_gradient() -> Reading:
    x, w, k, v = randn(5, 6), randn(6, 3, seed=1), randn(7, 3, seed=2), randn(7, 2, seed=3)
    g = gradient(lambda u: scaled_dot_product_attention(x @ u, k, v, scale=1.0).sum(), w)
    dq = attention_backward(x @ w, k, v, torch.ones(5, 2, dtype=F64)).query
    return Reading(float(x.T[0, 0]), float(projection_gradients(x, dq)[0, 0]), float(g[0, 0]))


@book.add(
    "P28",
    "P",
    printed="a highly non-linear match",
    right="bilinear, of rank at most d",
    spec="M-ATT-2",
    quantity="rank of the match of a head of dim 4 in a model of dim 32",
)
def _rank() -> Reading:
    form = match_form(randn(32, 4), randn(32, 4, seed=1))
    return Reading(32.0, 4.0, float(torch.linalg.matrix_rank(form)))


@book.add(
    "P29",
    "P",
    printed="total cost O(n^2 d)",
    right="projections dominate for n < 2 d_model",
    spec="M-ATT-13",
    quantity="multiply-adds in millions at n = d_model = 512, summed over six products",
)
def _cost() -> Reading:
    cost = attention_cost(512, 512, 8)
    shapes = [(512, 512, 512)] * 4 + [(8 * 512, 64, 512), (8 * 512, 512, 64)]
    counted = sum(a * b * c for a, b, c in shapes)
    return Reading(cost.attention / 1e6, (cost.attention + cost.projections) / 1e6, counted / 1e6)
