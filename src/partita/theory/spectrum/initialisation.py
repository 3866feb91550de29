"""Projections at initialisation: the variance they pass on, and the sharpness rows start with."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import Number, above_zero, number, require

__all__ = ["initial_sharpness", "sharpness_initialiser_std", "xavier_gain", "xavier_variance"]


def xavier_variance(dim_in: int, dim_out: int) -> Tensor:
    """Variance of Xavier-initialised weights.

        2 / (dim_in + dim_out)

    Spec: M-INF-4.
    From Glorot and Bengio (2010), Understanding the difficulty of training deep feedforward neural networks.

    >>> xavier_variance(3, 1).item()
    0.5
    """
    require(dim_in >= 1 and dim_out >= 1, f"dimensions must be at least 1; got {dim_in} and {dim_out}.")
    return number(2.0 / (dim_in + dim_out))


def xavier_gain(dim_in: int, dim_out: int) -> Tensor:
    """By how much a Xavier projection multiplies the variance of its input: 1 only for square matrices.

        dim_in * 2 / (dim_in + dim_out)

    Splitting heads before or after initialising matters: 512 -> 64 has gain 1.78, the fused 512 -> 1536 has 0.5.
    Spec: M-INF-4.

    >>> round(xavier_gain(512, 64).item(), 3), xavier_gain(512, 1536).item()
    (1.778, 0.5)
    """
    return dim_in * xavier_variance(dim_in, dim_out)


def initial_sharpness(dim_model: int, dim_init: int, input_variance: Number = 1.0) -> Tensor:
    """Sharpness of attention at initialisation with scale 1/sqrt(dim_head) and Xavier projections of shape
    dim_model -> dim_init (one head's, or the fused matrix the initialiser saw).

        sharpness = gain * input_variance

    Spec: M-INF-4, M-INF-3.

    >>> initial_sharpness(512, 512).item()
    1.0
    """
    return xavier_gain(dim_model, dim_init) * number(input_variance)


def sharpness_initialiser_std(dim_model: int, sharpness: Number, input_variance: Number = 1.0) -> Tensor:
    """Standard deviation of query and key weights that starts attention at this sharpness (scale 1/sqrt(dim)).

        sd^2 = sharpness / (dim_model * input_variance)

    Spec: M-INF-4.

    >>> sharpness_initialiser_std(4, 1.0).item()
    0.5
    """
    return torch.sqrt(above_zero("sharpness", sharpness) / (dim_model * number(input_variance)))
