"""What is compared: scores other than the plain inner product, given to `Gibbs` or `attention` as `score=`.

    score_ij = scale_i * score(query_i, key_j) + bias_ij

Some are inner products of other vectors (`Cosine`, `SquaredDistance`, `Bilinear`): they say which, and every backend
serves them. All others are functions of a tile of queries and a tile of keys (`Distance`, `Additive`, or any callable):
the tiled backend calls them a tile at a time, and again in the backward pass.

    function(query (..., q, dim), key (..., k, dim_key)) -> (..., q, k)        leading dimensions broadcast

Such a function looks at pairs alone and gives the same numbers each time. A module's parameters get their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from partita._checks import check_positive, check_whole
from partita.errors import ShapeError
from partita.precision import accumulation_dtype, product

__all__ = ["Additive", "Bilinear", "Cosine", "Distance", "InnerProduct", "Score", "SquaredDistance"]

Score = Callable[[Tensor, Tensor], Tensor]
"""(query (..., q, dim), key (..., k, dim_key)) -> (..., q, k)"""


class InnerProduct:
    """Abstract: a score that is the inner product of features of query and key; any backend can serve it."""

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors whose inner products are the scores."""
        raise TypeError("InnerProduct is abstract; use partita.score.Cosine() and its like.")

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:  # (..., q, k)
        """The scores themselves, all at once."""
        query, key = self.features(query, key)
        return product(query, key.mT)


class Cosine(InnerProduct):
    """The cosine of the angle between query and key: between -1 and 1, so the scale alone makes it sharp (M-INF-2).

        score = <query, key> / (max(|query|, eps) * max(|key|, eps))

    >>> Cosine()(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def __init__(self, eps: float = 1e-12):
        check_positive("eps", eps)
        self.eps = eps

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.nn.functional.normalize(x, dim=-1, eps=self.eps) for x in (query, key))  # type: ignore[return-value]

    def __repr__(self) -> str:
        return "Cosine()"


class SquaredDistance(InnerProduct):
    """Minus half the squared distance: the score of a mixture of Gaussians of width 1 / sqrt(scale).

        score = -|query - key|^2 / 2 = <query, key> - |key|^2 / 2 - |query|^2 / 2

    An inner product of longer vectors, so any backend serves it. The squares are taken in float32 or better and, for
    half dtypes, carried by as many features as hold their digits. Like the identity itself it loses digits where both
    vectors are long and close together: subtract what they have in common first.

    >>> SquaredDistance()(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0], [4.0, 5.0]]))
    tensor([[  0.0000, -12.5000]])
    """

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if query.shape[-1] != key.shape[-1]:
            raise ShapeError(
                f"a distance needs query and key of as many features; got {query.shape[-1]} and {key.shape[-1]}."
            )
        own, other = _columns(query), _columns(key)
        ones = torch.ones_like(own), torch.ones_like(other)
        return torch.cat([query, ones[0], own], -1), torch.cat([key, other, ones[1]], -1)

    def __repr__(self) -> str:
        return "SquaredDistance()"


def _columns(x: Tensor) -> Tensor:
    """-|x|^2 / 2 as features of x's dtype that add up to it."""
    rest = x.to(accumulation_dtype(x.dtype)).square().sum(-1, keepdim=True) / -2
    pieces = []
    for _ in range({torch.bfloat16: 3, torch.float16: 2}.get(x.dtype, 1)):
        pieces.append(rest.to(x.dtype))
        rest = rest - pieces[-1].to(rest.dtype)
    return torch.cat(pieces, -1)


