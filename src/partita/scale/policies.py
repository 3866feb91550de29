"""What a policy is; those of the number of visible keys and the dimension alone, a learned one, and a solved one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partita._checks import (
    broadcast_batch,
    check_device,
    check_float,
    check_matrix,
    check_number,
    check_positive,
    check_whole,
    finite,
)
from partita._repr import table_html
from partita.errors import DtypeError, PartitaError, ShapeError, ValueRangeError

__all__ = [
    "Constant", "CriticalScale", "Formula", "InverseSqrt", "KappaLog", "Llama4Temperature", "LogLength", "MaxLength",
    "Mixed", "Policy", "ScalableSoftmax", "SqrtLogLength", "TargetEntropy", "YarnTemperature",
    "check_head_dim", "check_reference", "from_temperature", "visible_keys",
]  # fmt: skip


class Policy:
    """Abstract: a multiplier per row from the number of visible keys and the dimension."""

    def __call__(self, visible: Tensor | int, dim: int, query: Tensor | None = None) -> Tensor:
        if not isinstance(dim, torch.SymInt):
            check_whole("dim", dim)
        return self.multiplier(visible_keys(visible, query), max(dim, 1))

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        raise TypeError("Policy is abstract; use partita.scale.LogLength() and its like.")

    def number(self, n: int, dim: int) -> float | None:
        """The multiplier of rows that all see n keys; None if it depends on more than n and dim."""
        return None

    def fold(self, query: Tensor, visible: Tensor | int) -> Tensor:  # (..., n_query, dim)
        """The query times its row's scale, for kernels without a scale per row (pass them scale=1)."""
        check_matrix("query", query)
        if isinstance(visible, Tensor):
            check_device(("query", "visible"), (query, visible))
        scale = self(visible, query.shape[-1], query)
        broadcast_batch((("the rows of query", query.shape[:-1]), ("visible", scale.shape)))
        return query * (scale[..., None] if scale.dim() else scale).to(query.dtype)

    def _repr_html_(self) -> str:
        """In a notebook: the multiplier of 64 features in units of 1 / sqrt(64), by number of keys."""
        try:
            rows = [(f"{n:,} keys", f"{self(n, 64).mean().item() * 8:.3f} / sqrt(dim)") for n in (64, 512, 4096, 32768)]
        except (TypeError, RuntimeError, PartitaError):  # one that needs the query
            rows = []
        return table_html(repr(self), rows)


class Formula(Policy):
    """A policy of n, dim and its own numbers."""

    def number(self, n: int, dim: int) -> float | None:
        if type(self).__call__ is not Policy.__call__:  # a subclass's own, which may read the query
            return None
        found = self(n, dim)
        return float(found) if found.dim() == 0 and not found.requires_grad else None


def visible_keys(visible: Tensor | int, query: Tensor | None = None) -> Tensor:
    """n as floating numbers, at least 1, since 0 * -inf is nan; integers become float32, or float64 as the query."""
    if query is not None and not isinstance(query, Tensor):
        check_float("query", query)
    if not isinstance(visible, Tensor):
        if not isinstance(visible, torch.SymInt):
            check_positive("visible", visible, zero=True)
        device = "cpu" if query is None else query.device
        return torch.tensor(max(float(visible), 1.0), dtype=torch.float64, device=device)
    if visible.is_complex() or visible.dtype == torch.bool:
        raise DtypeError(f"visible must hold numbers of keys; got {visible.dtype}. Count a mask: mask.sum(-1).")
    wide = query is not None and query.dtype == torch.float64
    n = visible if visible.is_floating_point() else visible.to(torch.float64 if wide else torch.float32)
    return n.clamp(min=1.0)


def check_reference(reference: float) -> None:
    if not (isinstance(reference, (int, float)) and finite(reference) and reference > 1):
        raise ValueRangeError(f"a reference length must be a number above 1; got {reference!r}.")


def check_head_dim(policy: str, heads: int, n: Tensor) -> None:
    if n.dim() >= 2 and n.shape[-2] not in (1, heads):
        raise ShapeError(f"{policy} has {heads} heads; the rows have {tuple(n.shape)}, heads second from the right.")


