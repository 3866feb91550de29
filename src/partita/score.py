"""Scores other than the inner product, given to `Gibbs` or `attention` as `score=`.

    score_ij = scale_i * score(query_i, key_j) + bias_ij

`Cosine`, `SquaredDistance` and `Bilinear` are inner products of other vectors, which their `features` return: every
backend serves them. `Distance`, `Additive`, `LogSigmoid` and other callables are functions of a tile of queries and a
tile of keys, which the tiled backend calls a tile at a time, and again in the backward pass.

    function(query (..., q, dim), key (..., k, dim_key)) -> (..., q, k)        leading dimensions broadcast

Such a function is deterministic and pairwise. A module's parameters get their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partita._checks import check_number, check_positive, check_whole
from partita.errors import ShapeError
from partita.precision import accumulation_dtype, lowered, product

__all__ = ["Additive", "Bilinear", "Cosine", "Distance", "InnerProduct", "LogSigmoid", "Score", "SquaredDistance"]

Score = Callable[[Tensor, Tensor], Tensor]
"""(query (..., q, dim), key (..., k, dim_key)) -> (..., q, k)"""


class InnerProduct:
    """Abstract: a score that is the inner product of features of query and key; any backend serves it."""

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors whose inner products are the scores."""
        raise TypeError("InnerProduct is abstract; use partita.score.Cosine() and its like.")

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:  # (..., q, k)
        """All scores, dense."""
        query, key = self.features(query, key)
        return product(query, key.mT)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Cosine(InnerProduct):
    """The cosine of the angle between query and key, between -1 and 1: the scale sets the sharpness (M-INF-2).

        score = <query, key> / (max(|query|, eps) * max(|key|, eps))

    >>> Cosine()(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def __init__(self, eps: float = 1e-12):
        check_positive("eps", eps)
        self.eps = eps

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.nn.functional.normalize(x, dim=-1, eps=self.eps) for x in (query, key))  # type: ignore[return-value]


class SquaredDistance(InnerProduct):
    """Minus half the squared distance: the score of a mixture of Gaussians of width 1 / sqrt(scale).

        score = -|query - key|^2 / 2 = <query, key> - |key|^2 / 2 - |query|^2 / 2

    An inner product of longer vectors, so any backend serves it. The squares are taken in float32 or better; half
    dtypes use several features for their digits. Digits are lost where both vectors are long and close together:
    subtract a common offset first.

    >>> SquaredDistance()(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0], [4.0, 5.0]]))
    tensor([[  0.0000, -12.5000]])
    """

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        _check_same_size(query, key)
        query, key = lowered(query), lowered(key)  # before the squares: they are those of the vectors compared
        own, other = _columns(query), _columns(key)
        ones = torch.ones_like(own), torch.ones_like(other)
        return torch.cat([query, ones[0], own], -1), torch.cat([key, other, ones[1]], -1)


def _columns(x: Tensor) -> Tensor:
    """-|x|^2 / 2 as features of x's dtype that add up to it."""
    rest = x.to(accumulation_dtype(x.dtype)).square().sum(-1, keepdim=True) / -2
    pieces = []
    for _ in range({torch.bfloat16: 3, torch.float16: 2}.get(x.dtype, 1)):
        pieces.append(rest.to(x.dtype))
        rest = rest - pieces[-1].to(rest.dtype)
    return torch.cat(pieces, -1)


class Bilinear(nn.Module, InnerProduct):
    """A learned bilinear form, for queries and keys of any sizes (M-ATT-2).

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
        _check_same_size(query, key)
        if torch.compiler.is_compiling():
            return -_cdist(query, key, self.p)
        if torch._C._are_functorch_transforms_active():
            # torch's derivative of cdist is wrong under a vmap that maps only the incoming gradient
            return -_written_out(query, key, self.p)
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
            found: Tensor = _Distances.apply(query, key, self.p)  # type: ignore[no-untyped-call]
            return -found
        return -_cdist(query, key, self.p)

    def __repr__(self) -> str:
        return f"Distance(p={self.p})"


def _cdist(query: Tensor, key: Tensor, p: float) -> Tensor:
    # the product form would lose the digits of small distances
    return torch.cdist(query, key, p=p, compute_mode="donot_use_mm_for_euclid_dist")


def _written_out(query: Tensor, key: Tensor, p: float) -> Tensor:
    gap = query[..., :, None, :] - key[..., None, :, :]
    none = (gap == 0).all(-1)  # the slope of a distance of 0 is 0; the second one would be nan
    lengths = torch.linalg.vector_norm(torch.where(none[..., None], torch.ones_like(gap), gap), p, dim=-1)
    return torch.where(none, torch.zeros_like(lengths), lengths)


class _Distances(torch.autograd.Function):
    """torch.cdist; its second derivative, which torch lacks, is that of the written out differences."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.p = p
        with torch.enable_grad():
            leaves = tuple(
                x.detach().requires_grad_(needed)
                for x, needed in zip((query, key), ctx.needs_input_grad[:2], strict=True)
            )
            found = _cdist(leaves[0], leaves[1], p)
        ctx.first = leaves, found
        return found.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        twice = torch.is_grad_enabled()
        with torch.enable_grad():
            # one tensor may be both, and has a slope as each
            given, found = (tuple(x.view_as(x) for x in ctx.saved_tensors), None) if twice else ctx.first
            found = _written_out(given[0], given[1], ctx.p) if found is None else found
            wanted = [x for x, needed in zip(given, ctx.needs_input_grad, strict=False) if needed]
            slopes = iter(torch.autograd.grad(found, wanted, g, create_graph=twice, retain_graph=True))
        return *(next(slopes) if needed else None for needed in ctx.needs_input_grad[:2]), None


