"""The plain kinds of support: bands, lengths, segments, a hole, a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita._checks import check_bool, check_index_dtype, check_positions, check_whole, expands, has_values, shape_text
from partita.engine.axes import align
from partita.engine.terms import Term
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.support.base import Support, text_of

__all__ = ["all", "causal", "lengths", "mask", "not_self", "segments", "window"]


@dataclass(frozen=True, eq=False)
class _All(Support):
    """Every key, or with a hole every key but the row's own."""

    hole: bool = False

    def __repr__(self) -> str:
        return "support.not_self()" if self.hole else "support.all()"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        return (Term(hole=self.hole),)


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
        return f"support.lengths({text_of(given) if isinstance(given, Tensor) else given})"

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
        return f"support.segments({', '.join(map(text_of, ids))})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        query = _leading("q_ids", self.query_ids.to(device), (n_query,), batch)
        key = _leading("k_ids", self.key_ids.to(device), (n_key,), batch)
        return (Term(query_segment=query.long(), key_segment=key.long()),)


@dataclass(frozen=True, eq=False)
class _Mask(Support):
    keep: Tensor

    def __repr__(self) -> str:
        return f"support.mask({text_of(self.keep)})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        keep = self.keep.to(device)
        keep = keep if keep.dim() >= 2 else keep.expand(1, *(keep.shape or (1,)))
        while keep.dim() - 2 > len(batch) and keep.shape[0] == 1:
            keep = keep[0]
        if not expands(keep.shape, (*batch, n_query, n_key)):
            raise ShapeError(
                f"mask must broadcast to {(*batch, n_query, n_key)}; got {shape_text(self.keep)}. "
                f"A mask (batch, n_query, n_key) for inputs with heads needs mask[:, None]."
            )
        return (Term(mask=align(keep, len(batch), 2)),)


def _leading(name: str, given: Tensor, tail: tuple[int, ...], batch: Sequence[int]) -> Tensor:
    """Align with the leading batch dimensions, 1 for the rest: (B,) or (B, 1) or (B, H) against (B, H)."""
    lead = given.shape[: given.dim() - len(tail)]
    aligned = (*lead, *[1] * (len(batch) - len(lead)))
    if tuple(given.shape[len(lead) :]) != tail or not expands(aligned, batch):
        more = f" followed by {tail}" if tail else ""
        raise ShapeError(
            f"{name} must match the leading batch dimensions of {tuple(batch)}{more}; got {shape_text(given)}."
        )
    return given.reshape((*aligned, *tail))


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
    return _All(hole=True)


def mask(keep: Tensor) -> Support:
    """Keys where `keep` is True; broadcasts to (..., n_query, n_key) as torch does, aligned at the right."""
    check_bool("mask", keep)
    return _Mask(keep)
