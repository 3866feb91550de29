"""How the scale must grow with the length to keep entropy constant: it depends on the tail of the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import Number, bisect, number, require, together
from partita.theory.sharpness.condensed import condensed_index

__all__ = [
    "exponential_scale",
    "growth_exponent",
    "margin_entropy",
    "margin_half_scale",
    "margin_scale",
    "spherical_scale",
    "tied_entropy_floor",
    "uniform_entropy",
    "uniform_scale",
]


def margin_entropy(n: Number, gap: Number) -> Tensor:
    """Entropy when one key leads n - 1 equal ones by this much (scale included).

        u = (n - 1) exp(-gap):      H = log(1 + u) + gap * u / (1 + u)

    Spec: M-SCL-15.

    >>> round(margin_entropy(5, 0.0).item(), 4)  # no lead: log 5
    1.6094
    """
    n, g = number(n), number(gap)
    require(n >= 1, f"n counts visible keys, so n >= 1; got {n}.")
    u = (n - 1) * torch.exp(-g)
    return torch.log1p(u) + g * u / (1 + u)


def margin_scale(n: Number, entropy: Number, margin: Number = 1.0, *, exact: bool = True) -> Tensor:
    """The scale that holds the entropy when one key leads by a fixed margin: the one case that grows like log n.

        scale * margin = log n + log log n - log entropy + o(1)        (exact True: solved)

    Spec: M-SCL-15.

    >>> round(margin_scale(256, 2.0).item(), 2), round(margin_scale(65536, 2.0).item(), 2)
    (6.6, 12.88)
    """
    size, target, d = together(n, entropy, margin)
    require((target > 0) & (target < size.log()), f"the entropy must lie strictly between 0 and log n; got {target}.")
    require(d > 0, f"margin must be positive; got {d}.")
    if not exact:
        return (size.log() + size.log().log() - target.log()) / d
    return bisect(lambda gap: margin_entropy(size, gap) > target, torch.zeros_like(size), size.log() + 60) / d


def margin_half_scale(n: Number, margin: Number = 1.0) -> Tensor:
    """The scale at which a key leading by a margin has half of the weight.

        scale * margin = log(n - 1)

    Spec: M-SCL-15.

    >>> margin_half_scale(2).item()
    0.0
    """
    return (number(n) - 1).log() / number(margin)


def uniform_entropy(n: Number, scale: Number, width: Number = 1.0) -> Tensor:
    """Entropy of scores uniform on an interval, for scale * width >> 1.

        H = log n + 1 - log(scale * width)

    Spec: M-SCL-15, M-SCL-11.

    >>> round(uniform_entropy(1e5, 8.0, 2.0).item(), 3)  # 11.513 + 1 - log 16
    9.74
    """
    return number(n).log() + 1 - (number(scale) * number(width)).log()


def uniform_scale(n: Number, entropy: Number, width: Number = 1.0) -> Tensor:
    """The scale that holds the entropy of bounded scores with density at the edge: proportional to n.

        scale = n * exp(1 - entropy) / width

    Spec: M-SCL-15.

    >>> uniform_scale(100, 1.0).item()
    100.0
    """
    return number(n) * torch.exp(1 - number(entropy)) / number(width)


def exponential_scale(entropy: Number, b: Number = 1.0) -> Tensor:
    """The scale that holds the entropy of scores with an exponential tail of width b: it does not grow at all.

        scale -> 1 / (m b),      psi(1) - psi(1 - m) = entropy

    Spec: M-SCL-15.

    >>> round(exponential_scale(1.3862943611).item(), 4)  # m = 1/2
    2.0
    """
    return 1 / (condensed_index(entropy) * number(b))


def spherical_scale(n: Number, entropy: Number, dim: Number) -> Tensor:
    """The scale for scores dim * cos(angle) of random directions.

        scale = t / (1 - t^2),    t^2 = 1 - exp(-2 (log n - entropy) / dim)

    sqrt(2 (log n - entropy) / dim) while log n << dim; n^(2/dim) beyond. 0 if the target is not below log n.
    Spec: M-SCL-15.

    >>> round(spherical_scale(torch.tensor(2.0).double().exp(), 1.0, 2e6).item() * 1e3, 4)  # sqrt(2 * 1 / 2e6)
    1.0
    """
    gap = (number(n).log() - number(entropy)).clamp(min=0)
    t2 = -torch.expm1(-2 * gap / number(dim))
    return t2.sqrt() / (1 - t2)


def tied_entropy_floor(n: Number, share: Number) -> Tensor:
    """The entropy no scale can go below when a share of all keys ties at the maximum.

        H >= log(share * n)

    Spec: M-SCL-15, M-GIB-3.

    >>> round(tied_entropy_floor(100, 0.02).item(), 4)
    0.6931
    """
    x = number(share)
    require((x > 0) & (x <= 1), f"share is a fraction of the keys, 0 < share <= 1; got {x}.")
    return (x * number(n)).log().clamp(min=0)


def growth_exponent(lengths: Tensor, scales: Tensor, *, of_log: bool = True) -> Tensor:
    """The power with which a scale grows, between the two ends of a range of lengths.

        d log(scale) / d log(log n)        (of_log False:  d log(scale) / d log n)

    Spec: M-SCL-14, M-SCL-15.

    >>> round(growth_exponent(torch.tensor([10.0, 1000.0]), torch.tensor([1.0, 3.0])).item(), 4)  # both times 3
    1.0
    """
    x = number(lengths).log().log() if of_log else number(lengths).log()
    y = number(scales).log()
    return (y[..., -1] - y[..., 0]) / (x[..., -1] - x[..., 0])
