"""Past the transition: a handful of keys carry the row, and its entropy no longer knows n."""

from __future__ import annotations

from math import log, pi

import torch
from torch import Tensor

from partita.theory._domain import Number, bisect, number, require

__all__ = ["condensed_entropy", "condensed_index", "extreme_location", "frozen_index", "frozen_sharpness"]


def condensed_entropy(index: Number) -> Tensor:
    """Mean entropy of Poisson-Dirichlet weights: what is left of a condensed row.

        H = psi(1) - psi(1 - m),      0 <= m < 1

    Infinite at m = 1, the transition. Spec: M-SCL-13.
    After Derrida (1981), Random-energy model: an exactly solvable model of disordered systems; Ruelle (1987), A
    mathematical reformulation of Derrida's REM and GREM.

    >>> round(condensed_entropy(0.5).item(), 4)  # 2 log 2
    1.3863
    """
    m = number(index)
    require((m >= 0) & (m < 1), f"the index of a condensed row lies in [0, 1); got {m}.")
    return torch.digamma(torch.ones_like(m)) - torch.digamma(1 - m)


def condensed_index(entropy: Number) -> Tensor:
    """The index whose weights have this mean entropy: the inverse of `condensed_entropy`, by bisection.

        psi(1) - psi(1 - m) = entropy

    Spec: M-SCL-13, M-SCL-14.

    >>> round(1 / condensed_index(2.0).item(), 3)
    1.661
    """
    target = number(entropy)
    require(target >= 0, f"an entropy is not negative; got {target}.")
    zero, one = torch.zeros_like(target), torch.ones_like(target)
    # 2^-60 is below the rounding of float64
    return bisect(lambda m: torch.digamma(one) - torch.digamma(1 - m) < target, zero, one, steps=60)


def extreme_location(n: Number) -> Tensor:
    """Where the largest of n standard normal numbers typically is: closer than sqrt(2 log n).

        n * phi(b) / b = 1

    Needs n >= 3. Spec: M-SCL-13, M-SCL-19.
    From Hall (1979), On the rate of convergence of normal extremes.

    >>> round(extreme_location(4096).item(), 2), round((2 * torch.tensor(4096.0).log()).sqrt().item(), 2)
    (3.51, 4.08)
    """
    n = number(n)
    require(n >= 3, f"the equation has its root above 0.4 only for n >= 3; got {n}.")
    low, high = torch.full_like(n, 0.1), (2 * n.log()).sqrt() + 1
    return bisect(lambda b: n.log() - b**2 / 2 - 0.5 * log(2 * pi) - b.log() > 0, low, high)


def frozen_index(n: Number, sharpness: Number, *, finite: bool = True) -> Tensor:
    """The Poisson-Dirichlet index of a row of n Gaussian scores beyond the transition.

        m = b_n / sharpness        (finite False:  sqrt(2 log n) / sharpness)

    Convergence in n is logarithmically slow; b_n (`extreme_location`) is the better number at practical lengths.
    Spec: M-SCL-13.

    >>> round(frozen_index(torch.tensor(50.0).double().exp(), 20.0, finite=False).item(), 9)  # sqrt(100) / 20
    0.5
    """
    top = extreme_location(n) if finite else (2 * number(n).log()).sqrt()
    m = top / number(sharpness)
    require(m < 1, f"sharpness {sharpness} is below the transition {top}: use gaussian_entropy.")
    return m


def frozen_sharpness(n: Number, entropy: Number) -> Tensor:
    """The sharpness that holds this entropy as n grows without bound: again sqrt(log n), with a larger factor.

        sqrt(2 log n) / m(entropy)

    Spec: M-SCL-14.

    >>> round((frozen_sharpness(1e6, 2.0) / (2 * torch.tensor(1e6).double().log()).sqrt()).item(), 3)
    1.661
    """
    return (2 * number(n).log()).sqrt() / condensed_index(entropy)
