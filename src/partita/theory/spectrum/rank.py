"""Rank-like numbers of an attention matrix: not its width, and often the opposite of it."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.support import Support
from partita.theory._domain import Number
from partita.theory.information.entropy import entropy_of
from partita.theory.information.streaming import collision_log_mass
from partita.theory.spectrum.markov import singular_value

__all__ = [
    "effective_rank",
    "eigenvalue_entropy",
    "stable_rank",
    "stable_rank_bound",
    "stable_rank_streaming",
    "von_neumann_entropy",
]


def effective_rank(matrix: Tensor) -> Tensor:  # (..., m, n) -> (...)
    """How many directions a matrix really uses. Dense.

        exp(-sum r_i log r_i),    r = singular values / their sum

    A uniform attention matrix has width n and rank 1, the identity width 1 and rank n. Spec: M-SPE-2.
    From Roy and Vetterli (2007), The effective rank: a measure of effective dimensionality.

    >>> effective_rank(torch.eye(3))
    tensor(3.)
    """
    s: Tensor = torch.linalg.svdvals(matrix)
    return entropy_of(s / s.sum(-1, keepdim=True)).exp()


def stable_rank(matrix: Tensor) -> Tensor:  # (..., m, n) -> (...)
    """Squared Frobenius norm over squared largest singular value. Dense.

        |A|_F^2 / sigma_1^2

    Spec: M-SPE-2.
    From Rudelson and Vershynin (2007), Sampling from large matrices: an approach through geometric functional analysis.

    >>> stable_rank(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    tensor(2.)
    """
    s: Tensor = torch.linalg.svdvals(matrix)
    return s.square().sum(-1) / s[..., 0].square()


def stable_rank_bound(renyi2: Tensor) -> Tensor:  # (..., n_query) -> (...)
    """What wide rows allow at most: the sum of their collision probabilities.

        stable rank <= sum_i exp(-H2_i) = |A|_F^2,       as sigma_1 >= 1 for square row-stochastic A

    H2 from `information.renyi_entropy`, which streams. Spec: M-SPE-4.

    >>> stable_rank_bound(torch.tensor([4.0, 4.0, 2.0]).log())  # 1/4 + 1/4 + 1/2
    tensor(1.)
    """
    return torch.exp(-renyi2).sum(-1)


def stable_rank_streaming(
    query: Tensor,  # (..., n, dim)
    key: Tensor,  # (..., n, dim)
    *,
    scale: Number = 1.0,
    bias: Tensor | None = None,
    support: Support | None = None,
    steps: int = 100,
) -> Tensor:  # (...)
    """The stable rank of an attention matrix that is never built.

        sum_i exp(-H2_i) / sigma_1^2

    Spec: M-SPE-2, M-SPE-4.

    >>> x = torch.zeros(4, 1, dtype=torch.float64)
    >>> round(stable_rank_streaming(x, x).item(), 6)  # uniform: rank 1
    1.0
    """
    log_mass = collision_log_mass(query, key, scale=scale, bias=bias, support=support)
    top = singular_value(Gibbs(query, key, scale=scale, bias=bias, support=support), steps=steps)
    return log_mass.exp().sum(-1) / top.square()


def von_neumann_entropy(matrix: Tensor) -> Tensor:  # (..., m, n) -> (...)
    """Entropy of the density matrix made from A: between 0 and log rank; not the entropy of its rows. Dense.

        S = -tr(rho log rho),     rho = A^T A / tr(A^T A)

    Spec: M-SPE-3.
    From von Neumann (1932), Mathematische Grundlagen der Quantenmechanik.

    >>> von_neumann_entropy(torch.eye(4))  # log 4
    tensor(1.3863)
    """
    q: Tensor = torch.linalg.svdvals(matrix).square()
    return entropy_of(q / q.sum(-1, keepdim=True))


def eigenvalue_entropy(matrix: Tensor) -> Tensor:  # (..., n, n) -> (...) complex
    """The sum -sum e log e over eigenvalues of A itself, kept to show that it is complex and means nothing. Dense.

        -sum_i e_i log e_i          (0 log 0 = 0)

    Use `von_neumann_entropy`. Spec: M-SPE-3.

    >>> abs(eigenvalue_entropy(torch.full((4, 4), 0.25).double()).item()) < 1e-9  # 0, though the rows have log 4
    True
    """
    e = torch.linalg.eigvals(matrix)
    return -torch.where(e.abs() > 1e-12, e * e.log(), 0.0).sum(-1)
