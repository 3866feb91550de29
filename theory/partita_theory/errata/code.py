"""Errata of the printed program: an attention module with scale log n / d."""

from __future__ import annotations

from math import log, nan

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.support import mask
from partita_theory import information, sharpness
from partita_theory._domain import Number
from partita_theory.errata._samples import gradient, query_slope, randn, softmax, weights
from partita_theory.errata.row import Book, Numbers

book = Book("code")


@book.add("K1", "K", "M-ATT-11")
def _lengths() -> Numbers:
    """printed: reshapes keys and values with the length of the queries
    right: each tensor by its own length
    quantity: rows of the output for 5 queries and 7 keys (printed: the reshape fails)
    """
    k = randn(2, 7, 8)
    try:
        printed = float(k.view(2, 5, 2, 4).shape[1])
    except RuntimeError:
        printed = nan
    out = Gibbs(randn(2, 5, 8, seed=1), k).expectation(k)
    return printed, 5.0, out.shape[1]


@book.add("K2", "K", "M-SCL-6")
def _queries() -> Numbers:
    """printed: the scale counts queries
    right: it counts the keys a row sees
    quantity: log of the number of keys seen, 4 queries and 32 keys
    """
    return log(4), log(32), Gibbs(randn(4, 3), randn(32, 3, seed=1)).visible()[0].log()


@book.add("K3", "K", "M-SCL-5")
def _ignores_mask() -> Numbers:
    """printed: the scale ignores the mask
    right: n_i from the mask
    quantity: log n of row 2 of a causal row of length 1024
    """
    keep = torch.ones(1024, 1024, dtype=torch.bool).tril()[1:2]
    p = Gibbs(randn(1, 3), randn(1024, 3, seed=1), support=mask(keep))
    return log(1024), log(2), p.visible()[0].log()


@book.add("K4", "K", "M-ATT-8")
def _half() -> Numbers:
    """printed: fills with -1e9 in half precision
    right: boolean masking, sums in float32
    quantity: weight of the only visible of two keys in float16 (printed: the fill overflows)
    """
    s, visible = torch.tensor([1.0, 2.0], dtype=torch.float16), torch.tensor([True, False])
    try:
        printed = float(softmax(s.masked_fill(~visible, -1e9).float())[0])
    except RuntimeError:
        printed = nan
    return printed, 1.0, weights(s, visible=visible)[0]


@book.add("K5", "K", "M-ATT-6")
def _masked_row() -> Numbers:
    """printed: a fully masked row becomes uniform over forbidden keys
    right: a row of zeros
    quantity: weight of each of four forbidden keys
    """
    hidden = torch.ones(4, dtype=torch.bool)
    return softmax(randn(4).masked_fill(hidden, -1e9))[0], 0.0, weights(randn(4), visible=~hidden)[0]


@book.add("K6", "K", "M-ATT-5")
def _head_axis() -> Numbers:
    """printed: a (batch, query, key) mask meets (batch, head, query, key) scores
    right: the mask gains a head axis
    quantity: mass of item 0 on its padding, batch 2, heads 2
    """
    q, k = randn(2, 2, 3, 4), randn(2, 2, 3, 4, seed=1)
    keep = torch.tensor([[True, False, False], [True, True, True]])[:, None, :].expand(2, 3, 3)
    printed = softmax((q @ k.mT).masked_fill(~keep, -1e9))  # silently read as (head, query, key)
    p = Gibbs(q, k, support=mask(keep[:, None])).probs()
    return printed[0, 1, :, 1:].sum(-1).mean(), 0.0, p[0, 1, :, 1:].sum(-1).mean()


@book.add("K7", "K", "M-ATT-2")
def _key_bias() -> Numbers:
    """printed: the key projection has a bias
    right: it adds one number to a whole row and does nothing
    quantity: entries of the key bias, of 8, that move the output (autograd)
    """
    x, value, weight = randn(5, 8), randn(5, 8, seed=1), randn(2, 8, 8, seed=2)

    def output(bias: Tensor) -> Tensor:
        # one direction of the output for each entry of the bias, so that no two effects can cancel
        out = Gibbs(x @ weight[0], x @ weight[1] + bias, scale=8**-0.5).expectation(value)
        return (out * randn(5, 8, seed=3)).sum()

    return 8.0, 0.0, (gradient(output, randn(8, seed=4)).abs() > 1e-12).sum()


@book.add("K8", "K", "M-ENT-3", tolerance=1e-9)
def _no_matrix() -> Numbers:
    """printed: returns the n x n weights, from which the entropy is taken
    right: three running sums give it, whatever the number of keys
    quantity: entropy over 4096 keys of which no more than 64 are held at once (printed: it needs them all)
    """
    q, k = randn(16), randn(4096, 16, seed=1)
    held = (100 + k[first : first + 64] @ q for first in range(0, 4096, 64))
    return nan, information.streaming_entropy(held), torch.special.entr(softmax(k @ q)).sum()


@book.add("K9", "K", "M-SCL-16", tolerance=0.1)
def _kappa() -> Numbers:
    """printed: kappa = 1 at head dim 64 holds entropy
    right: it needs kappa = 2.77 (n0 = 4096); even then 0.17 is left by 2^16
    quantity: dH / dlog n from 2^10 to 2^14 with kappa = 1 minus that with kappa calibrated (printed: 0)
    """

    def slope(kappa: Number) -> float:
        return query_slope(lambda n: kappa * log(n) / 64, 2**10, 2**14)

    # From the table of policies: (8.97 - 6.56 - 4.95 + 4.37) / log 16.
    return 0.0, 0.66, slope(1.0) - slope(sharpness.calibrate_kappa(4096, 64))
