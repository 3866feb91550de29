"""Positions: vectors that are added or rotated, settings of rotary models, and biases that depend on distance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from partita._checks import check_float, check_matrix, check_positive, check_whole, expands
from partita.errors import ShapeError, ValueRangeError
from partita.precision import accumulation_dtype, finest
from partita.support.kinds import check_align

__all__ = [
    "NTK", "ALiBi", "Bias", "Clipped", "Gumbel", "Interpolated", "NoPositions", "PartialRotary", "Positions",
    "RelativeBias", "RopeFrequencies", "Rotary", "YaRN", "alibi_slopes", "frequencies", "rotary", "sinusoidal",
]  # fmt: skip


def sinusoidal(
    n: int, dim: int, *, base: float = 10000.0, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Tensor:  # (n, dim)
    """Absolute position vectors of length sqrt(dim / 2), to be added to embeddings before the projections (M-ATT-10).

        p_{i,2k} = sin(i w_k)        p_{i,2k+1} = cos(i w_k)        w_k = base^(-2k/dim)

    >>> sinusoidal(1, 4)
    tensor([[0., 1., 0., 1.]])
    """
    check_whole("n", n, least=0)
    check_whole("dim", dim)
    check_positive("base", base)
    where = torch.arange(n, device=device)
    w = frequencies(dim, base, where.device)
    angle = where.to(w.dtype)[:, None] * w
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(dtype or torch.get_default_dtype())


def rotary(
    x: Tensor,  # (..., n, dim)
    positions: Tensor | None = None,  # (..., n), default 0 to n-1
    *,
    base: float = 10000.0,
) -> Tensor:  # (..., n, dim)
    """Vectors rotated by their position, halves paired as in Llama: <rotary(q)_i, rotary(k)_j> depends on i - j alone.

    >>> rotary(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # the second by one radian
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """
    check_matrix("x", x)
    where = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
    if not isinstance(where, Tensor) or where.is_complex() or not expands(where.shape[-1:], x.shape[-2:-1]):
        raise ShapeError(f"positions must be a tensor of {x.shape[-2]} numbers, (..., n); got {positions!r}.")
    check_positive("base", base)
    return RopeFrequencies(frequencies(x.shape[-1], base, x.device))(x, where)


@dataclass(frozen=True, eq=False)
class RopeFrequencies:
    """How queries and keys are rotated: a position setting for one number of features."""

    w: Tensor  # (pairs,); the features past the last pair stay as they are
    amplitude: float = 1.0
    reach: int | None = None
    neighbours: bool = False  # the pairs are (0, 1), (2, 3) and so on, instead of the two halves

    def to(self, device: torch.device) -> RopeFrequencies:
        return self if self.w.device == device else replace(self, w=self.w.to(device, finest(device)))

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:  # (..., n, dim), broadcastable to (..., n)
        pairs = self.w.shape[0]
        angle = positions.to(self.w.dtype)[..., None] * self.w
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        moving, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        left, right = moving.unflatten(-1, (pairs, 2)).unbind(-1) if self.neighbours else moving.chunk(2, -1)
        both = left * cos - right * sin, right * cos + left * sin
        out = torch.stack(both, -1).flatten(-2) if self.neighbours else torch.cat(both, -1)
        out = out if rest.shape[-1] == 0 else torch.cat([out, rest], -1)
        return out if self.amplitude == 1.0 else out * self.amplitude

    def by(self, x: Tensor, distance: int) -> Tensor:
        return self(x, torch.full((1,), distance, dtype=torch.int64, device=x.device))


def frequencies(dim: int, base: float, device: torch.device) -> Tensor:  # (dim / 2,)
    """base^(-2k/dim), in float64 where there is one.

    A float32 angle at position 100,000 is wrong in the second digit of its sine.
    """
    if dim < 2 or dim % 2:
        raise ShapeError(f"positions need an even dim of at least 2; got {dim}.")
    return base ** (-torch.arange(0, dim, 2, device=device, dtype=finest(device)) / dim)


# ---- settings of rotary models ---------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Positions:
    """Abstract: how the frequencies of a rotary model are changed.

    base: of the frequencies as trained; None is 10,000, or in a Hugging Face model its own.
    """

    base: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.base is not None and not self.base > 1:
            raise ValueRangeError(f"base must be above 1; got {self.base!r}.")

    def __repr__(self) -> str:
        """The constructor call, without defaults."""
        order = sorted(fields(self), key=lambda f: f.name == "base")
        given = [(f.name, getattr(self, f.name), f.default) for f in order]
        shown = [(name, value) for name, value, usual in given if value != usual and value != Rotary()]
        plain = [repr(v) if name in ("factor", "share", "reach") else f"{name}={v!r}" for name, v in shown]
        return f"{type(self).__name__}({', '.join(plain)})"

    @property
    def amplitude(self) -> float:
        """The factor of queries and of keys; scores get its square."""
        return 1.0

    @property
    def furthest(self) -> int | None:
        """The distance beyond which distances stop growing, if they do."""
        return None

    def frequencies(self, dim: int, device: torch.device | str | None = None) -> Tensor:  # (dim / 2,)
        """The rotation of each pair of features per position, in radians."""
        base = 10000.0 if self.base is None else self.base
        where = torch.get_default_device() if device is None else torch.device(device)
        return self.changed(frequencies(dim, base, where), base)

    def changed(self, own: Tensor, base: float) -> Tensor:  # (pairs,)
        """The frequencies `own` of a trained model of this base, changed by this setting."""
        raise TypeError("Positions is abstract; use Rotary(), NTK(factor), YaRN(factor, trained) and their like.")

    def turn(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # (..., n, dim)
        """Queries or keys, rotated by their positions (0 to n-1 if none are given); distances are not clipped."""
        where = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
        return self.rope(x.shape[-1], x.device)(x, where)

    def rope(self, dim: int, device: torch.device) -> RopeFrequencies:
        """This setting for vectors of this number of features."""
        return RopeFrequencies(self.frequencies(dim, device), self.amplitude, self.furthest)


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
    """Fast pairs stay, pairs that do not rotate once within the trained length are interpolated (2309.00071).

        w_k = (1 - ramp_k) w_k + ramp_k w_k / factor          amplitude = 0.1 log(factor) + 1

    ramp is linear in k, from the pair with `fast` rotations over the trained positions to the one with `slow`. The
    amplitude, the temperature of the paper, multiplies queries and keys; `temperature=False` leaves it out.
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
            """The pair with this number of rotations over the trained positions."""
            return dim * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(pair(self.fast)), 0), min(math.ceil(pair(self.slow)), dim - 1)
        k = torch.arange(own.shape[0], dtype=own.dtype, device=own.device)
        # if no pair rotates once, high is below low: all but the first are interpolated
        ramp = ((k - low) / max(high - low, 0.001)).clamp(0, 1)
        return own * (1 - ramp) + own / self.factor * ramp