class Bilinear(nn.Module, InnerProduct):
    """A learned bilinear form, for queries and keys that may have different sizes (M-ATT-2).

        score = <query W, key> / sqrt(dim_key)

    W starts orthogonal: the scores of vectors of unit variance have variance 1.

    >>> form = Bilinear(2, 2)
    >>> with torch.no_grad():
    ...     _ = form.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> (form(torch.tensor([[1.0, 2.0]]), torch.eye(2)) * 2**0.5).detach()
    tensor([[2.0000, 1.0000]])
    """

    def __init__(
        self,
        dim: int,
        dim_key: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, size in (("dim", dim), ("dim_key", dim_key)):
            check_whole(name, size, least=1)
        self.weight = nn.Parameter(torch.empty(dim, dim_key, device=device, dtype=dtype))
        nn.init.orthogonal_(self.weight, gain=max(1.0, math.sqrt(dim_key / dim)))

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        _check_sizes((query, "query", self.weight.shape[0]), (key, "key", self.weight.shape[1]))
        return query @ self.weight.to(query.dtype) * self.weight.shape[1] ** -0.5, key

    forward = InnerProduct.__call__  # with the hooks of a module around it
    __call__ = nn.Module.__call__

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class Distance:
    """Minus the distance itself, |query - key|_p: its softmax has heavier tails than that of the squared distance.

        score = -(sum_d |query_d - key_d|^p)^(1/p)

    >>> Distance(p=1.0)(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
    tensor([[-7.]])
    """

    per_pair = 1  # numbers held for each pair

    def __init__(self, p: float = 2.0):
        check_positive("p", p)
        self.p = p

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        if query.shape[-1] != key.shape[-1]:
            raise ShapeError(
                f"a distance needs query and key of as many features; got {query.shape[-1]} and {key.shape[-1]}."
            )
        # the product form of torch.cdist would lose the digits of small distances
        return -torch.cdist(query, key, p=self.p, compute_mode="donot_use_mm_for_euclid_dist")

    def __repr__(self) -> str:
        return f"Distance(p={self.p})"


class Additive(nn.Module):
    """The additive score: a small network of one hidden layer on each pair of query and key.

        score = <v, tanh(W query + U key + b)>

    The two linear maps are taken once; a tile adds them up and holds `hidden` numbers for each of its pairs.

    >>> score = Additive(4, 6, hidden=8)
    >>> partita.Gibbs(torch.zeros(2, 4), torch.zeros(5, 6), score=score).entropy().detach()  # no preference: log 5
    tensor([1.6094, 1.6094])
    """

    def __init__(
        self,
        dim: int,
        dim_key: int,
        hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, size in (("dim", dim), ("dim_key", dim_key), ("hidden", hidden)):
            check_whole(name, size, least=1)
        self.query_proj = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.key_proj = nn.Linear(dim_key, hidden, bias=False, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        nn.init.uniform_(self.weight, -(hidden**-0.5), hidden**-0.5)

    @property
    def per_pair(self) -> int:
        return self.weight.shape[0]

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:  # (..., q, 2 hidden), (..., k, hidden)
        """What a tile is made from: each query brings v along, so that a tile needs nothing else."""
        _check_sizes((query, "query", self.query_proj.in_features), (key, "key", self.key_proj.in_features))
        dtype = query.dtype
        linear, v = nn.functional.linear, self.weight.to(dtype)
        own = linear(query, self.query_proj.weight.to(dtype), self.query_proj.bias.to(dtype))
        return torch.cat([own, v.expand_as(own)], -1), linear(key, self.key_proj.weight.to(dtype))

    @staticmethod
    def pairs(query: Tensor, key: Tensor) -> Tensor:  # (..., q, k)
        """The scores of a tile, from its features."""
        own, v = query.chunk(2, -1)
        return (torch.tanh(own[..., :, None, :] + key[..., None, :, :]) @ v[..., None]).squeeze(-1)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """The scores themselves, all at once."""
        return self.pairs(*self.features(query, key))


def _check_sizes(*given: tuple[Tensor, str, int]) -> None:
    for tensor, name, size in given:
        if tensor.shape[-1] != size:
            raise ShapeError(f"this score takes a {name} of {size} features; got {tuple(tensor.shape)}.")