@dataclass(frozen=True)
class InverseSqrt(Formula):
    """scale = factor / sqrt(dim), the usual one for factor = 1; independent of length (M-SCL-1)."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor, zero=True)

    def __repr__(self) -> str:
        return f"InverseSqrt({'' if self.factor == 1.0 else self.factor})"

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return torch.full_like(n, self.factor * dim**-0.5)


@dataclass(frozen=True)
class Constant(Formula):
    """scale = value."""

    value: float

    def __post_init__(self) -> None:
        check_number("value", self.value)

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return torch.full_like(n, self.value)


@dataclass(frozen=True)
class KappaLog(Formula):
    """scale = kappa * log(n) / dim (M-SCL-2); with kappa = 1 it has hardly any effect.

    >>> KappaLog()(1, 64)  # one key: no choice to sharpen
    tensor(0., dtype=torch.float64)
    """

    kappa: float = 1.0

    def __post_init__(self) -> None:
        check_number("kappa", self.kappa)

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return self.kappa * n.log() / dim


@dataclass(frozen=True)
class _Referenced(Formula):
    reference: float = 512
    floor: float = 4

    def __post_init__(self) -> None:
        check_reference(self.reference)
        check_positive("floor", self.floor)


@dataclass(frozen=True)
class LogLength(_Referenced):
    """scale = log(max(n, floor)) / log(reference) / sqrt(dim): 1/sqrt(dim) at the reference length (M-SCL-7).

    Without the floor, rows with one or two keys would be flattened; floor = reference is Qwen's log n attention, which
    only sharpens: max(1, log n / log reference) / sqrt(dim).

    >>> LogLength(reference=512)(512, 64)  # 1 / sqrt(64)
    tensor(0.1250, dtype=torch.float64)
    """

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return n.clamp(min=self.floor).log() / (math.log(self.reference) * math.sqrt(dim))


@dataclass(frozen=True)
class SqrtLogLength(_Referenced):
    """scale = sqrt(log(max(n, floor)) / log(reference)) / sqrt(dim): the law of Gaussian scores (M-SCL-14)."""

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return (n.clamp(min=self.floor).log() / math.log(self.reference)).sqrt() / math.sqrt(dim)


@dataclass(frozen=True)
class Llama4Temperature(Formula):
    """scale = (1 + attn_scale * log(1 + floor(n / floor_scale))) / sqrt(dim): the temperature of Llama 4's layers.

    Arguments as in that model's config; n is position + 1 where all of the past is visible.

    >>> Llama4Temperature(floor_scale=8192)(8191, 64)  # 1 / sqrt(64) below the first step
    tensor(0.1250, dtype=torch.float64)
    """

    floor_scale: float = 8192
    attn_scale: float = 0.1

    def __post_init__(self) -> None:
        check_positive("floor_scale", self.floor_scale)
        check_positive("attn_scale", self.attn_scale, zero=True)

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return (1 + self.attn_scale * torch.log1p(torch.floor(n / self.floor_scale))) / math.sqrt(dim)


@dataclass(frozen=True)
class YarnTemperature(Formula):
    """scale = (0.1 log(factor) + 1)^2 / sqrt(dim): YaRN's temperature alone, whatever the positions do.

    `attn.YaRN` applies it already, to its queries and keys, unless `temperature=False`.

    >>> YarnTemperature(1.0)(100, 64)
    tensor(0.1250, dtype=torch.float64)
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return torch.full_like(n, (0.1 * math.log(max(self.factor, 1.0)) + 1) ** 2 / math.sqrt(dim))


@dataclass(frozen=True)
class CriticalScale(Formula):
    """scale = (log(max(n, floor)) / log(reference))^exponent / sqrt(dim): growing as the rows' critical scale does.

    exponent: 1/2 for Gaussian scores (`SqrtLogLength`), 1 where one key has a margin (`LogLength`), or one per head, as
    `CriticalScale.fit` finds them from critical scales measured at several lengths.

    >>> CriticalScale(reference=16, exponent=2.0)(256, 64)  # (log 256 / log 16)^2 / sqrt(64)
    tensor(0.5000, dtype=torch.float64)
    """

    reference: float
    exponent: float | Sequence[float] = 0.5
    floor: float = 4

    def __post_init__(self) -> None:
        check_reference(self.reference)
        check_positive("floor", self.floor)
        each = self.exponent if isinstance(self.exponent, Sequence) else (self.exponent,)
        for x in each:
            if not (isinstance(x, (int, float)) and finite(x)):
                raise ValueRangeError(f"exponent must be a finite number, or one per head; got {self.exponent!r}.")

    @staticmethod
    def fit(reference: float, lengths: Sequence[float], critical: Sequence[Sequence[float]]) -> CriticalScale:
        """From critical scales (lengths, heads): the slope of log critical against log log n, for every head."""
        if len(lengths) < 2 or len(lengths) != len(critical) or min(lengths) <= math.e:
            raise ShapeError(f"fit needs critical scales of two lengths or more, all above 2; got lengths {lengths!r}.")
        x = torch.tensor(lengths, dtype=torch.float64, device="cpu").log().log()
        y = torch.tensor(critical, dtype=torch.float64, device="cpu").log()
        if not (bool(torch.isfinite(y).all()) and x.std() > 0):
            raise ValueRangeError("critical scales must be positive and finite, of lengths that differ.")
        x = x - x.mean()
        slope = (x[:, None] * y).sum(0) / (x * x).sum()
        return CriticalScale(reference, tuple(slope.tolist()))

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        ratio = n.clamp(min=self.floor).log() / math.log(self.reference)
        if not isinstance(self.exponent, Sequence):
            return ratio**self.exponent / math.sqrt(dim)
        check_head_dim("CriticalScale", len(self.exponent), n)
        exponent = torch.tensor(list(self.exponent), dtype=n.dtype, device=n.device)
        return ratio ** exponent[:, None] / math.sqrt(dim)


