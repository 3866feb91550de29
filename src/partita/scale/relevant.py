"""The best scale when some keys matter: how it grows with the length depends on how their number does.

m of n keys are relevant. Raw scores are Gaussian with deviation sigma, around a margin for the relevant keys and around
0 for the others. Each relevant value is 1 plus noise, each other value noise alone, and the output should be 1:

    error(scale) = E[(1 - P)^2] + noise^2 E[sum p^2]         P = the sum of p over the relevant keys

With w = e^(scale score) and Z = sum w, every such mean is an integral of one variable, since 1 / Z^2 is the integral of
t e^(-t Z) and the mean of e^(-t Z) is a product over keys. Nothing is drawn, and no sum is replaced by its mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, library

from partita._checks import check_number, check_positive
from partita.errors import ValueRangeError
from partita.scale.policies import Formula, visible_keys

__all__ = ["BestFor", "BestScale", "best_for", "lowest", "reading"]

SHARPEST = 12.0  # the largest scale * sigma that is tried
OTHERS = 25  # a policy is solved for 1, 2, 4, ... 2^24 keys that are not relevant


class BestScale(NamedTuple):
    """A scale, the mean entropy of a row at it, and the mean squared error of its output."""

    scale: float
    entropy: float  # nats
    error: float


@functools.cache
def _normal() -> tuple[Tensor, Tensor]:
    """Places and weights for means over a standard normal number."""
    at = torch.linspace(-8.0, 8.0, 241, dtype=torch.float64, device="cpu")
    weight = torch.exp(-at.square() / 2)
    return at, weight / weight.sum()


def reading(scale: float, others: float, relevant: float, margin: float, noise: float) -> BestScale:
    """Entropy and error at a scale, for scores of deviation 1 and this many keys of either kind."""
    g, weight = _normal()
    step = 0.4
    low = -scale * (margin + 8) - math.log(others + relevant) - 25
    u = torch.arange(low, 8 * scale + 5, step, dtype=torch.float64, device="cpu")  # log t
    log_product = torch.zeros_like(u)
    pairs = squares = first = torch.zeros_like(u)
    for count, height in ((relevant, scale * margin), (others, 0.0)):
        tw = torch.exp(u[:, None] + height + scale * g).clamp(max=800.0)  # t w of one key; e^-800 = 0
        left = torch.exp(-tw)
        kept = (left @ weight).clamp(min=1e-300)
        gone = -torch.expm1(-tw) @ weight
        log_product = log_product + count * torch.where(gone < 0.5, torch.log1p(-gone.clamp(max=0.5)), kept.log())
        once, twice = ((tw**k * left) @ weight / kept for k in (1, 2))
        first = first + count * (height * once + scale * ((tw * left) @ (g * weight)) / kept)
        squares = squares + count * twice
        pairs = count * (count - 1) * once.square() + count * twice  # of the others, which come last
    product = log_product.exp()
    log_z = (torch.exp(-torch.exp(u)) - product).sum()
    error = (product * (pairs + noise**2 * squares)).sum()
    return BestScale(scale, float(log_z - (product * first).sum()) * step, float(error) * step)


def best_for(
    visible: float, relevant: float, *, margin: float, noise: float = 1.0, sigma: float = 1.0
) -> BestScale:  # fmt: skip
    """The scale that reads relevant keys with the least error, and the entropy it gives the row.

        scale = argmin E[(1 - P)^2] + noise^2 E[sum p^2]

    A small scale averages what is irrelevant too, a large one trusts a few noisy values. `margin` and `sigma` have the
    units of the raw scores; `noise` is the deviation of a value, where relevant values are 1 on average. Scales up to
    12 / sigma are considered. Where all keys are relevant the best is 0.

    >>> best_for(8, 8, margin=4.0, noise=0.5)  # the mean of eight values: 0.25 / 8
    BestScale(scale=0.0, entropy=2.0794415416798357, error=0.03125)
    """
    for name, value in (("visible", visible), ("relevant", relevant), ("sigma", sigma), ("margin", margin)):
        check_positive(name, value)
    check_positive("noise", noise, zero=True)
    if relevant < 1 or visible < 1:
        raise ValueRangeError(f"there must be a relevant key or more; got {relevant} of {visible}.")
    if relevant >= visible:
        return BestScale(0.0, math.log(visible), noise**2 / visible)
    found = _least(visible - relevant, relevant, margin / sigma, noise)
    return found._replace(scale=found.scale / sigma)


@functools.lru_cache(maxsize=4096)
def _least(others: float, relevant: float, margin: float, noise: float) -> BestScale:
    """By the logarithm of the scale."""

    def error(x: float) -> float:
        return reading(math.exp(x), others, relevant, margin, noise).error

    best = lowest(error, math.log(0.05), math.log(SHARPEST), 1e-3)
    return reading(math.exp(best), others, relevant, margin, noise)


def lowest(function: Callable[[float], float], low: float, high: float, within: float) -> float:
    """Where a function with one minimum between low and high has it, by golden section.

    >>> round(lowest(lambda x: (x - 2) ** 2, 0.0, 5.0, 1e-6), 4)
    2.0
    """
    part = (math.sqrt(5) - 1) / 2
    a, b = high - part * (high - low), low + part * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > within:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - part * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + part * (high - low)
            at_b = function(b)
    return (low + high) / 2


@dataclass(frozen=True)
class BestFor(Formula):
    """scale = best_for(n, relevant).scale, the best to read relevant keys with (M-SCL-21).

    Give one of: relevant, how many keys matter in every row, or share, which part of its visible keys does (one key
    at least). Solved once, for 1, 2, 4, ... 2^24 other keys, and interpolated. A row that sees relevant keys alone has
    scale 0: their mean.

    >>> number, share = BestFor(relevant=8, margin=4.0), BestFor(share=1 / 32, margin=4.0)
    >>> [round(float(policy(16384, 64) / policy(256, 64)), 1) for policy in (number, share)]  # log n doubles, nearly
    [2.0, 1.3]
    """

    relevant: float | None = None
    share: float | None = None
    margin: float = field(kw_only=True)
    noise: float = field(default=1.0, kw_only=True)
    sigma: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        if (self.relevant is None) == (self.share is None):
            raise ValueRangeError(f"give relevant or share, not both; got {self.relevant!r} and {self.share!r}.")
        if self.relevant is not None:
            check_number("relevant", self.relevant)
            if self.relevant < 1:
                raise ValueRangeError(
                    f"relevant must be 1 key or more; got {self.relevant!r}. A part of the keys is share=."
                )
        if self.share is not None:
            check_number("share", self.share, least=0, most=1)
            if self.share in (0, 1):
                raise ValueRangeError(f"share must be strictly between 0 and 1; got {self.share!r}.")
        check_positive("margin", self.margin)
        check_positive("noise", self.noise, zero=True)
        check_positive("sigma", self.sigma)

    def entropy(self, visible: Tensor | int) -> Tensor:
        """The mean entropy of a row of the model at this scale, in nats: what a target for a head could be."""
        n, others = self._others(visible)
        return torch.where(others > 0, self._between(others, 1), n.log())

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        others = self._others(n)[1]
        return torch.where(others > 0, self._between(others, 0), torch.zeros_like(n)) / self.sigma

    def _others(self, visible: Tensor | int) -> tuple[Tensor, Tensor]:
        n = visible_keys(visible)
        relevant = torch.full_like(n, self.relevant) if self.relevant else (n * (self.share or 0.0)).clamp(min=1.0)
        return n, n - relevant

    def _between(self, others: Tensor, column: int) -> Tensor:
        model = self.relevant or 1.0, self.share or 0.0, self.margin / self.sigma, self.noise
        solved = torch.ops.partita.best_scales(others, *model) if torch.compiler.is_compiling() else _solved(*model)
        values = solved[:, column].to(others)
        at = others.clamp(min=1.0).log2().clamp(max=OTHERS - 1)
        left = at.floor().clamp(max=OTHERS - 2)
        return torch.lerp(values[left.long()], values[left.long() + 1], at - left)


@functools.lru_cache(maxsize=256)
def _solved(relevant: float, share: float, margin: float, noise: float) -> Tensor:  # (OTHERS, 2)
    """Scale and entropy for 1, 2, 4, ... other keys; of a share, with the relevant ones that go with them."""
    counts = [2.0**k for k in range(OTHERS)]
    found = [_least(k, max(relevant, share * k / (1 - share)), margin, noise) for k in counts]
    return torch.tensor([(best.scale, best.entropy) for best in found], dtype=torch.float64, device="cpu")


library.define(
    "partita::best_scales", "(Tensor like, float relevant, float share, float margin, float noise) -> Tensor"
)


@library.impl("partita::best_scales", "CompositeExplicitAutograd")
def _(like: Tensor, relevant: float, share: float, margin: float, noise: float) -> Tensor:
    return _solved(relevant, share, margin, noise).to(like.device, copy=True)


@library.register_fake("partita::best_scales")  # type: ignore[untyped-decorator]
def _(like: Tensor, relevant: float, share: float, margin: float, noise: float) -> Tensor:
    return like.new_empty((OTHERS, 2), dtype=torch.float64)
