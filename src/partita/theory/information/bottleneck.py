"""The information bottleneck of a discrete channel, and what linear-Gaussian attention transmits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require, where
from partita.theory.information.correlation import mutual_information_table
from partita.theory.law import gibbs_law

__all__ = ["Bottleneck", "attention_information", "bottleneck_objective", "bottleneck_step", "solve_bottleneck"]


class Bottleneck(NamedTuple):
    """What an encoder keeps, what of it is relevant, and the trade-off between the two."""

    objective: Tensor
    kept: Tensor
    relevant: Tensor


def bottleneck_objective(
    encoder: Tensor,  # (n_x, n_z), rows p(z|x)
    joint: Tensor,  # (n_x, n_y), p(x, y)
    beta: Number,
) -> Bottleneck:
    """The information-bottleneck objective of an encoder z of x that should tell about y.

        I(Z; X) - beta * I(Z; Y),     Z - X - Y a Markov chain

    0 for an encoder that ignores x. Spec: M-INF-7.

    >>> b = bottleneck_objective(torch.eye(2), torch.eye(2) / 2, beta=3.0)  # keep all: log 2 - 3 log 2
    >>> round(b.objective.item(), 4)
    -1.3863
    """
    require((encoder.sum(-1) - 1).abs().max() < 1e-5, "each row of encoder is a law p(z|x) and must sum to 1.")
    p_x = joint.sum(-1)
    kept = mutual_information_table(p_x[:, None] * encoder)
    relevant = mutual_information_table(encoder.T @ joint)
    return Bottleneck(kept - number(beta).to(kept.dtype) * relevant, kept, relevant)


def bottleneck_step(encoder: Tensor, joint: Tensor, beta: Number) -> Tensor:  # (n_x, n_z)
    """One self-consistent update of the encoder, itself a softmax with scale beta; it never raises the objective.

        p(z|x) = p(z) exp(-beta * KL(p(y|x) || p(y|z))) / Z(x)

    Spec: M-INF-7.
    From Tishby, Pereira and Bialek (1999), The information bottleneck method.

    >>> bottleneck_step(torch.full((2, 2), 0.5), torch.eye(2) / 2, 1.0)  # an encoder that ignores x is a fixed point
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    p_x = joint.sum(-1)
    p_z = p_x @ encoder
    y_of_x = joint / p_x[:, None]
    y_of_z = (encoder.T @ joint) / p_z[:, None].clamp(min=1e-300)
    # KL split in two sums, so that 0 log 0 is 0 and p > 0 against q = 0 is +inf.
    cross = torch.where(y_of_x[:, None, :] > 0, y_of_x[:, None, :] * y_of_z[None, :, :].log(), 0.0).sum(-1)
    divergence = torch.xlogy(y_of_x, y_of_x).sum(-1)[:, None] - cross
    return gibbs_law(-divergence, scale=beta, bias=p_z.log()[None, :].expand_as(divergence)).probs


def solve_bottleneck(
    joint: Tensor,  # (n_x, n_y)
    n_z: int,
    beta: Number,
    *,
    steps: int = 500,
    generator: torch.Generator | None = None,
) -> Tensor:  # (n_x, n_z)
    """An encoder that the update leaves alone, from a random start: a local optimum.

        encoder <- bottleneck_step(encoder)        `steps` times

    Below a critical beta it ignores x. Spec: M-INF-7.

    >>> e = solve_bottleneck(torch.eye(2, dtype=torch.float64) / 2, 2, 8.0, generator=torch.Generator().manual_seed(0))
    >>> round(bottleneck_objective(e, torch.eye(2, dtype=torch.float64) / 2, 8.0).kept.item(), 4)  # all of it: log 2
    0.6931
    """
    require(n_z >= 1, f"n_z counts the values of the code, so n_z >= 1; got {n_z}.")
    start = torch.rand(joint.shape[0], n_z, generator=generator, dtype=joint.dtype, device=where(generator))
    start = start.to(joint.device) + 0.1
    encoder = start / start.sum(-1, keepdim=True)
    for _ in range(steps):
        encoder = bottleneck_step(encoder, joint, beta)
    return encoder


def attention_information(
    probs: Tensor,  # (..., n)
    value_variance: Number = 1.0,
    noise_variance: Number = 1.0,
) -> Tensor:  # (...)
    """What an output tells about independent Gaussian values, per coordinate, when noise is added to it.

        I(o; V) = log(1 + |p|^2 * value_variance / noise_variance) / 2

    Spreading the weights *reduces* it: a uniform row averages the values away. Row entropy is another thing.
    Spec: M-INF-7.

    >>> round(attention_information(torch.tensor([1.0, 0.0]), 1.0, 1.0).item(), 4)  # log(2) / 2
    0.3466
    """
    noise = number(noise_variance)
    require(noise > 0, f"noise_variance must be positive, else the information is infinite; got {noise}.")
    ratio = (number(value_variance) / noise).to(probs.dtype)
    return 0.5 * torch.log1p(probs.square().sum(-1) * ratio)
