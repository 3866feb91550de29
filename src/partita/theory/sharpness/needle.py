"""One relevant key in a long row of random ones: when any scale can find it."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require, where
from partita.theory.sharpness.condensed import extreme_location

__all__ = ["needle_threshold", "needle_weight", "needle_weight_samples", "needle_weight_typical"]


def needle_threshold(n: Number, sigma: Number = 1.0, *, finite: bool = True) -> Tensor:
    """The height a key must have above n Gaussian scores before some scale lets it dominate.

        sigma * b_n        (finite False:  sigma * sqrt(2 log n))

    Below it the background's own maximum wins at every large scale. Spec: M-SCL-19.

    >>> round(needle_threshold(4096).item(), 2)
    3.51
    """
    top = extreme_location(n) if finite else (2 * number(n).log()).sqrt()
    return number(sigma) * top


def needle_weight(height: Number, scale: Number, log_background: Number) -> Tensor:
    """Weight of a key of this height when all others have this log-partition.

        p = sigmoid(scale * height - log_background)

    Spec: M-SCL-19.

    >>> needle_weight(1.0, 2.0, 2.0).item()
    0.5
    """
    return torch.sigmoid(number(scale) * number(height) - number(log_background))


def needle_weight_typical(n: Number, height: Number, scale: Number, sigma: Number = 1.0) -> Tensor:
    """The same for n - 1 Gaussian scores, with the log-partition they have below condensation.

        p = sigmoid(scale * height - log(n - 1) - (scale sigma)^2 / 2)

    Largest at scale = height / sigma^2, which is flat and small unless height exceeds the threshold. Spec: M-SCL-19.

    >>> needle_weight_typical(2, 1.0, 2.0).item()  # 2 - 0 - 2
    0.5
    """
    n, x = number(n), number(scale) * number(sigma)
    require(n >= 2, f"a needle needs a background, so n >= 2; got {n}.")
    return needle_weight(height, scale, (n - 1).log() + x**2 / 2)


def needle_weight_samples(
    n: int,
    height: float,
    scales: Tensor,  # (m,)
    *,
    draws: int = 64,
    sigma: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # (draws, m)
    """Weight of the needle in sampled backgrounds, for several scales at once on the same backgrounds.

        p = sigmoid(scale * height - logsumexp(scale * sigma * g)),    g standard normal

    Spec: M-SCL-19.

    >>> needle_weight_samples(9, 1.0, torch.tensor([0.0]), draws=1)  # scale 0: one of nine
    tensor([[0.1111]])
    """
    drawn = torch.randn(draws, n - 1, generator=generator, dtype=scales.dtype, device=where(generator))
    background = sigma * drawn.to(scales.device)
    log_z = torch.stack([torch.logsumexp(s * background, -1) for s in scales], -1)
    return needle_weight(height, scales, log_z)
