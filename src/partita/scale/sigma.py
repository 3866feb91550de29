"""Policies with a sigma, the standard deviation of a row's raw scores <query, key>, and its measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, library

from partita._checks import broadcast_batch, check_float, check_pair, check_positive, check_whole, has_values
from partita.engine.terms import Term, pack, unpack, window_mask
from partita.errors import ShapeError
from partita.scale.policies import Formula, check_reference
from partita.support import Support
from partita.support.base import check_support

__all__ = ["CalibratedLog", "GaussianEntropy", "critical_scale", "measure_sigma"]


@dataclass(frozen=True)
class CalibratedLog(Formula):
    """scale = kappa * log(n) / dim with kappa = dim / (sigma * sqrt(log reference)) (M-SCL-16).

    To leading order the entropy of Gaussian scores is then stationary around n = reference, and log(reference) / 2
    there. Finite rows keep more and still grow a little: at 4096 keys 4.63 nats, not 4.16, and 0.15 nats per nat of
    log n, where 1/sqrt(dim) grows by 1 (`partita_theory.sharpness.gaussian_entropy(..., finite=True)`). Under an
    additive position bias kappa is smaller by sqrt(growth), growth the speed dH/d log n at which the bias alone widens
    a row (`partita_theory.sharpness.bias_growth`); 1 without a bias.

    >>> CalibratedLog(4096, sigma=8.0)(4096, 64)  # sqrt(log 4096) / sigma
    tensor(0.3605, dtype=torch.float64)
    """

    reference: float
    sigma: float | Tensor
    growth: float = 1.0

    def __post_init__(self) -> None:
        check_reference(self.reference)
        _check_sigma(self.sigma)
        check_positive("growth", self.growth, zero=True)

    def kappa(self, dim: int) -> float | Tensor:
        return dim / (_number(self.sigma) * math.sqrt(math.log(self.reference))) * math.sqrt(self.growth)

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return self.kappa(dim) * n.log() / dim


@dataclass(frozen=True)
class GaussianEntropy(Formula):
    """scale = sqrt(2 * max(0, log n - entropy)) / sigma: H = log n - (scale * sigma)^2 / 2 held constant (M-SCL-14).

    The law is that of Gaussian scores and many keys; a target below about log(n) / 2 is missed: at 4096 keys 4 gives
    4.53 nats and 2 gives 3.53. `TargetEntropy` solves for the target itself.

    >>> GaussianEntropy(3.0, sigma=8.0)(2, 64)  # two keys cannot have more than log 2: no sharpness at all
    tensor(0., dtype=torch.float64)
    """

    entropy: float
    sigma: float | Tensor

    def __post_init__(self) -> None:
        check_positive("entropy", self.entropy, zero=True)
        _check_sigma(self.sigma)

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return (2 * (n.log() - self.entropy).clamp(min=0.0)).sqrt() / _number(self.sigma)


def _number(sigma: float | Tensor) -> float | Tensor:
    """A float, if its value is known."""
    return float(sigma) if isinstance(sigma, Tensor) and has_values(sigma) and sigma.numel() == 1 else sigma


def _check_sigma(sigma: float | Tensor) -> None:
    number = _number(sigma)
    if not isinstance(number, Tensor) or has_values(number):
        check_positive("sigma", number)  # type: ignore[arg-type]


def measure_sigma(query: Tensor, key: Tensor, support: Support | None = None) -> float:
    """Standard deviation of the raw scores <query, key> over a row's keys, pooled over rows with two keys or more.

        sigma^2 = mean_i Var_j <query_i, key_j>

    Streams over rows. A number, or inside a graph a tensor of no dimensions; policies take either.

    >>> measure_sigma(torch.tensor([[2.0]]), torch.tensor([[1.0], [-1.0]]))  # scores 2 and -2
    2.0
    """
    check_pair(query, key)
    check_support(support)
    batch = broadcast_batch((("query", query.shape[:-2]), ("key", key.shape[:-2])))
    terms = () if support is None else support.bind(query.shape[-2], key.shape[-2], batch, query.device)
    if torch.compiler.is_compiling():
        return torch.ops.partita.measure_sigma(query.detach(), key.detach(), *pack(terms))  # type: ignore[no-any-return]
    return float(_measure(query, key, terms))


@torch.no_grad()
def _measure(query: Tensor, key: Tensor, terms: Sequence[Term]) -> Tensor:
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    n_query, n_key = query.shape[-2], key.shape[-2]
    step = max(1, (1 << 21) // max(1, n_key * math.prod(batch)))
    total, rows = 0.0, 0
    for first in range(0, n_query, step):
        part = slice(first, min(first + step, n_query))
        score = query[..., part, :].double() @ key.double().mT
        seen = window_mask(terms, part, slice(0, n_key), query.device) if terms else None
        seen = torch.ones_like(score) if seen is None else seen.expand_as(score).double()
        n = seen.sum(-1)
        score = torch.where(seen > 0, score, torch.zeros_like(score))
        mean = score.sum(-1) / n.clamp(min=1)
        variance = (seen * (score - mean[..., None]) ** 2).sum(-1) / n.clamp(min=1)
        total += float(variance[n >= 2].sum())
        rows += int((n >= 2).sum())
    if rows == 0:
        raise ShapeError("measure_sigma needs a row that sees at least two keys.")
    return torch.tensor(math.sqrt(total / rows), dtype=torch.float64, device=query.device)


library.define("partita::measure_sigma", "(Tensor query, Tensor key, Tensor[] support, int[] layout) -> Tensor")


@library.impl("partita::measure_sigma", "CompositeExplicitAutograd")
def _(query: Tensor, key: Tensor, support: Sequence[Tensor], layout: Sequence[int]) -> Tensor:
    return _measure(query, key, unpack(support, layout))


@library.register_fake("partita::measure_sigma")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, support: Sequence[Tensor], layout: Sequence[int]) -> Tensor:
    return query.new_empty((), dtype=torch.float64)


def critical_scale(scores: Tensor, *, least: int = 2) -> Tensor:  # (..., n) -> (...)
    """The scale at which the best key of each row separates from its competitors; -inf is an invisible key.

        critical = max over j >= least of log(j) / gap_j          gap_j the j-th smallest gap to the maximum, gap_1 = 0

    For scores made with a scale, a factor of that scale. inf where the best key is tied, 0 where a row sees fewer keys
    than `least`. A larger `least` leaves out the nearest competitors, which are chance (M-COL-6).

    >>> critical_scale(torch.tensor([0.0, -1.0, -1.0, -1.0]))  # one key leads three by 1: log 4
    tensor(1.3863)
    """
    check_float("scores", scores)
    check_whole("least", least, least=2)
    if scores.dim() == 0:
        raise ShapeError("scores must have a last dimension of keys; got a single number. Give scores[None].")
    found = scores.sort(-1, descending=True).values
    best = found[..., :1]
    gaps = torch.where(found.isneginf(), torch.inf, torch.where(best.isneginf(), 0.0, best) - found)
    # cut before dividing: the best key's own log 1 / 0 would make the gradient of the row nan
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=gaps.dtype)[least - 1 :]
    each = count.log() / gaps[..., least - 1 :]  # log 2 / 0 = inf: a tie never parts
    if each.shape[-1] == 0:
        return torch.zeros(scores.shape[:-1], dtype=gaps.dtype, device=scores.device)
    return each.amax(-1)
