"""Total and dual total correlation of discrete tables: what several variables share, counted in two ways.

A table is a tensor of probabilities with one axis per variable, small enough to hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import require
from partita.theory.information.entropy import entropy_of

__all__ = [
    "conditional_entropies",
    "dual_total_correlation",
    "marginals",
    "mutual_information_sum",
    "mutual_information_table",
    "prefix_information",
    "product_of_marginals",
    "total_correlation",
]


def marginals(table: Tensor) -> list[Tensor]:
    """The law of each variable on its own.

        P_t(x_t) = sum over all other axes

    Spec: M-GEO-6.

    >>> marginals(torch.tensor([[0.5, 0.0], [0.25, 0.25]]))
    [tensor([0.5000, 0.5000]), tensor([0.7500, 0.2500])]
    """
    axes = range(table.dim())
    return [table.sum([a for a in axes if a != t]) if table.dim() > 1 else table for t in axes]


def product_of_marginals(table: Tensor) -> Tensor:
    """The table of independent variables with the same marginals: each position resampled across sequences.

        Q(x) = prod_t P_t(x_t)

    Shuffling inside one sequence does not give it. Spec: M-GEO-6.

    >>> product_of_marginals(torch.tensor([[0.5, 0.0], [0.0, 0.5]]))
    tensor([[0.2500, 0.2500],
            [0.2500, 0.2500]])
    """
    out = torch.ones((), dtype=table.dtype, device=table.device)
    for m in marginals(table):
        out = out[..., None] * m
    return out


def total_correlation(table: Tensor) -> Tensor:
    """How far a table is from independence.

        TC = sum_t H(x_t) - H(x) = KL(P || product of marginals) = sum_{t>=2} I(x_t; x_<t)

    Spec: M-GEO-6.
    From Watanabe (1960), Information theoretical analysis of multivariate correlation.

    >>> xor = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]) / 4
    >>> total_correlation(xor)  # log 2
    tensor(0.6931)
    """
    _check(table)
    return torch.stack([entropy_of(m) for m in marginals(table)]).sum() - entropy_of(table.flatten())


def conditional_entropies(table: Tensor) -> Tensor:  # (variables,)
    """What is still unknown about each variable once all others are known.

        H(x_t | x_-t) = H(x) - H(x_-t)

    Spec: M-GEO-6.

    >>> conditional_entropies(torch.full((2, 2), 0.25))  # independent coins
    tensor([0.6931, 0.6931])
    """
    _check(table)
    joint = entropy_of(table.flatten())
    return torch.stack([joint - entropy_of(table.sum(t).flatten()) for t in range(table.dim())])


def dual_total_correlation(table: Tensor) -> Tensor:
    """The part of the joint entropy that is not private to any variable.

        DTC = H(x) - sum_t H(x_t | x_-t)

    Spec: M-GEO-6.
    From Han (1978), Nonnegative entropy measures of multivariate symmetric correlations.

    >>> xor = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]) / 4
    >>> dual_total_correlation(xor)  # 2 log 2: no variable is free given the two others
    tensor(1.3863)
    """
    return entropy_of(table.flatten()) - conditional_entropies(table).sum()


def mutual_information_sum(table: Tensor) -> Tensor:
    """What each variable shares with all others, summed: more than the total correlation.

        sum_t I(x_t; x_-t) = TC + DTC

    Spec: M-GEO-6.

    >>> xor = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]) / 4
    >>> mutual_information_sum(xor)  # 3 log 2
    tensor(2.0794)
    """
    single = torch.stack([entropy_of(m) for m in marginals(table)])
    return (single - conditional_entropies(table)).sum()


def prefix_information(table: Tensor) -> Tensor:
    """What each variable shares with those before it, summed: the chain rule of the total correlation.

        sum_{t>=2} I(x_t; x_<t) = TC

    Spec: M-GEO-6.

    >>> xor = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]) / 4
    >>> prefix_information(xor)
    tensor(0.6931)
    """
    _check(table)
    total = torch.zeros((), dtype=table.dtype, device=table.device)
    for t in range(1, table.dim()):
        head = table.sum(list(range(t + 1, table.dim()))) if t + 1 < table.dim() else table
        total = total + mutual_information_table(head.flatten(0, t - 1))
    return total


def mutual_information_table(joint: Tensor) -> Tensor:  # joint (n_x, n_y)
    """Mutual information of two discrete variables from their joint table.

        I(X; Y) = H(X) + H(Y) - H(X, Y)

    Spec: M-GEO-6, M-INF-7.

    >>> mutual_information_table(torch.eye(4) / 4)  # log 4
    tensor(1.3863)
    """
    return entropy_of(joint.sum(-1)) + entropy_of(joint.sum(-2)) - entropy_of(joint.flatten(-2))


def _check(table: Tensor) -> None:
    require(
        (table >= 0).all() & ((table.sum() - 1).abs() < 1e-5), "a table holds probabilities: >= 0 and summing to 1."
    )
