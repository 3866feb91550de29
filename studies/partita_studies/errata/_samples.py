"""Fixed random numbers and small examples that several rows of the errata share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partita.theory.information import entropy, optimal_gaussian_critic

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    """A generator of its own, so that no row depends on another."""
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator(seed), dtype=F64)


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Uniform numbers in float64."""
    return torch.rand(*shape, generator=generator(seed), dtype=F64)


def mean_entropy(scores: Tensor, scale: float = 1.0) -> float:
    """Entropy of softmax(scale * scores), averaged over rows."""
    return float(entropy(scale * scores).mean())


def power(x: Tensor, y: Tensor) -> float:
    """Slope of the least-squares line of log|y| against log x."""
    a, b = x.double().log(), y.double().abs().log()
    a = a - a.mean()
    return float((a * b).sum() / a.square().sum())


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
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        (out,) = torch.autograd.grad(f(leaf), leaf)
    return out.detach()