class Additive(nn.Module):
    """The additive score: a network of one hidden layer on each pair of query and key.

        score = <v, tanh(W query + U key + b)>

    The two linear maps are computed once; a tile holds `hidden` numbers per pair.

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
        """The operands of a tile: v is appended to each query."""
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
        """All scores, dense."""
        return self.pairs(*self.features(query, key))


class LogSigmoid(nn.Module):
    """The logarithm of a sigmoid: its softmax is sigmoids divided by their sum, where no key can outweigh a set.

        score = log sigmoid(sharpness * <query, key> - threshold),       p_j = sigmoid(..)_j / sum_k sigmoid(..)_k

    The chance that a key is relevant, given its score, is such a sigmoid. Far below the threshold sigmoid(x) is e^x:
    with a high one this is the softmax of sharpness * <query, key>. A scale beside it is a power of the sigmoids.

    >>> p = partita.Gibbs(torch.ones(1, 1), torch.tensor([[9.0], [99.0], [-2.0]]), score=LogSigmoid())
    >>> p.probs()  # above the threshold keys count alike
    tensor([[0.4718, 0.4719, 0.0563]])

    sharpness, threshold: numbers; or where one of each per head starts, to be learned, if `heads` is given.
    """

    per_pair = 1

    def __init__(
        self,
        sharpness: float = 1.0,
        threshold: float = 0.0,
        *,
        heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("sharpness", sharpness, zero=True)
        check_number("threshold", threshold)
        self.sharpness: float | nn.Parameter = sharpness
        self.threshold: float | nn.Parameter = threshold
        if heads is not None:
            check_whole("heads", heads, least=1)
            for name, start in (("sharpness", sharpness), ("threshold", threshold)):
                delattr(self, name)
                setattr(self, name, nn.Parameter(torch.full((heads,), float(start), device=device, dtype=dtype)))

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:  # (..., q, dim + 2), (..., k, dim)
        """The operands of a tile: its row's sharpness and threshold are appended to each query."""
        _check_same_size(query, key)
        if not query.shape[-1]:
            raise ShapeError("this score needs one feature or more; query and key have none.")
        heads = self.sharpness.shape[0] if isinstance(self.sharpness, Tensor) else 1
        if heads > 1 and (query.dim() < 3 or query.shape[-3] not in (1, heads)):
            raise ShapeError(f"this score has {heads} heads, third from the right; got query {tuple(query.shape)}.")
        ones = torch.ones_like(query[..., :1])
        own = [
            ones * (x[:, None, None].to(query.dtype) if isinstance(x, Tensor) else x)
            for x in (self.sharpness, self.threshold)
        ]
        return torch.cat([query, *own], -1), key

    @staticmethod
    def pairs(query: Tensor, key: Tensor) -> Tensor:  # (..., q, k)
        """The scores of a tile, from its features."""
        return nn.functional.logsigmoid(product(query[..., :-2], key.mT) * query[..., -2:-1] - query[..., -1:])

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """All scores, dense."""
        return self.pairs(*self.features(query, key))

    def extra_repr(self) -> str:
        learned = f"heads={len(self.sharpness)}" if isinstance(self.sharpness, Tensor) else ""
        return learned or f"{self.sharpness}, {self.threshold}"


def _check_same_size(query: Tensor, key: Tensor) -> None:
    own, other = query.shape[-1], key.shape[-1]
    if own != other:
        raise ShapeError(f"a distance needs query and key with the same number of features; got {own} and {other}.")


def _check_sizes(*given: tuple[Tensor, str, int]) -> None:
    for tensor, name, size in given:
        if tensor.shape[-1] != size:
            raise ShapeError(f"this score takes a {name} of {size} features; got {tuple(tensor.shape)}.")
