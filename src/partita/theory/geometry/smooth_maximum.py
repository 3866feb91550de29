"""LogSumExp as a maximum without corners, and how far from the maximum it is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require

__all__ = ["MaximumBounds", "smooth_max", "smooth_max_bounds", "smooth_mean_max"]


class MaximumBounds(NamedTuple):
    """An interval that holds a smooth maximum."""

    lower: Tensor
    upper: Tensor


def smooth_max(scores: Tensor, scale: Number = 1.0) -> Tensor:  # (..., n) -> (...)
    """A smooth upper bound of the maximum.

        log(sum_j exp(scale * s_j)) / scale

    Close to the maximum only if its lead is much more than log(n) / scale. Spec: M-GIB-5.

    >>> smooth_max(torch.zeros(4), 2.0)  # log(4) / 2
    tensor(0.6931)
    """
    require(scale > 0, f"smooth_max needs scale > 0; got {scale}. For the minimum negate the scores.")
    return torch.logsumexp(scale * scores, -1) / scale


def smooth_mean_max(scores: Tensor, scale: Number = 1.0) -> Tensor:  # (..., n) -> (...)
    """The averaged form, between the mean and the maximum.

        mean s  <=  log(mean_j exp(scale * s_j)) / scale  <=  max s

    The mean as scale goes to 0, the maximum as it grows. Spec: M-GIB-5, M-ENT-6.

    >>> smooth_mean_max(torch.full((3,), 5.0), 2.0)
    tensor(5.)
    """
    n = number(scores.shape[-1]).to(scores.dtype)
    return smooth_max(scores, scale) - n.log() / scale


def smooth_max_bounds(scores: Tensor, scale: Number = 1.0) -> MaximumBounds:
    """Where the smooth maximum must lie.

        max s  <=  smooth_max  <=  max s + log(n) / scale

    The lower end is never attained for n >= 2, the upper end only by equal scores. Spec: M-GIB-5.

    >>> smooth_max_bounds(torch.tensor([1.0, 3.0]), 1.0)
    MaximumBounds(lower=tensor(3.), upper=tensor(3.6931))
    """
    require(scale > 0, f"smooth_max needs scale > 0; got {scale}.")
    top = scores.amax(-1)
    return MaximumBounds(top, top + number(scores.shape[-1]).to(scores.dtype).log() / scale)