@dataclass(frozen=True, repr=False)
class PartialRotary(Positions):
    """p-RoPE: the fastest share of pairs is rotated, the others carry content alone (2410.06205).

    >>> PartialRotary(0.5, base=100.0).frequencies(4)
    tensor([1., 0.], dtype=torch.float64)
    """

    share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueRangeError(f"share must be between 0 and 1; got {self.share!r}.")

    def changed(self, own: Tensor, base: float) -> Tensor:
        kept = int(self.share * own.shape[0])
        return torch.cat([own[:kept], torch.zeros_like(own[kept:])])


@dataclass(frozen=True, repr=False)
class NoPositions(Positions):
    """No rotation: w_k = 0."""

    def changed(self, own: Tensor, base: float) -> Tensor:
        return torch.zeros_like(own)


@dataclass(frozen=True, repr=False)
class Clipped(Positions):
    """Distances stop growing at `reach`: scores are those of clamp(i - j, -reach, reach).

    `inner` is the setting up to there. Served by `attn.rotary_attention`, exactly and in O(n) memory.
    """

    reach: int
    inner: Positions = Rotary()  # immutable; a graph cannot call a default factory

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


# ---- biases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bias:
    """Abstract: numbers added to scores, made for a few rows at a time (M-ATT-9); joined by + and scaled by *."""

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:  # (..., rows, n_key)
        """The bias of these rows, on the device of `like` and in its dtype, float32 at least.

        In half precision position 256 would equal 257.
        """
        raise TypeError("Bias is abstract; use ALiBi(slopes) or RelativeBias(table).")

    def dense(self, n_query: int, n_key: int, like: Tensor) -> Tensor:  # (..., n_query, n_key)
        """The whole matrix, for small sizes."""
        return self.rows(slice(0, n_query), n_query, n_key, like)

    def __add__(self, other: Bias) -> Bias:
        return _Sum(self, other)

    def __mul__(self, factor: float) -> Bias:
        return _Times(self, factor)


