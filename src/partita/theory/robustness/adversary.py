"""The worst perturbation of the scores under a budget: predicted to first order, and exactly for a given direction."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require
from partita.theory.geometry.jacobian import softmax_vjp

__all__ = ["Attack", "attack_l2", "attack_linf", "attack_linf_exact", "output_sensitivity", "output_sensitivity_norm"]


class Attack(NamedTuple):
    """A perturbation, what first order promises of it, and what it does."""

    perturbation: Tensor  # (..., n)
    predicted: Tensor  # (...)
    achieved: Tensor  # (...)


def output_sensitivity(
    scores: Tensor,  # (..., n), scaled
    values: Tensor,  # (..., n, dim_value)
) -> Tensor:  # (..., n, dim_value)
    """How the output moves with each score: a key far from the output and heavy matters.

        d out / d s_i = p_i (v_i - out) = p_i (1 - p_i) (v_i - out_without_i)

    Multiply by the scale for raw scores. Spec: M-ROB-8, M-DER-7.

    >>> output_sensitivity(torch.zeros(2), torch.tensor([[0.0], [1.0]]))
    tensor([[-0.2500],
            [ 0.2500]])
    """
    p = torch.softmax(scores, -1)
    return p[..., None] * (values - p[..., None, :] @ values)


def output_sensitivity_norm(scores: Tensor, values: Tensor) -> Tensor:  # (...)
    """The largest first-order move of the output per unit of l2 perturbation of the scores.

        sigma_max of [p_i (v_i - out)]_i

    Falls like 1/sqrt(n) for rows of unit-variance scores. Spec: M-DER-7, M-ROB-9.

    >>> output_sensitivity_norm(torch.zeros(2), torch.tensor([[0.0], [1.0]]))  # sqrt(2) / 4
    tensor(0.3536)
    """
    top: Tensor = torch.linalg.matrix_norm(output_sensitivity(scores, values), 2)
    return top


def attack_linf(
    scores: Tensor,  # (..., n), scaled
    values: Tensor,  # (..., n, dim_value)
    direction: Tensor,  # (..., dim_value)
    budget: Number,
) -> Attack:
    """The best small perturbation with every entry at most `budget`, to move the output along a direction.

        e_i = budget * sign<v_i - out, u>,      predicted gain = budget * sum_i p_i |<v_i - out, u>|

    First order in the budget; for a finite one use `attack_linf_exact`. u is normalised. Spec: M-ROB-9.
    From Goodfellow, Shlens and Szegedy (2015), Explaining and harnessing adversarial examples.

    >>> attack_linf(torch.zeros(2), torch.tensor([[0.0], [1.0]]), torch.tensor([1.0]), 0.1).predicted  # 0.1 * 1/2
    tensor(0.0500)
    """
    c, slope, size = _along(scores, values, direction, budget)
    e = size * slope.sign()
    return Attack(e, size * slope.abs().sum(-1), _mean(scores + e, c) - _mean(scores, c))


def attack_l2(
    scores: Tensor,  # (..., n), scaled
    values: Tensor,  # (..., n, dim_value)
    budget: Number,
    direction: Tensor | None = None,  # (..., dim_value)
) -> Attack:
    """The best small perturbation of Euclidean length `budget`; without a direction, the one that moves most.

        e = budget * g / |g|,   g_i = p_i <v_i - out, u>,      predicted gain = budget * |g|
        no direction:  u is the top right singular vector of [p_i (v_i - out)]_i

    `achieved` is measured along u. Spec: M-ROB-9.

    >>> round(attack_l2(torch.zeros(2), torch.tensor([[0.0], [1.0]]), 0.1).predicted.item(), 5)  # 0.1 * sqrt(2) / 4
    0.03536
    """
    if direction is None:
        direction = torch.linalg.svd(output_sensitivity(scores, values), full_matrices=False).Vh[..., 0, :]
    c, slope, size = _along(scores, values, direction, budget)
    length = slope.norm(dim=-1, keepdim=True)
    e = size * slope / length.clamp(min=torch.finfo(slope.dtype).tiny)
    return Attack(e, size * length.squeeze(-1), _mean(scores + e, c) - _mean(scores, c))


def attack_linf_exact(
    scores: Tensor,  # (..., n), scaled
    values: Tensor,  # (..., n, dim_value)
    direction: Tensor,  # (..., dim_value)
    budget: Number,
    *,
    steps: int = 50,
) -> Attack:
    """The best perturbation with every entry at most `budget`, for any finite budget: a fractional-linear programme.

        t <- sum_i w_i c_i,    w = softmax(s + budget * sign(c - t)),    c_i = <v_i, u>

    The threshold is the *final* value t, not the output; a few steps reach the global maximum. Spec: M-ROB-10.
    The iteration is that of Dinkelbach (1967), On nonlinear fractional programming.

    >>> v, u = torch.tensor([[0.0], [1.0]]), torch.tensor([1.0])
    >>> a = attack_linf_exact(torch.zeros(2), v, u, torch.tensor(3.0).log() / 2)
    >>> a.achieved  # odds 1 become 3: from 1/2 to 3/4
    tensor(0.2500)
    """
    c, slope, size = _along(scores, values, direction, budget)
    t = _mean(scores, c)[..., None]
    e = torch.zeros_like(c)
    for _ in range(steps):
        e = size * torch.where(c > t, 1.0, -1.0).to(c.dtype)
        better = _mean(scores + e, c)[..., None]
        if bool((better <= t).all()):
            break
        t = torch.maximum(t, better)
    return Attack(e, size * slope.abs().sum(-1), _mean(scores + e, c) - _mean(scores, c))


def _along(scores: Tensor, values: Tensor, direction: Tensor, budget: Number) -> tuple[Tensor, Tensor, float]:
    """c_i = <v_i, u>, how its mean moves with each score, and the budget."""
    size = float(number(budget))
    require(size >= 0, f"budget is a size, so budget >= 0; got {size}.")
    unit = direction / direction.norm(dim=-1, keepdim=True)
    c = (values * unit[..., None, :]).sum(-1)
    return c, softmax_vjp(torch.softmax(scores, -1), c), size


def _mean(scores: Tensor, along: Tensor) -> Tensor:
    return (torch.softmax(scores, -1) * along).sum(-1)
