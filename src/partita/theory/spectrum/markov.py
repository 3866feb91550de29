"""An attention matrix as a Markov operator that is applied, never built.

A forward step is an expectation; a backward step is the gradient of an expectation with respect to its values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.theory._domain import require, require_shape, where

__all__ = [
    "Stationary",
    "dobrushin",
    "leading_eigenvalues",
    "pull",
    "push",
    "singular_value",
    "spectral_gap",
    "stationary",
]


class Stationary(NamedTuple):
    """A law that a step leaves alone, and how nearly it does."""

    probs: Tensor  # (..., n)
    residual: Tensor  # (...), l1 distance between the law and its image
    steps: int


def push(gibbs: Gibbs, x: Tensor) -> Tensor:  # (..., n_key) -> (..., n_query)
    """A step of the operator: average x over the keys each row sees. Streams.

        (A x)_i = sum_j p(j|i) x_j

    Spec: M-SPE-1.

    >>> from partita import Gibbs
    >>> push(Gibbs(torch.zeros(2, 1), torch.zeros(4, 1)), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([2.5000, 2.5000])
    """
    return gibbs.expectation(x[..., None].to(gibbs.query.dtype)).squeeze(-1)


def pull(gibbs: Gibbs, y: Tensor) -> Tensor:  # (..., n_query) -> (..., n_key)
    """A step of the transposed operator: where mass on the rows goes. Streams; not differentiable itself.

        (A^T y)_j = sum_i p(j|i) y_i  =  d <y, A x> / d x_j

    Spec: M-SPE-1.

    >>> from partita import Gibbs
    >>> pull(Gibbs(torch.zeros(2, 1), torch.zeros(4, 1)), torch.tensor([0.5, 0.5]))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    with torch.enable_grad():
        shape = (*y.shape[:-1], gibbs.key.shape[-2])
        x = torch.zeros(shape, dtype=gibbs.query.dtype, device=y.device, requires_grad=True)
        image = push(gibbs, x)
        (out,) = torch.autograd.grad(image, x, y.to(image.dtype))
    return out


def stationary(gibbs: Gibbs, *, steps: int = 200, tolerance: float = 1e-10) -> Stationary:
    """The law of the keys after many steps, by power iteration from the uniform law. Streams.

        pi = A^T pi,     sum pi = 1

    Unique when every key is visible to every row. Under a causal mask all mass ends on the first key. Rows without
    keys lose mass, which is put back. Square operators only. Spec: M-SPE-1.

    >>> from partita import Gibbs
    >>> stationary(Gibbs(torch.zeros(4, 1), torch.zeros(4, 1))).probs
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    n = _square(gibbs)
    batch = gibbs.log_partition().shape[:-1]
    probs = torch.full((*batch, n), 1.0 / n, dtype=gibbs.query.dtype, device=gibbs.query.device)
    residual = torch.full(batch, torch.inf, dtype=probs.dtype, device=probs.device)
    taken = 0
    for taken in range(1, steps + 1):  # noqa: B007 (reported)
        new = pull(gibbs, probs)
        new = new / new.sum(-1, keepdim=True)
        residual = (new - probs).abs().sum(-1)
        probs = new
        if bool((residual <= tolerance).all()):
            break
    return Stationary(probs, residual, taken)


def leading_eigenvalues(
    gibbs: Gibbs, k: int = 4, *, steps: int = 12, generator: torch.Generator | None = None
) -> Tensor:  # (k,) complex
    """The k eigenvalues of largest modulus, from a Krylov space built by expectations alone. Streams; one operator.

        V = orthonormal basis of [X, A X, A^2 X, ...],     eigenvalues of the small V^T A V

    The first is 1 (a weighted mean of ones is one). Others may be complex or negative. X has k columns, so that an
    eigenvalue that repeats up to k times is seen as often. Keeps k * steps vectors of length n; exact once that
    reaches n, approximate before. Spec: M-SPE-1.

    >>> from partita import Gibbs
    >>> e = leading_eigenvalues(Gibbs(torch.zeros(4, 1).double(), torch.zeros(4, 1).double()), 2)
    >>> [round(abs(x), 6) for x in e.tolist()]  # the uniform operator: 1, then nothing
    [1.0, 0.0]
    """
    n = _square(gibbs)
    require_shape(gibbs.log_partition().dim() == 1, "leading_eigenvalues takes one operator; loop over the batch.")
    require(k >= 1, f"k must be at least 1; got {k}.")
    drawn = torch.randn(n, min(k, n), generator=generator, dtype=torch.float64, device=where(generator))
    block = drawn.to(gibbs.query.device)
    basis, images = block[:, :0], block[:, :0]
    for _ in range(steps):
        block = _new_directions(basis, block)
        if block.shape[1] == 0:
            break
        image = gibbs.expectation(block.to(gibbs.query.dtype)).double().detach()
        basis, images, block = torch.cat([basis, block], 1), torch.cat([images, image], 1), image
    values = torch.linalg.eigvals(basis.T @ images)
    order = values.abs().argsort(descending=True)[:k]
    return torch.nn.functional.pad(values[order], (0, k - len(order)))


def spectral_gap(gibbs: Gibbs, *, steps: int = 12, generator: torch.Generator | None = None) -> Tensor:  # ()
    """How fast repeated attention forgets: one minus the second largest modulus. Streams.

        1 - |lambda_2|

    0 when the operator does not mix (packed sequences, permutations). Spec: M-SPE-1.

    >>> from partita import Gibbs
    >>> round(spectral_gap(Gibbs(torch.zeros(4, 1).double(), torch.zeros(4, 1).double())).item(), 6)
    1.0
    """
    # Four columns where two are asked for: a wider block converges in fewer passes, and a pass is what costs.
    return 1 - leading_eigenvalues(gibbs, 4, steps=steps, generator=generator)[1].abs()


def singular_value(
    gibbs: Gibbs, *, steps: int = 100, tolerance: float = 1e-9, generator: torch.Generator | None = None
) -> Tensor:  # (...)
    """The largest singular value, by power iteration on A^T A. Streams.

        sigma_1 = max |A x| / |x|  >= 1   for square A

    Spec: M-SPE-4.

    >>> from partita import Gibbs
    >>> round(singular_value(Gibbs(torch.zeros(4, 1).double(), torch.zeros(4, 1).double())).item(), 6)
    1.0
    """
    batch = gibbs.log_partition().shape[:-1]
    size = (*batch, gibbs.key.shape[-2])
    x = 1 + 0.1 * torch.rand(size, generator=generator, dtype=torch.float64, device=where(generator))
    x = (x / x.norm(dim=-1, keepdim=True)).to(gibbs.query.device, gibbs.query.dtype)
    value = torch.zeros(batch, dtype=x.dtype, device=x.device)
    for _ in range(steps):
        image = push(gibbs, x)
        new = image.square().sum(-1).sqrt()
        back = pull(gibbs, image)
        x = back / back.norm(dim=-1, keepdim=True)
        if bool(((new - value).abs() <= tolerance * new).all()):
            return new
        value = new
    return value


def dobrushin(matrix: Tensor) -> Tensor:  # (..., n, n) -> (...)
    """A bound on the second eigenvalue: how different two rows can be. Dense, O(n^3).

        max_ij |A_i - A_j|_1 / 2  >=  |lambda_2|

    0 when all rows are equal, 1 when two have no common key. Spec: M-SPE-1.
    From Dobrushin (1956), Central limit theorem for nonstationary Markov chains.

    >>> dobrushin(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    tensor(0.2500)
    """
    return torch.cdist(matrix, matrix, p=1.0).amax((-1, -2)) / 2


def _new_directions(basis: Tensor, block: Tensor) -> Tensor:  # (n, m), (n, b) -> (n, at most b)
    """An orthonormal basis of what block adds to basis; columns that add nothing are dropped."""
    size = block.square().sum(0).sqrt().clamp(min=torch.finfo(block.dtype).tiny)
    block = block / size
    for _ in range(2):  # twice is enough: once loses orthogonality
        block = block - basis @ (basis.T @ block)
    q, r = torch.linalg.qr(block)
    fresh: Tensor = q[:, r.diagonal().abs() > 1e-10]
    return fresh - basis @ (basis.T @ fresh)


def _square(gibbs: Gibbs) -> int:
    n, m = gibbs.query.shape[-2], gibbs.key.shape[-2]
    require_shape(n == m, f"eigenvalues need as many queries as keys; got {n} queries and {m} keys.")
    return int(n)