@dataclass(frozen=True, eq=False)
class _Sum(Bias):
    a: Bias
    b: Bias

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        return self.a.rows(rows, n_query, n_key, like) + self.b.rows(rows, n_query, n_key, like)


@dataclass(frozen=True, eq=False)
class _Times(Bias):
    a: Bias
    factor: float

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        return self.a.rows(rows, n_query, n_key, like) * self.factor


def _offsets(rows: slice, n_query: int, n_key: int, align: str, device: torch.device) -> Tensor:  # (rows, n_key)
    """j - i, with the first query at key 0, or the last query at the last key."""
    shift = n_key - n_query if align == "bottom-right" else 0
    i = torch.arange(rows.start, rows.stop, device=device) + shift
    return torch.arange(n_key, device=device) - i[:, None]


def alibi_slopes(
    heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:  # (heads,)
    """The slopes of the ALiBi paper: 2^(-8 h / heads), and in between every second one of the next power of two.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if heads < 1:
        raise ValueRangeError(f"heads must be at least 1; got {heads}.")
    near = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / near) for h in range(near)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / near) for h in range(heads - near)]
    return torch.tensor(slopes, device=device, dtype=dtype)


@dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """A penalty linear in distance: b_ij = -slope_head * |i - j|; the slopes may learn.

    >>> ALiBi(torch.tensor([0.5])).dense(2, 3, torch.zeros(()))
    tensor([[[-0.0000, -0.5000, -1.0000],
             [-0.5000, -0.0000, -0.5000]]])
    """

    slopes: Tensor  # (heads,)
    align: str = "top-left"

    def __post_init__(self) -> None:
        check_align(self.align)
        check_float("slopes", self.slopes)

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        dtype = accumulation_dtype(like.dtype)
        distance = _offsets(rows, n_query, n_key, self.align, like.device).abs().to(dtype)
        return -self.slopes.to(device=like.device, dtype=dtype)[..., None, None] * distance


@dataclass(frozen=True, eq=False)
class RelativeBias(Bias):
    """A learned number per head and clipped distance: b_ij = table[head, clamp(j - i, -reach, reach) + reach].

    table is (..., 2 * reach + 1); its gradient sums over the diagonals.

    >>> RelativeBias(torch.tensor([-1.0, 0.0, 1.0])).dense(2, 3, torch.zeros(()))  # reach 1: the sign of j - i
    tensor([[ 0.,  1.,  1.],
            [-1.,  0.,  1.]])
    """

    table: Tensor  # (..., 2 * reach + 1)
    align: str = "top-left"

    def __post_init__(self) -> None:
        check_align(self.align)
        check_float("table", self.table)
        if self.table.dim() < 1 or self.table.shape[-1] % 2 == 0:
            raise ShapeError(
                f"table must end in an odd number of entries, one per distance from -reach to reach; "
                f"got {tuple(self.table.shape)}."
            )

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        reach = self.table.shape[-1] // 2
        at = _offsets(rows, n_query, n_key, self.align, like.device).clamp(-reach, reach) + reach
        return self.table.to(device=like.device, dtype=accumulation_dtype(like.dtype))[..., at]


@dataclass(frozen=True, eq=False)
class Gumbel(Bias):
    """Standard Gumbel noise, remade from its seed for any block of rows: adding it makes the argmax a sample."""

    seed: int | None  # None inside a graph, which has one block of rows and torch's own random numbers
    batch: tuple[int, ...]

    def rows(self, rows: slice, n_query: int, n_key: int, like: Tensor) -> Tensor:
        source = None if self.seed is None else torch.Generator(like.device).manual_seed(self.seed + rows.start)
        shape, dtype = (*self.batch, rows.stop - rows.start, n_key), accumulation_dtype(like.dtype)
        waiting = torch.empty(shape, dtype=dtype, device=like.device).exponential_(generator=source)
        return -waiting.clamp(min=torch.finfo(dtype).tiny).log()
