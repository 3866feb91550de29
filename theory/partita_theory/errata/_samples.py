"""Fixed random numbers and small examples that several rows of the errata share."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.support import mask
from partita_theory._domain import Number
from partita_theory.information import entropy, optimal_gaussian_critic
from partita_theory.robustness import GaussianNoise, monte_carlo_noise

F64 = torch.float64
NOISE = GaussianNoise(0.5)


def generator(seed: int = 0) -> torch.Generator:
    """A generator of its own, so that no row depends on another."""
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator(seed), dtype=F64)


def vector(*entries: float) -> Tensor:
    """These numbers in float64."""
    return torch.tensor(entries, dtype=F64)


def one_above(n: int, lead: float) -> Tensor:
    """n scores, the first `lead` and the others 0."""
    return torch.nn.functional.pad(vector(lead), (0, n - 1))


def uniform(n: int) -> Tensor:
    """n equal weights."""
    return torch.full((n,), 1 / n, dtype=F64)


def softmax(scores: Tensor) -> Tensor:
    """torch's, over the last axis."""
    return torch.softmax(scores, -1)


def weights(scores: Tensor, *, scale: float = 1.0, visible: Tensor) -> Tensor:
    """The law of one row of scores, of which a mask shows some, as partita computes it."""
    return Gibbs(scores.new_ones(1, 1), scores[:, None], scale=scale, support=mask(visible[None])).probs()[0]


def mean_entropy(scores: Tensor, scale: Number = 1.0) -> float:
    """Entropy of softmax(scale * scores), averaged over rows."""
    return float(entropy(scale * scores).mean())


def query_entropy(n: int, scale: Number, rows: int = 200) -> float:
    """The same for the scores of random queries of dim 64 over n random keys: normal, of standard deviation |q|."""
    g = generator(n)
    q = torch.randn(rows, 64, generator=g, dtype=F64)
    return mean_entropy(q.norm(dim=-1, keepdim=True) * torch.randn(rows, n, generator=g, dtype=F64), scale)


def query_slope(scale: Callable[[int], Number], low: int = 2**9, high: int = 2**14) -> float:
    """dH / dlog n of these queries between two lengths."""
    return (query_entropy(high, scale(high)) - query_entropy(low, scale(low))) / log(high / low)


def power(sizes: tuple[int, int], values: list[Tensor]) -> float:
    """The exponent of n with which a positive or negative number grows between two sizes."""
    return log(abs(values[1] / values[0])) / log(sizes[1] / sizes[0])


def noisy_sd(scores: Tensor, values: Tensor, draws: int, seed: int = 0) -> Tensor:
    """Standard deviation of an output under `NOISE`, measured."""
    return monte_carlo_noise(scores, values, NOISE, draws=draws, generator=generator(seed))[0].sd


def critic_losses(n: int, count: int, *, rho: float, critic: float, dim: int = 4, seed: int = 0) -> Tensor:
    """InfoNCE losses of correlated Gaussian pairs with n - 1 negatives from the marginal and the critic of `critic`."""
    y = randn(count, dim, seed=seed)
    x = rho * y + (1 - rho**2) ** 0.5 * randn(count, dim, seed=seed + 1)
    negatives = randn(count, n - 1, dim, seed=seed + 2)
    candidates = torch.cat([x[:, None], negatives], 1)
    f = torch.stack([optimal_gaussian_critic(c, w[None], critic)[:, 0] for c, w in zip(candidates, y, strict=True)])
    return torch.logsumexp(f, -1) - f[:, 0]


def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a scalar function by autograd: the measurement that closed forms are held against."""
    slope: Tensor = torch.autograd.functional.jacobian(f, x)
    return slope
