"""Losses that bend cross entropy: weights, focus, smoothing, noise models; each with its gradient by logits."""

from __future__ import annotations

from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import Number, above_zero, number, require

__all__ = [
    "Smoothing",
    "focal_gradient",
    "gaussian_nll",
    "hinge_mass",
    "label_smoothing_parts",
    "laplace_nll",
    "smoothing_floor",
    "weighted_cross_entropy_gradient",
]


class Smoothing(NamedTuple):
    """A smoothed cross entropy, split into what it adds up from."""

    loss: Tensor
    hard: Tensor
    to_uniform: Tensor
    floor: Tensor


def weighted_cross_entropy_gradient(
    logits: Tensor,  # (n_sample, n_class)
    target: Tensor,  # (n_sample,)
    weight: Tensor,  # (n_class,)
    *,
    by_weight: bool = True,
) -> Tensor:  # (n_sample, n_class)
    """Gradient of the mean class-weighted cross entropy by logits.

        w_c (p - e_c) / sum of w          (by_weight False:  / number of samples)

    Torch divides by the sum of weights; a batch of weight 0 is refused. Spec: M-LOSS-7.

    >>> weighted_cross_entropy_gradient(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([3.0, 1.0]))
    tensor([[-0.5000,  0.5000]])
    """
    w = weight[target]
    total = w.sum() if by_weight else w.new_tensor(float(len(target)))
    require(total > 0, "the classes of this batch have total weight 0, so its weighted mean is 0/0.")
    one_hot = torch.nn.functional.one_hot(target, logits.shape[-1]).to(logits.dtype)
    return w[:, None] * (torch.softmax(logits, -1) - one_hot) / total


def focal_gradient(
    logits: Tensor,  # (..., n_class)
    target: Tensor,  # (...)
    gamma: float = 2.0,
    alpha: float = 1.0,
) -> Tensor:  # (..., n_class)
    """Gradient by logits of the focal loss -alpha (1 - p_t)^gamma log p_t.

        alpha [ gamma (1 - p_t)^(gamma - 1) p_t log p_t - (1 - p_t)^gamma ] (e_t - p)

    gamma = 0 is cross entropy. 1 - p_t is summed from the other classes, so that it keeps its digits. Spec: M-LOSS-8.
    From Lin, Goyal, Girshick, He and Dollar (2017), Focal loss for dense object detection.

    >>> focal_gradient(torch.zeros(2), torch.tensor(0), gamma=0.0)
    tensor([-0.5000,  0.5000])
    """
    require(gamma >= 0, f"gamma must not be negative; got {gamma}.")
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    one_hot = torch.nn.functional.one_hot(target, logits.shape[-1]).to(logits.dtype)
    log_t = (log_p * one_hot).sum(-1, keepdim=True)
    rest = (p * (1 - one_hot)).sum(-1, keepdim=True)
    # p_t log p_t / (1 - p_t) tends to -1 as p_t tends to 1: the product stays finite for every gamma > 0.
    ratio = torch.where(rest > 1e-12, log_t.exp() * log_t / rest.clamp(min=1e-12), -1.0)
    return alpha * rest**gamma * (gamma * ratio - 1) * (one_hot - p)


def label_smoothing_parts(logits: Tensor, target: Tensor, epsilon: float) -> Smoothing:
    """A label-smoothed cross entropy and its parts; the gradient by logits is p - y'.

        y' = (1 - e) e_t + e / C,      loss = (1 - e) CE + e (KL(u || p) + log C)

    It pulls on KL(u || p); an entropy bonus pulls on KL(p || u). Spec: M-LOSS-9.
    From Szegedy, Vanhoucke, Ioffe, Shlens and Wojna (2016), Rethinking the Inception architecture for computer vision.

    >>> label_smoothing_parts(torch.zeros(2), torch.tensor(0), 0.5).loss  # log 2 whatever e
    tensor(0.6931)
    """
    require(0 <= epsilon <= 1, f"epsilon is a fraction, so 0 <= epsilon <= 1; got {epsilon}.")
    log_p = torch.log_softmax(logits, -1)
    n_class = logits.shape[-1]
    hard = -log_p.gather(-1, target[..., None]).squeeze(-1)
    to_uniform = -log_p.mean(-1) - log(n_class)
    loss = (1 - epsilon) * hard + epsilon * (to_uniform + log(n_class))
    return Smoothing(loss, hard, to_uniform, torch.full_like(loss, float(smoothing_floor(n_class, epsilon))))


def smoothing_floor(n_class: int, epsilon: float) -> Tensor:
    """The least a label-smoothed cross entropy can be: the entropy of the smoothed target.

        H(y')

    Spec: M-LOSS-9.

    >>> round(smoothing_floor(5, 0.1).item(), 4)  # 0.92 and four times 0.02
    0.3897
    """
    top, rest = number(1 - epsilon + epsilon / n_class), number(epsilon / n_class)
    return -torch.xlogy(top, top) - (n_class - 1) * torch.xlogy(rest, rest)


def gaussian_nll(residual: Tensor, sigma: Number) -> Tensor:
    """Negative log-likelihood of a residual under normal noise: squared error with its constant.

        r^2 / (2 sigma^2) + log(sigma sqrt(2 pi))

    Spec: M-LOSS-10.

    >>> gaussian_nll(torch.tensor(0.0), 1.0)
    tensor(0.9189)
    """
    s = above_zero("sigma", sigma, residual.dtype)
    return residual**2 / (2 * s**2) + s.log() + 0.5 * log(2 * pi)


def laplace_nll(residual: Tensor, b: Number) -> Tensor:
    """Negative log-likelihood of a residual under Laplace noise: absolute error with its constant.

        |r| / b + log(2 b)

    Spec: M-LOSS-10.

    >>> laplace_nll(torch.tensor(1.0), 0.5)  # 2 + log 1
    tensor(2.)
    """
    b = above_zero("b", b, residual.dtype)
    return residual.abs() / b + (2 * b).log()


def hinge_mass(margin: Tensor) -> Tensor:
    """What exp(-hinge) sums to over the two labels: not constant, so hinge is no negative log-likelihood.

        exp(-max(0, 1 - m)) + exp(-max(0, 1 + m))

    Spec: M-RMK-6.

    >>> hinge_mass(torch.tensor(0.0))  # 2 / e
    tensor(0.7358)
    """
    return torch.exp(-(1 - margin).clamp(min=0)) + torch.exp(-(1 + margin).clamp(min=0))
