"""Errata of the printed program: an attention module with scale log n / d."""

from __future__ import annotations

from math import log, nan

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.support import mask
from partita.theory.information import streaming_entropy
from partita.theory.sharpness import calibrate_kappa
from partita_studies.errata._samples import F64, generator, gradient, mean_entropy, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("code")


@book.add(
    "K1",
    "K",
    printed="reshapes keys and values with the length of the queries",
    right="each tensor by its own length",
    spec="M-ATT-11",
    quantity="rows of the output for 5 queries and 7 keys (printed: the reshape fails)",
)
def _lengths() -> Reading:
    k = randn(2, 7, 8)
    try:
        printed = float(k.view(2, 5, 2, 4).shape[1])
    except RuntimeError:
        printed = nan
    out = Gibbs(randn(2, 5, 8, seed=1), k).expectation(k)
    return Reading(printed, 5.0, float(out.shape[1]))


@book.add(
    "K2",
    "K",
    printed="the scale counts queries",
    right="it counts the keys a row sees",
    spec="M-SCL-6",
    quantity="log of the number of keys seen, 4 queries and 32 keys",
)
def _queries() -> Reading:
    p = Gibbs(randn(4, 3), randn(32, 3, seed=1))
    return Reading(log(4), log(32), float(p.visible()[0].log()))


@book.add(
    "K3",
    "K",
    printed="the scale ignores the mask",
    right="n_i from the mask",
    spec="M-SCL-5",
    quantity="log n of row 2 of a causal row of length 1024",
)
def _ignores_mask() -> Reading:
    keep = torch.ones(1024, 1024, dtype=torch.bool).tril()[1:2]
    p = Gibbs(randn(1, 3), randn(1024, 3, seed=1), support=mask(keep))
    return Reading(log(1024), log(2), float(p.visible()[0].log()))


@book.add(
    "K4",
    "K",
    printed="fills with -1e9 in half precision",
    right="boolean masking, sums in float32",
    spec="M-ATT-8",
    quantity="weight of the only visible of two keys in float16 (printed: the fill overflows)",
)
def _half() -> Reading:
    s = torch.tensor([1.0, 2.0], dtype=torch.float16)
    hidden = torch.tensor([False, True])
    try:
        printed = float(torch.softmax(s.masked_fill(hidden, -1e9).float(), -1)[0])
    except RuntimeError:
        printed = nan
    p = Gibbs(torch.ones(1, 1, dtype=torch.float16), s[:, None], support=mask(~hidden[None]))
    return Reading(printed, 1.0, float(p.probs()[0, 0]))


@book.add(
    "K5",
    "K",
    printed="a fully masked row becomes uniform over forbidden keys",
    right="a row of zeros",
    spec="M-ATT-6",
    quantity="weight of each of four forbidden keys",
)
def _masked_row() -> Reading:
    printed = torch.softmax(randn(4).masked_fill(torch.ones(4, dtype=torch.bool), -1e9), -1)[0]
    p = Gibbs(randn(1, 2), randn(4, 2), support=mask(torch.zeros(1, 4, dtype=torch.bool)))
    return Reading(float(printed), 0.0, float(p.probs()[0, 0]))


@book.add(
    "K6",
    "K",
    printed="a (batch, query, key) mask meets (batch, head, query, key) scores",
    right="the mask gains a head axis",
    spec="M-ATT-5",
    quantity="mass of item 0 on its padding, batch 2, heads 2",
)
def _head_axis() -> Reading:
    q, k = randn(2, 2, 3, 4), randn(2, 2, 3, 4, seed=1)
    keep = torch.tensor([[True, False, False], [True, True, True]])[:, None, :].expand(2, 3, 3)
    scores = q @ k.transpose(-1, -2)
    printed = torch.softmax(scores.masked_fill(~keep, -1e9), -1)  # silently read as (head, query, key)
    p = Gibbs(q, k, support=mask(keep[:, None])).probs()
    return Reading(float(printed[0, 1, :, 1:].sum(-1).mean()), 0.0, float(p[0, 1, :, 1:].sum(-1).mean()))


@book.add(
    "K7",
    "K",
    printed="the key projection has a bias",
    right="it adds one number to a whole row and does nothing",
    spec="M-ATT-2",
    quantity="entries of the key bias, of 8, that move the output (autograd)",
)
def _key_bias() -> Reading:
    x, value = randn(5, 8), randn(5, 8, seed=1)
    weights = randn(2, 8, 8, seed=2)

    def output(bias: Tensor) -> Tensor:
        # one direction of the output for each entry of the bias, so that no two effects can cancel
        out = Gibbs(x @ weights[0], x @ weights[1] + bias, scale=8**-0.5).expectation(value)
        return (out * randn(5, 8, seed=3)).sum()

    return Reading(8.0, 0.0, float((gradient(output, randn(8, seed=4)).abs() > 1e-12).sum()))


@book.add(
    "K8",
    "K",
    printed="returns the n x n weights, from which the entropy is taken",
    right="three running sums give it, whatever the number of keys",
    spec="M-ENT-3",
    quantity="entropy over 4096 keys of which no more than 64 are held at once (printed: it needs them all)",
    tolerance=1e-9,
)
def _no_matrix() -> Reading:
    q, k = randn(16), randn(4096, 16, seed=1)
    held = (100 + k[first : first + 64] @ q for first in range(0, 4096, 64))
    return Reading(nan, float(streaming_entropy(held)), float(torch.special.entr(torch.softmax(k @ q, -1)).sum()))


@book.add(
    "K9",
    "K",
    printed="kappa = 1 at head dim 64 holds entropy",
    right="it needs kappa = 2.77 (n0 = 4096); even then 0.17 is left by 2^16",
    spec="M-SCL-16",
    quantity="dH / dlog n from 2^10 to 2^14 with kappa = 1 minus that with kappa calibrated (printed: 0)",
    tolerance=0.1,
)
def _kappa() -> Reading:
    def slope(kappa: float) -> float:
        h = []
        for n in (2**10, 2**14):
            g = generator(n)
            q = torch.randn(200, 64, generator=g, dtype=F64)
            scores = q.norm(dim=-1, keepdim=True) * torch.randn(200, n, generator=g, dtype=F64)
            h.append(mean_entropy(scores, kappa * log(n) / 64))
        return (h[1] - h[0]) / log(16)

    # From the table of policies: (8.97 - 6.56 - 4.95 + 4.37) / log 16.
    return Reading(0.0, 0.66, slope(1.0) - slope(float(calibrate_kappa(4096, 64))))
