"""Which keys count: lazy descriptions, joined by `&` and `|`.

    causal()                     j <= i                       rows and columns aligned at the top left
    causal("bottom-right")       j <= i + n_key - n_query     the last row sees every key (cached decoding)
    window(left, right)          i - left <= j <= i + right   None is unbounded
    lengths(key_lengths)         j < length                   padding
    segments(q_ids, k_ids)       q_ids[i] == k_ids[j]         packed documents
    not_self()                   j != i
    mask(bool)                   mask[i, j]
    all()                        every key

Nothing of size n_query * n_key is built, except by `dense`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita._checks import check_bool, check_index_dtype, check_positions, check_whole, has_values, shape_text
from partita.engine.terms import Term, window_mask
from partita.engine.terms import visible as visible_keys
from partita.errors import DtypeError, ShapeError, ValueRangeError

__all__ = ["Support", "all", "causal", "lengths", "mask", "not_self", "segments", "window"]

_PRINTED = 32  # entries of a tensor that a repr writes out; a larger one is named by its kind and shape


@dataclass(frozen=True, eq=False)
class Support:
    """Which keys each query may see; `bind` turns it into terms for given sizes."""

    def __and__(self, other: Support) -> Support:
        return _Both(self, _support(other))

    def __or__(self, other: Support) -> Support:
        return _Either(self, _support(other))

    def __bool__(self) -> bool:
        raise DtypeError(
            "a support is neither true nor false: `and`, `or` and `not` would drop one side of it. "
            "Join supports with & and |, and ask `support is not None` whether there is one."
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """What it was made of, whose later changes a reader may want to notice."""
        return ()

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        raise TypeError("Support is abstract; use support.causal(), support.lengths(...) and their like.")

    def visible(
        self, n_query: int, n_key: int, batch: Sequence[int] = (), device: torch.device | str | None = None
    ) -> Tensor:  # (*batch, n_query)
        """Number of keys each query may see.

        >>> causal().visible(3, 5)
        tensor([1, 2, 3])
        """
        where = _device(device)
        return visible_keys(self.bind(n_query, n_key, batch, where), n_query, n_key, batch, where)

    def dense(
        self, n_query: int, n_key: int, batch: Sequence[int] = (), device: torch.device | str | None = None
    ) -> Tensor:  # (*batch, n_query, n_key)
        """The whole boolean matrix, for small sizes and for looking at.

        >>> window(1, 0).dense(3, 3).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
        """
        where = _device(device)
        terms = self.bind(n_query, n_key, batch, where)
        out = window_mask(terms, slice(0, n_query), slice(0, n_key), where)
        if out is None:
            out = torch.ones((), dtype=torch.bool, device=where)
        return out.expand(*batch, n_query, n_key)


def check_support(given: object) -> None:
    """None, or a support; what is often given in its place is told how to become one."""
    if given is None or isinstance(given, Support):
        return
    if isinstance(given, Tensor):
        hint = "A boolean tensor becomes one with support.mask(tensor), numbers to be added are a bias"
    elif callable(given):
        hint = f"Call it: support.{getattr(given, '__name__', 'causal')}(...)"
    else:
        hint = "Make one with support.causal(), support.mask(tensor) and their like"
    raise DtypeError(f"support must be a partita.support; got {type(given).__name__}. {hint}.")


def _support(other: object) -> Support:
    if other is None:
        raise DtypeError("a support joins only with a support; got None.")
    check_support(other)
    assert isinstance(other, Support)
    return other


def _text(tensor: Tensor) -> str:
    """A small tensor as one may type it, a large one by what it is."""
    if not has_values(tensor) or tensor.numel() > _PRINTED:
        return f"<{str(tensor.dtype).removeprefix('torch.')} {shape_text(tensor)}>"
    kind = "" if tensor.dtype in (torch.bool, torch.int64) and tensor.numel() else f", dtype={tensor.dtype}"
    return f"torch.tensor({tensor.tolist()}{kind})"


def _device(device: torch.device | str | None) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


@dataclass(frozen=True, eq=False)
class _All(Support):
    def __repr__(self) -> str:
        return "support.all()"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        return (Term(),)


@dataclass(frozen=True, eq=False)
class _Band(Support):
    """Keys within fixed distances of the row; causal masks are bands too."""

    left: int | None
    right: int | None
    bottom: bool = False  # distances counted from the bottom right corner

    def __repr__(self) -> str:
        if self.left is None and self.right == 0:
            return 'support.causal("bottom-right")' if self.bottom else "support.causal()"
        return f"support.window({self.left}, {self.right})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        check_positions(n_query, n_key)
        shift = n_key - n_query if self.bottom else 0
        row = torch.arange(n_query, device=device, dtype=torch.int32).view(*[1] * len(batch), n_query) + shift
        # a distance past every position is as good as any larger one, and 32 bits hold it
        furthest = n_query + n_key
        start = None if self.left is None else row - max(-furthest, min(self.left, furthest))
        stop = None if self.right is None else row + (max(-furthest, min(self.right, furthest)) + 1)
        return (Term(start=start, stop=stop),)


@dataclass(frozen=True, eq=False)
class _Lengths(Support):
    key_lengths: Tensor | int

    def __repr__(self) -> str:
        given = self.key_lengths
        return f"support.lengths({_text(given) if isinstance(given, Tensor) else given})"

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.key_lengths,) if isinstance(self.key_lengths, Tensor) else ()

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        check_positions(n_query, n_key)
        given = torch.as_tensor(self.key_lengths, device=device)
        if has_values(given) and given.numel() and int(given.max()) > n_key:
            raise ValueRangeError(
                f"key_lengths must be at most the number of keys, {n_key}; got {int(given.max())}. "
                f"Give the keys before cropping, or clamp the lengths."
            )
        aligned = _leading("key_lengths", given, (), batch)
        # where values cannot be looked at a length may be anything, and must not wrap round in 32 bits
        stop = aligned.clamp(0, n_key).to(torch.int32)
        return (Term(stop=stop[..., None].expand(*aligned.shape, n_query)),)


@dataclass(frozen=True, eq=False)
class _Segments(Support):
    query_ids: Tensor
    key_ids: Tensor

    def __repr__(self) -> str:
        ids = (self.query_ids,) if self.query_ids is self.key_ids else (self.query_ids, self.key_ids)
        return f"support.segments({', '.join(map(_text, ids))})"

    def tensors(self) -> tuple[Tensor, ...]:
        return self.query_ids, self.key_ids

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        query = _leading("q_ids", self.query_ids.to(device), (n_query,), batch)
        key = _leading("k_ids", self.key_ids.to(device), (n_key,), batch)
        return (Term(query_segment=query.long(), key_segment=key.long()),)


@dataclass(frozen=True, eq=False)
class _NotSelf(Support):
    def __repr__(self) -> str:
        return "support.not_self()"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        return (Term(hole=True),)


@dataclass(frozen=True, eq=False)
class _Mask(Support):
    keep: Tensor

    def __repr__(self) -> str:
        return f"support.mask({_text(self.keep)})"

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.keep,)

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        keep = self.keep.to(device)
        keep = keep if keep.dim() >= 2 else keep.expand(1, *(keep.shape or (1,)))
        fits = keep.shape[-1] in (1, n_key) and keep.shape[-2] in (1, n_query)
        lead = tuple(keep.shape[:-2])
        while len(lead) > len(batch) and lead[0] == 1:
            lead = lead[1:]
        fits = fits and len(lead) <= len(batch)
        fits = fits and not [1 for a, b in zip(lead[::-1], tuple(batch)[::-1], strict=False) if a not in (1, b)]
        if not fits:
            raise ShapeError(
                f"mask must broadcast to {(*batch, n_query, n_key)}; got {shape_text(self.keep)}. "
                f"A mask (batch, n_query, n_key) for inputs with heads needs mask[:, None]."
            )
        return (Term(mask=keep.reshape(*[1] * (len(batch) - len(lead)), *lead, *keep.shape[-2:])),)


@dataclass(frozen=True, eq=False)
class _Both(Support):
    a: Support
    b: Support

    def __repr__(self) -> str:
        return " & ".join(f"({x!r})" if isinstance(x, _Either) else repr(x) for x in (self.a, self.b))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.a.tensors() + self.b.tensors()

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        a = self.a.bind(n_query, n_key, batch, device)
        b = self.b.bind(n_query, n_key, batch, device)
        return tuple(x & y for x in a for y in b)


@dataclass(frozen=True, eq=False)
class _Either(Support):
    a: Support
    b: Support

    def __repr__(self) -> str:
        return f"{self.a!r} | {self.b!r}"

    def tensors(self) -> tuple[Tensor, ...]:
        return self.a.tensors() + self.b.tensors()

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        terms = self.a.bind(n_query, n_key, batch, device) + self.b.bind(n_query, n_key, batch, device)
        trivial = [term for term in terms if term.trivial]
        return (trivial[0],) if trivial else terms


def _leading(name: str, given: Tensor, tail: tuple[int, ...], batch: Sequence[int]) -> Tensor:
    """Align with the leading batch dimensions, 1 for the rest: (B,) or (B, 1) or (B, H) against (B, H)."""
    lead = tuple(given.shape[: given.dim() - len(tail)])
    fits = len(lead) <= len(batch) and tuple(given.shape[len(lead) :]) == tail
    fits = fits and not [1 for a, b in zip(lead, batch, strict=False) if a not in (1, b)]
    if not fits:
        raise ShapeError(
            f"{name} must match the leading batch dimensions of {tuple(batch)}"
            + (f" followed by {tail}" if tail else "")
            + f"; got {shape_text(given)}."
        )
    return given.reshape((*lead, *[1] * (len(batch) - len(lead)), *tail))


def all() -> Support:
    """Every key."""
    return _All()


def causal(align: str = "top-left") -> Support:
    """Keys up to the query's own position: j <= i, or j <= i + n_key - n_query with align="bottom-right".

    >>> causal("bottom-right").visible(2, 5)
    tensor([4, 5])
    """
    if align not in ("top-left", "bottom-right"):
        raise ValueRangeError(f"align must be 'top-left' or 'bottom-right'; got {align!r}.")
    return _Band(None, 0, align == "bottom-right")


def window(left: int | None, right: int | None) -> Support:
    """Keys near the query: i - left <= j <= i + right, both ends included; None is unbounded.

    >>> window(1, 1).visible(4, 4)
    tensor([2, 3, 3, 2])
    """
    for name, reach in (("left", left), ("right", right)):
        if reach is not None and (not isinstance(reach, int) or isinstance(reach, bool)):
            raise DtypeError(f"window {name} must be an integer or None; got {type(reach).__name__}.")
    return _Band(left, right)


def lengths(key_lengths: Tensor | int) -> Support:
    """The first `key_lengths` keys: j < length, one length per leading batch entry, or one number for all.

    >>> lengths(2).visible(3, 5)
    tensor([2, 2, 2])
    """
    if isinstance(key_lengths, Tensor):
        check_index_dtype("key_lengths", key_lengths)
        negative = has_values(key_lengths) and key_lengths.numel() > 0 and int(key_lengths.min()) < 0
    elif isinstance(key_lengths, int) and not isinstance(key_lengths, bool):
        check_whole("key_lengths", key_lengths)
        negative = key_lengths < 0
    else:
        raise DtypeError(f"key_lengths must be an integer or an integer tensor; got {type(key_lengths).__name__}.")
    if negative:
        raise ValueRangeError(f"key_lengths must not be negative; got {key_lengths}.")
    return _Lengths(key_lengths)


def segments(q_ids: Tensor, k_ids: Tensor | None = None) -> Support:
    """Keys of the query's own segment: q_ids[i] == k_ids[j] (k_ids defaults to q_ids).

    >>> segments(torch.tensor([0, 0, 1])).visible(3, 3)
    tensor([2, 2, 1])
    """
    k_ids = q_ids if k_ids is None else k_ids
    check_index_dtype("q_ids", q_ids)
    check_index_dtype("k_ids", k_ids)
    for name, ids in (("q_ids", q_ids), ("k_ids", k_ids)):
        if ids.dim() == 0:
            raise ShapeError(f"{name} needs one id per position, shape (..., n); got a single number.")
    return _Segments(q_ids, k_ids)


def not_self() -> Support:
    """Every key but the one at the query's own position: j != i."""
    return _NotSelf()


def mask(keep: Tensor) -> Support:
    """Keys where `keep` is True; broadcasts to (..., n_query, n_key) as torch does, aligned at the right."""
    check_bool("mask", keep)
    return _Mask(keep)
