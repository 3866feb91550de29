"""Noise on scores: exponential moments of three families, with the domains where they exist."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require, where

__all__ = ["GaussianNoise", "LaplaceNoise", "Noise", "UniformNoise", "correlated_sigma", "laplace_error_exponent"]


@dataclass(frozen=True)
class Noise:
    """Zero-mean noise added to every score of a row; a common mean would cancel and is left out."""

    def exponential_moment(self) -> Tensor:
        """E[exp(noise)]."""
        raise TypeError("Noise is abstract; use GaussianNoise, UniformNoise or LaplaceNoise.")

    def cv2(self) -> Tensor:
        """Squared coefficient of variation of exp(noise): Var(e^noise) / E[e^noise]^2."""
        raise TypeError("Noise is abstract; use GaussianNoise, UniformNoise or LaplaceNoise.")

    def sample(
        self, *shape: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Independent draws."""
        raise TypeError("Noise is abstract; use GaussianNoise, UniformNoise or LaplaceNoise.")


@dataclass(frozen=True)
class GaussianNoise(Noise):
    """Normal noise.

        E[e^x] = exp(sigma^2 / 2),     cv^2 = exp(sigma^2) - 1

    Spec: M-ROB-3.

    >>> round(GaussianNoise(1.0).cv2().item(), 4)  # e - 1
    1.7183
    """

    sigma: float

    def __post_init__(self) -> None:
        require(self.sigma >= 0, f"sigma is a standard deviation, so sigma >= 0; got {self.sigma}.")

    def exponential_moment(self) -> Tensor:
        return torch.exp(number(self.sigma) ** 2 / 2)

    def cv2(self) -> Tensor:
        return torch.expm1(number(self.sigma) ** 2)

    def sample(
        self, *shape: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        return self.sigma * torch.randn(*shape, generator=generator, dtype=dtype, device=where(generator))


@dataclass(frozen=True)
class UniformNoise(Noise):
    """Uniform noise on [-radius, radius].

        E[e^x] = sinh(a) / a,     cv^2 = a coth(a) - 1

    Spec: M-ROB-3.

    >>> round(UniformNoise(1.5).exponential_moment().item(), 4)  # 2.1293 / 1.5
    1.4195
    """

    radius: float

    def __post_init__(self) -> None:
        require(self.radius >= 0, f"radius is half a length, so radius >= 0; got {self.radius}.")

    def exponential_moment(self) -> Tensor:
        a = number(self.radius)
        return torch.where(a > 1e-4, torch.sinh(a) / a.clamp(min=1e-4), 1 + a**2 / 6)

    def cv2(self) -> Tensor:
        a = number(self.radius)
        # a coth a - 1 cancels near 0, where it is a^2 / 3 - a^4 / 45.
        return torch.where(a > 1e-2, a / torch.tanh(a.clamp(min=1e-2)) - 1, a**2 / 3 - a**4 / 45)

    def sample(
        self, *shape: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        return self.radius * (2 * torch.rand(*shape, generator=generator, dtype=dtype, device=where(generator)) - 1)


@dataclass(frozen=True)
class LaplaceNoise(Noise):
    """Laplace noise with density exp(-|x| / b) / (2 b): its tail is as heavy as exp(x) can bear.

        E[e^x] = 1 / (1 - b^2)   for b < 1,      cv^2 = b^2 (2 + b^2) / (1 - 4 b^2)   for b < 1/2

    Beyond these the moments are infinite and asking for them is an error; sampling always works.
    Spec: M-ROB-3, M-ROB-4.

    >>> round(LaplaceNoise(0.3).exponential_moment().item(), 4)  # 1 / 0.91
    1.0989
    """

    b: float

    def __post_init__(self) -> None:
        require(self.b >= 0, f"b is a width, so b >= 0; got {self.b}.")

    def exponential_moment(self) -> Tensor:
        require(self.b < 1, f"E[exp(noise)] is infinite for Laplace noise with b >= 1; got b = {self.b}. Use b < 1.")
        return 1 / (1 - number(self.b) ** 2)

    def cv2(self) -> Tensor:
        require(
            self.b < 0.5,
            f"the variance of exp(noise) is infinite for Laplace noise with b >= 1/2; got b = {self.b}. "
            "Use b < 1/2, or laplace_error_exponent for the rate that is left.",
        )
        b2 = number(self.b) ** 2
        return b2 * (2 + b2) / (1 - 4 * b2)

    def sample(
        self, *shape: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        u = torch.rand(*shape, generator=generator, dtype=dtype, device=where(generator)) - 0.5
        return -self.b * u.sign() * torch.log1p(-2 * u.abs())


def laplace_error_exponent(b: float) -> float:
    """The power of n with which the typical error of a spread-out row falls under Laplace noise.

        -1/2 for b < 1/2,      -(1 - b) for 1/2 < b < 1,      0 (no cancellation) for b >= 1

    At b = 1/2 and b = 1 there are logarithms on top. Spec: M-ROB-4.

    >>> round(laplace_error_exponent(0.7), 6)
    -0.3
    """
    require(b >= 0, f"b is a width, so b >= 0; got {b}.")
    return -0.5 if b <= 0.5 else min(0.0, b - 1.0)


def correlated_sigma(sigma: Number, rho: Number) -> Tensor:
    """The part of equicorrelated Gaussian noise that a softmax notices: what all keys share cancels.

        sigma_eff = sigma * sqrt(1 - rho)

    Spec: M-ROB-5, M-GIB-2.

    >>> correlated_sigma(2.0, 0.75).item()
    1.0
    """
    sigma, rho = number(sigma), number(rho)
    require((rho >= 0) & (rho <= 1), f"rho is a correlation shared by all keys, so 0 <= rho <= 1; got {rho}.")
    return sigma * (1 - rho).sqrt()
