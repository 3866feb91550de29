"""Errata of the same document: noise-contrastive estimation, and softmax as an information quantity."""

from __future__ import annotations

from math import log

import torch

from partita.theory.contrast import nce_population_gradient, nce_population_loss
from partita.theory.geometry import cross_entropy_decomposition, hinge_mass, kl, simplex_projection, soft_cross_entropy
from partita_studies.errata._samples import F64, randn
from partita_studies.errata.row import Book, Reading

__all__ = ["book"]

book = Book("contrast")


def _laws() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(randn(6), -1), torch.softmax(randn(6, seed=1), -1)


@book.add(
    "P1",
    "P",
    printed="NCE needs k -> infinity for its guarantee",
    right="consistent for every k > 0: the gradient at m = P is 0",
    spec="M-NCE-4",
    quantity="largest gradient at the true law for k = 1/2 (printed: the distance of that k from the limit)",
)
def _consistent() -> Reading:
    p, q = _laws()
    f = p.log().requires_grad_()
    nce_population_loss(f, p, q, 0.5).backward()
    assert f.grad is not None
    wrong = nce_population_gradient(p.log() + 0.1, p, q, 0.5) - nce_population_gradient(p.log() + 0.1, p, q, 1e9)
    return Reading(float(wrong.abs().max()), 0.0, float(f.grad.abs().max()))


@book.add(
    "P2",
    "P",
    printed="as k grows the NCE loss tends to KL(P || m)",
    right="its gradient does; the value is log k + sum P log(p_n / m) + sum m",
    spec="M-NCE-4",
    quantity="population loss at k = 10^6",
    tolerance=1e-4,
)
def _diverges() -> Reading:
    p, q = _laws()
    f = torch.log_softmax(randn(6, seed=2), -1)
    value = log(1e6) + (p * (q.log() - f)).sum() + f.exp().sum()
    return Reading(float(kl(p, f.exp())), float(value), float(nce_population_loss(f, p, q, 1e6)))


@book.add(
    "P10",
    "P",
    printed="softmax is a projection onto the simplex",
    right="it is not idempotent; the projection is sparsemax",
    spec="M-GIB-8",
    quantity="first weight after softmax of (.7, .2, .1)",
    tolerance=5e-4,
)
def _projection() -> Reading:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=F64)
    return Reading(float(simplex_projection(p)[0]), 0.464, float(torch.softmax(p, -1)[0]))


@book.add(
    "P13",
    "P",
    printed="softmax with cross entropy approximates a KL",
    right="CE = H(y) + KL(y || p), exactly",
    spec="M-GIB-6",
    quantity="cross entropy of a soft target",
)
def _exact() -> Reading:
    z, y = randn(5), torch.softmax(randn(5, seed=1), -1)
    floor, fault = cross_entropy_decomposition(z, y)
    return Reading(float(fault), float(floor + fault), float(soft_cross_entropy(z, y)))


@book.add(
    "P14",
    "P",
    printed="every loss is an information quantity",
    right="hinge is no negative log-likelihood: its mass is not constant",
    spec="M-RMK-6",
    quantity="exp(-hinge) summed over both labels at margin 1 (printed: as at margin 0)",
)
def _hinge() -> Reading:
    zero, one = hinge_mass(torch.tensor([0.0, 1.0], dtype=F64))
    direct = torch.exp(torch.tensor(0.0)) + torch.exp(torch.tensor(-2.0))
    return Reading(float(zero), float(one), float(direct))
