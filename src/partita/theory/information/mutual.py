"""Lower bounds on mutual information, what caps them, and how near the cap they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require

__all__ = [
    "InformationBound",
    "candidates_needed",
    "gaussian_information",
    "mutual_information_bound",
    "optimal_gaussian_critic",
    "token_information_gain",
]


@dataclass(frozen=True)
class InformationBound:
    """A lower bound on mutual information in nats, and what it could not have exceeded.

    `slack` is cap - value; below half a nat the bound says more about the number of candidates than about the data.
    """

    value: Tensor
    cap: Tensor

    @property
    def slack(self) -> Tensor:
        """How far below its cap the bound is, in nats; negative never."""
        return self.cap - self.value

    @property
    def fraction(self) -> Tensor:
        """value / cap: 1 is saturation; NaN when there is a single candidate."""
        return self.value / self.cap.masked_fill(self.cap == 0, torch.nan)

    @property
    def saturated(self) -> Tensor:
        """True where the slack is below half a nat."""
        return self.slack < 0.5


def mutual_information_bound(loss: Number, n: Number) -> InformationBound:
    """What an InfoNCE loss with n candidates (one positive, n - 1 negatives) says about mutual information.

        I >= log n - E[loss],      never more than the cap log n

    `loss` may hold many batch values: their mean is used, as the bound is true in expectation only, a single batch may
    exceed I. Negatives must be independent draws from the marginal; with two views of each item only the cap is sure.
    A negative value is a valid, empty bound. Spec: M-INC-2, M-RMK-5.
    From van den Oord, Li and Vinyals (2018), Representation learning with contrastive predictive coding; Poole, Ozair,
    van den Oord, Alemi and Tucker (2019), On variational bounds of mutual information.

    >>> b = mutual_information_bound(0.25, 128)
    >>> round(b.value.item(), 4), round(b.cap.item(), 4), b.saturated.item()  # log 128 - 0.25
    (4.602, 4.852, True)
    """
    mean, n = number(loss).mean(), number(n)
    require(n >= 1, f"n counts candidates, the positive included, so n >= 1; got {n}.")
    require(~(mean < 0), f"an InfoNCE loss is -log of a probability, so it is not negative; got {mean}.")
    cap = n.log().to(mean.dtype)
    return InformationBound(cap - mean, cap)


def candidates_needed(information: Number, slack: float = 0.5) -> Tensor:
    """How many candidates a batch needs before the cap stops hiding this much information.

        n = ceil(exp(information + slack))

    Spec: M-INC-2.

    >>> candidates_needed(3.321).item()  # exp(3.821) = 45.65
    46.0
    """
    return torch.exp(number(information) + slack).ceil()


def gaussian_information(correlation: Number, dim: int = 1) -> Tensor:
    """Mutual information of two Gaussian vectors whose matching coordinates have this correlation.

        I = -dim/2 * log(1 - rho^2)

    The yardstick on which bounds are tried. Infinite at |rho| = 1. Spec: M-INC-2.

    >>> round(gaussian_information(0.6).item(), 4)  # -log(0.8)
    0.2231
    """
    rho = number(correlation)
    require(rho.abs() <= 1, f"a correlation lies in [-1, 1]; got {rho}.")
    return -0.5 * dim * torch.log1p(-(rho**2))


def optimal_gaussian_critic(x: Tensor, y: Tensor, correlation: float) -> Tensor:  # (n_x, n_y)
    """The log density ratio log p(x|y) / p(x) of correlated Gaussians: the critic with which InfoNCE is tight.

        f(x, y) = sum_d [ -log(1 - rho^2)/2 - (x - rho y)^2 / (2 (1 - rho^2)) + x^2 / 2 ]

    Spec: M-INC-2.

    >>> optimal_gaussian_critic(torch.zeros(1, 1), torch.zeros(1, 1), 0.6)  # -log(0.8)
    tensor([[0.2231]])
    """
    rho2 = correlation**2
    require(rho2 < 1, f"the critic needs |correlation| < 1; got {correlation}.")
    gap = x[:, None, :] - correlation * y[None, :, :]
    constant = 0.5 * x.shape[-1] * math.log1p(-rho2)  # log(1 - rho^2), accurate near 0
    return -constant - gap.square().sum(-1) / (2 * (1 - rho2)) + x.square().sum(-1)[:, None] / 2


def token_information_gain(cross_entropy: Number, marginal_entropy: Number) -> Tensor:
    """What a language model's loss says about the information between token and context.

        I(token; context) >= H(token) - cross_entropy

    The whole vocabulary is enumerated and nothing is sampled from the marginal, so log(vocabulary) - cross_entropy is
    not a bound: for an independent context it reports log(vocabulary) - H(token) where there is nothing.
    Spec: M-LOSS-11.

    >>> token_information_gain(2.0, 5.0).item()
    3.0
    """
    return number(marginal_entropy) - number(cross_entropy)