@dataclass(frozen=True)
class Mixed(Formula):
    """scale = alpha / sqrt(dim) + beta * log(n) / dim (M-SCL-3); always sharper than 1/sqrt(dim) for alpha = 1.

    >>> Mixed()(1024, 64)  # 1/8 + 0.1 * 6.93 / 64: 8.7 % above 1/sqrt(64)
    tensor(0.1358, dtype=torch.float64)
    """

    alpha: float = 1.0
    beta: float = 0.1

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha)
        check_number("beta", self.beta)

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return self.alpha / math.sqrt(dim) + self.beta * n.log() / dim


@dataclass(frozen=True)
class MaxLength(Formula):
    """scale = kappa * log(n_max) / dim: the frozen length of the notes, a constant (M-SCL-4)."""

    n_max: float
    kappa: float = 1.0

    def __post_init__(self) -> None:
        check_reference(self.n_max)
        check_number("kappa", self.kappa)

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return torch.full_like(n, self.kappa * math.log(self.n_max) / dim)


class ScalableSoftmax(nn.Module, Policy):
    """scale = s_head * log(visible) / sqrt(dim), one learned s per head.

    `visible` is (..., n_query) or (..., heads, n_query); the result has a head dimension.
    """

    def __init__(
        self,
        heads: int,
        init: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_whole("heads", heads, least=1)
        check_number("init", init)
        self.s = nn.Parameter(torch.full((heads,), float(init), device=device, dtype=dtype))

    forward = Policy.__call__  # with the hooks of a module around it
    __call__ = nn.Module.__call__

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        check_head_dim("ScalableSoftmax", self.s.shape[0], n)
        return self.s.to(n.dtype)[:, None] * n.log() / math.sqrt(dim)

    def extra_repr(self) -> str:
        return f"heads={self.s.shape[0]}"


@dataclass(frozen=True)
class TargetEntropy(Policy):
    """The scale at which each row's entropy hits a target, solved row by row (M-SCL-10).

    Give one of: entropy (nats), width (keys: entropy log(width)), fraction (of log n). A target out of reach gives the
    nearest reachable scale. Gibbs and attention solve it as `partita.solve_scale` does; it cannot `fold` from n alone.

    >>> p = partita.Gibbs(torch.ones(1, 1), torch.arange(9.0)[:, None], scale=TargetEntropy(width=3.0))
    >>> round(p.entropy().exp().item(), 3)
    3.0
    """

    entropy: float | None = None
    width: float | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.entropy, self.width, self.fraction) if x is not None]
        if len(given) != 1:
            raise ValueRangeError(f"give exactly one of entropy, width, fraction; got {len(given)}.")
        check_positive("the target", given[0], zero=self.width is None)
        if self.width is not None and self.width < 1:
            raise ValueRangeError(f"width must be at least 1 key; got {self.width}.")
        if self.fraction is not None and self.fraction > 1:
            raise ValueRangeError(f"fraction must be between 0 and 1; got {self.fraction}.")

    def target(self, visible: Tensor) -> Tensor:
        """The entropy each row should have."""
        n = visible_keys(visible)
        if self.fraction is not None:
            return self.fraction * n.log()
        entropy = math.log(self.width) if self.width is not None else self.entropy
        assert entropy is not None
        return torch.full_like(n, entropy)

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        raise ValueRangeError(
            "TargetEntropy depends on the scores, not on n alone; give it as scale= to Gibbs or attention, "
            "or call partita.solve_scale(query, key, ...)."
        )


def from_temperature(temperature: float | Tensor) -> float | Tensor:
    """scale = 1 / temperature."""
    if isinstance(temperature, Tensor):
        check_float("temperature", temperature)
    else:
        check_positive("temperature", temperature)
    return 1.0 / temperature
