"""Position settings of rotary models: how fast each pair of features turns, and how far distances go on growing.

    angle of pair k at position i = i w_k,      w_k = base^(-2k/dim)

A model that was trained on n positions has seen angles up to n w_k. What reads further needs other frequencies w, or
distances that stop growing. Each setting is independent of the scale policy; none needs training to be applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from partita._checks import check_positive, check_whole
from partita.attn.positions import frequencies, turned
from partita.errors import ValueRangeError

__all__ = ["NTK", "Clipped", "Interpolated", "NoPositions", "PartialRotary", "Positions", "Rotary", "YaRN"]


@dataclass(frozen=True, repr=False)
class Positions:
    """Abstract: the frequencies of a rotary model, read in another way.

    base is that of the frequencies as trained; None is 10,000, or in a Hugging Face model its own.
    """

    base: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.base is not None and not self.base > 1:
            raise ValueRangeError(f"base must be above 1; got {self.base!r}.")

    def __repr__(self) -> str:
        """As one may type it: what differs from the defaults."""
        order = sorted(fields(self), key=lambda f: f.name == "base")
        given = [(f.name, getattr(self, f.name), f.default) for f in order]
        shown = [(name, value) for name, value, usual in given if value != usual and value != Rotary()]
        plain = [repr(v) if name in ("factor", "share", "reach") else f"{name}={v!r}" for name, v in shown]
        return f"{type(self).__name__}({', '.join(plain)})"

    @property
    def amplitude(self) -> float:
        """What queries and keys are multiplied by, each; the scores by its square."""
        return 1.0

    @property
    def furthest(self) -> int | None:
        """The distance beyond which distances stop growing, if they do."""
        return None

    def frequencies(self, dim: int, device: torch.device | str | None = None) -> Tensor:  # (dim / 2,)
        """The turn of each pair of features per position, in radians."""
        base = 10000.0 if self.base is None else self.base
        where = torch.get_default_device() if device is None else torch.device(device)
        return self.changed(frequencies(dim, base, where), base)

    def changed(self, own: Tensor, base: float) -> Tensor:  # (pairs,)
        """These frequencies of a trained model, which come from this base, as this setting has them."""
        raise TypeError("Positions is abstract; use Rotary(), NTK(factor), YaRN(factor, trained) and their like.")

    def turn(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # (..., n, dim)
        """Queries or keys, turned by their positions (0 to n-1 if none are given), clipped distances left alone.

        >>> Rotary().turn(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # the second by one radian
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
        """
        where = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
        out = turned(x, where, self.frequencies(x.shape[-1], x.device))
        return out if self.amplitude == 1.0 else out * self.amplitude


@dataclass(frozen=True, repr=False)
class Rotary(Positions):
    """w_k as trained.

    >>> Rotary(base=100.0).frequencies(4)
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """

    def changed(self, own: Tensor, base: float) -> Tensor:
        return own


@dataclass(frozen=True, repr=False)
class _Stretched(Positions):
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("factor", self.factor)


@dataclass(frozen=True, repr=False)
class NTK(_Stretched):
    """A larger base: w_k = (base * factor^(dim / (dim - 2)))^(-2k/dim), slowest pairs slowed by factor, fastest kept.

    >>> NTK(4.0, base=100.0).frequencies(4)  # the last one is a quarter of 0.1
    tensor([1.0000, 0.0250], dtype=torch.float64)
    """

    def changed(self, own: Tensor, base: float) -> Tensor:
        last = max(own.shape[0] - 1, 1)
        k = torch.arange(own.shape[0], dtype=own.dtype, device=own.device)
        return own * self.factor ** (-k / last)


@dataclass(frozen=True, repr=False)
class Interpolated(_Stretched):
    """Positions divided by a factor: w_k / factor.

    >>> Interpolated(4.0, base=100.0).frequencies(4)
    tensor([0.2500, 0.0250], dtype=torch.float64)
    """

    def changed(self, own: Tensor, base: float) -> Tensor:
        return own / self.factor


@dataclass(frozen=True, repr=False)
class YaRN(_Stretched):
    """Pairs that turn often within the trained length stay, those that do not turn once are interpolated (2309.00071).

        w_k = (1 - ramp_k) w_k + ramp_k w_k / factor          amplitude = 0.1 log(factor) + 1

    ramp is linear in k, from the pair that turns `fast` times over the trained positions to the one that turns `slow`
    times. The amplitude multiplies queries and keys: the temperature of the paper. `temperature=False` leaves it to
    the scale policy.
    """

    trained: int
    fast: float = 32.0
    slow: float = 1.0
    temperature: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("trained", self.trained, least=2)
        check_positive("slow", self.slow)
        if not self.fast > self.slow:
            raise ValueRangeError(f"fast must be above slow; got {self.fast!r} and {self.slow!r}.")

    @property
    def amplitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.temperature and self.factor > 1 else 1.0

    def changed(self, own: Tensor, base: float) -> Tensor:
        dim = 2 * own.shape[0]

        def pair(turns: float) -> float:
            """The pair that turns so often over the trained positions."""
            return dim * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(pair(self.fast)), 0), min(math.ceil(pair(self.slow)), dim - 1)
        k = torch.arange(own.shape[0], dtype=own.dtype, device=own.device)
        # where no pair turns even once, high lies below low: all but the first are interpolated
        ramp = ((k - low) / max(high - low, 0.001)).clamp(0, 1)
        return own * (1 - ramp) + own / self.factor * ramp


@dataclass(frozen=True, repr=False)
class PartialRotary(Positions):
    """p-RoPE: the share of pairs that turn fastest go on turning, the others carry content alone (2410.06205).

    >>> PartialRotary(0.5, base=100.0).frequencies(4)
    tensor([1., 0.], dtype=torch.float64)
    """

    share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueRangeError(f"share must lie between 0 and 1; got {self.share!r}.")

    def changed(self, own: Tensor, base: float) -> Tensor:
        kept = int(self.share * own.shape[0])
        return torch.cat([own[:kept], torch.zeros_like(own[kept:])])


@dataclass(frozen=True, repr=False)
class NoPositions(Positions):
    """Nothing turns: w_k = 0. A causal model still knows how many keys a row sees."""

    def changed(self, own: Tensor, base: float) -> Tensor:
        return torch.zeros_like(own)


@dataclass(frozen=True, repr=False)
class Clipped(Positions):
    """Distances stop growing at `reach`: scores are those of clamp(i - j, -reach, reach).

    `inner` says how the pairs turn up to there. Turning queries and keys cannot do this; `attn.rotary_attention` can,
    exactly and in O(n) memory.
    """

    reach: int
    inner: Positions = field(default_factory=Rotary)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("reach", self.reach, least=0)
        if not isinstance(self.inner, Positions) or isinstance(self.inner, Clipped):
            raise ValueRangeError(f"inner must be another position setting, not clipped; got {self.inner!r}.")

    @property
    def amplitude(self) -> float:
        return self.inner.amplitude

    @property
    def furthest(self) -> int | None:
        return self.reach

    def frequencies(self, dim: int, device: torch.device | str | None = None) -> Tensor:
        return self.inner.frequencies(dim, device) if self.base is None else super().frequencies(dim, device)

    def changed(self, own: Tensor, base: float) -> Tensor:
        return self.inner.changed(own, base)
