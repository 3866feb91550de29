"""Gaussian scores: entropy as a function of length and sharpness, below the transition where a row condenses."""

from __future__ import annotations

import warnings
from math import log, pi

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require

__all__ = [
    "condensation_sharpness",
    "expected_maximum",
    "gaussian_entropy",
    "gaussian_log_partition",
    "gaussian_mean_score",
    "gaussian_sharpness",
]


def condensation_sharpness(n: Number) -> Tensor:
    """The sharpness (scale * sd of scores) at which a row of n Gaussian scores condenses on a few keys.

        sqrt(2 log n)

    Spec: M-SCL-12.
    The transition of Derrida (1981), Random-energy model: an exactly solvable model of disordered systems.

    >>> round(condensation_sharpness(65536).item(), 2)
    4.71
    """
    n = number(n)
    require(n >= 1, f"n counts visible keys, so n >= 1; got {n}.")
    return (2 * n.log()).sqrt()


def gaussian_entropy(n: Number, sharpness: Number, *, finite: bool = False) -> Tensor:
    """Mean entropy of a softmax over n independent Gaussian scores.

        H = log n - x / 2,    x = sharpness^2         finite:  + [x e^x - (e^x - 1) / 2] / n

    Warns above 0.6 sqrt(2 log n), where x / 2 overstates the gap by 12, 6, 3 % for n = 2^8, 2^12, 2^16. `finite` adds
    the first correction, good while exp(x) << n. Spec: M-SCL-12.

    >>> round(gaussian_entropy(1024, 1.0).item(), 4)  # 6.9315 - 0.5
    6.4315
    >>> round(gaussian_entropy(256, 1.0, finite=True).item(), 4)  # 5.5452 - 0.5 + (e - 0.8591) / 256
    5.0524
    """
    n, x = number(n), number(sharpness) ** 2
    limit = condensation_sharpness(n)
    if bool((x.sqrt() > 0.6 * limit).any()):
        warnings.warn(
            f"sharpness {x.sqrt()} exceeds 0.6 * sqrt(2 log n) = {0.6 * limit}: "
            "the Gaussian law overstates the gap to log n.",
            stacklevel=2,
        )
    entropy = n.log() - x / 2
    return entropy + (x * x.exp() - torch.expm1(x) / 2) / n if finite else entropy


def gaussian_log_partition(n: Number, sharpness: Number, mean: Number = 0.0) -> Tensor:
    """Log-partition of a row of Gaussian logits with this mean and standard deviation.

        log Z = log n + mean + sharpness^2 / 2

    Below the transition only: past it log Z is dominated by the maximum. Spec: M-SCL-12, M-SCL-11.

    >>> gaussian_log_partition(1, 2.0, 1.0).item()
    3.0
    """
    return number(n).log() + number(mean) + number(sharpness) ** 2 / 2


def gaussian_mean_score(scale: Number, mean: Number = 0.0, sigma: Number = 1.0) -> Tensor:
    """Mean score under the softmax weights: shifted by scale * sigma^2, far below the maximum.

        E_p[s] = mean + scale * sigma^2

    Spec: M-SCL-12.

    >>> gaussian_mean_score(2.0, 1.0, 3.0).item()  # 1 + 2 * 9
    19.0
    """
    return number(mean) + number(scale) * number(sigma) ** 2


def gaussian_sharpness(n: Number, entropy: Number) -> Tensor:
    """The sharpness that gives a row of n Gaussian scores this entropy: it grows like sqrt(log n), not log n.

        sqrt(2 (log n - entropy)),     0 when the target is not below log n

    True below the transition; at n = 2^13..2^20 the exact value is larger by 0-1 % for entropy 8, 2-6 % for 6,
    12-17 % for 4, 47-52 % for 2. Spec: M-SCL-14.

    >>> gaussian_sharpness(torch.tensor(10.0, dtype=torch.float64).exp(), 2.0).item()  # sqrt(16)
    4.0
    """
    return (2 * (number(n).log() - number(entropy)).clamp(min=0)).sqrt()


def expected_maximum(n: Number, *, corrected: bool = True) -> Tensor:
    """Mean of the largest of n standard normal numbers.

        a = sqrt(2 log n);      corrected:  a - (log log n + log 4 pi) / (2 a) + 0.5772 / a

    The leading term alone is 14 % too large at n = 1000. Needs n >= 2. Spec: M-SCL-13.

    >>> round(expected_maximum(1000, corrected=False).item(), 3), round(expected_maximum(1000).item(), 3)
    (3.717, 3.272)
    """
    n = number(n)
    require(n >= 2, f"the expansion needs n >= 2; got {n}.")
    a = (2 * n.log()).sqrt()
    if not corrected:
        return a
    return a - (n.log().log() + log(4 * pi)) / (2 * a) + 0.5772156649015329 / a
