"""The kinds of support: bands, lengths, segments, all but one, a mask; and patterns of sparse attention.

Patterns are row intervals and ids: O(n) numbers each. A Longformer layer is `window(w, w) | global_tokens([0])`, a
BigBird layer adds `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita._checks import (
    broadcast,
    check_bool,
    check_index_dtype,
    check_positions,
    check_whole,
    concrete,
    cure_of_mask,
    expands,
    has_values,
    shape_text,
)
from partita.engine.axes import align
from partita.engine.terms import Term
from partita.errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from partita.support.base import Support, text_of

__all__ = [
    "all", "blocks", "causal", "check_align", "dilated", "global_tokens", "lengths", "mask", "not_self", "segments",
    "strided", "window",
]  # fmt: skip


@dataclass(frozen=True)
class _All(Support):
    positional = True

    def __repr__(self) -> str:
        return "support.all()"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        return (Term(),)


@dataclass(frozen=True)
class _NotSelf(Support):
    positional = True

    def __repr__(self) -> str:
        return "support.not_self()"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        check_positions(n_query, n_key)
        return (Term(skip=_rows(n_query, batch, device)),)


@dataclass(frozen=True)
class _Band(Support):
    """Keys within fixed distances of the row; causal masks are bands too."""

    positional = True
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
        row = _rows(n_query, batch, device) + shift
        # clamped past every position, so that 32 bits hold it
        furthest = n_query + n_key
        start = None if self.left is None else row - max(-furthest, min(self.left, furthest))
        stop = None if self.right is None else row + (max(-furthest, min(self.right, furthest)) + 1)
        return (Term(start=start, stop=stop),)


def _rows(n_query: int, batch: Sequence[int], device: torch.device) -> Tensor:  # (1, ..., 1, n_query)
    return torch.arange(n_query, device=device, dtype=torch.int32).view(*[1] * len(batch), n_query)


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
        # values on a device are not checked, and must not overflow 32 bits
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
        query = _leading("q_ids", self.query_ids, (n_query,), batch).long()
        key = _leading("k_ids", self.key_ids, (n_key,), batch).long()
        found = _standing_together(query, key) if max(n_query, n_key) < 2**31 else None
        if found is not None:
            return (Term(start=found[0].to(device), stop=found[1].to(device)),)
        return (Term(query_segment=query.to(device), key_segment=key.to(device)),)


def _standing_together(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
    """Packed documents: where each row's segment starts and stops, if the keys of every segment are contiguous.

    An interval skips the keys of other documents, ids do not. On a device no value is read.
    """
    for ids in (query, key):
        if not has_values(ids) or ids.device.type != "cpu":
            return None
    ordered, place = key, torch.arange(key.shape[-1], device=key.device).expand(key.shape)
    if bool((key[..., 1:] < key[..., :-1]).any()):
        ordered, place = key.sort(dim=-1, stable=True)
        same, next_door = ordered[..., 1:] == ordered[..., :-1], place[..., 1:] == place[..., :-1] + 1
        if bool((same & ~next_door).any()):
            return None
    batch = broadcast(query.shape[:-1], key.shape[:-1])
    ordered, query = (ids.expand(*batch, -1).contiguous() for ids in (ordered, query))
    first = torch.searchsorted(ordered, query)
    count = torch.searchsorted(ordered, query, right=True) - first
    # an id that no key has may come after all of them
    start = torch.nn.functional.pad(place.expand(*batch, -1), (0, 1)).gather(-1, first)
    return start.to(torch.int32), (start + count).to(torch.int32)


@dataclass(frozen=True, eq=False)
class _Mask(Support):
    keep: Tensor

    def __repr__(self) -> str:
        return f"support.mask({text_of(self.keep)})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        if self.keep.is_meta and device.type != "meta":
            raise DeviceError(f"the mask is on meta, the queries on {device}: it has no values. Make it there.")
        keep = self.keep.to(device)
        keep = keep if keep.dim() >= 2 else keep.expand(1, *(keep.shape or (1,)))
        while keep.dim() - 2 > len(batch) and keep.shape[0] == 1:
            keep = keep[0]
        if not expands(keep.shape, (*batch, n_query, n_key)):
            raise ShapeError(
                f"mask must broadcast to {(*batch, n_query, n_key)}; got {shape_text(self.keep)}. "
                f"{cure_of_mask('mask', self.keep, n_query, n_key)}"
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
    check_align(align)
    return _Band(None, 0, align == "bottom-right")


def check_align(align: str) -> None:
    if align not in ("top-left", "bottom-right"):
        raise ValueRangeError(f"align must be 'top-left' or 'bottom-right'; got {align!r}.")


def window(left: int | None, right: int | None) -> Support:
    """Keys near the query: i - left <= j <= i + right, both ends included; None is unbounded.

    A number may be negative: window(None, -1) shows what comes before the query. left + right < 0 is refused.

    >>> window(1, 1).visible(4, 4)
    tensor([2, 3, 3, 2])
    """
    for name, reach in (("left", left), ("right", right)):
        if reach is not None and (not isinstance(reach, int) or isinstance(reach, bool)):
            raise DtypeError(f"window {name} must be an integer or None; got {type(reach).__name__}.")
    _check_reach("window", left, right)
    return _Band(left, right)


def _check_reach(name: str, left: int | None, right: int | None) -> None:
    """Refuse a window that ends before it starts, such as the -1 that other libraries read as unbounded."""
    if left is not None and right is not None and left + right < 0:
        raise ValueRangeError(
            f"support.{name} with left={left}, right={right} shows no key to any query: their sum must be at least 0. "
            f"Unbounded is None, not -1: left=None, right=0 shows the query's own key and what comes before it."
        )


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


# ---- patterns of sparse attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Residue(Support):
    """Keys whose distance from the row is a multiple of a step."""

    positional = True
    step: int

    def __repr__(self) -> str:
        return f"support.strided({self.step})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        check_positions(n_query, n_key)
        rows, keys = (torch.arange(n, dtype=torch.int64, device=device) % self.step for n in (n_query, n_key))
        return (Term(query_segment=rows, key_segment=keys).align(len(batch)),)


@dataclass(frozen=True, eq=False)
class _Blocks(Support):
    block: int
    layout: Tensor

    def __repr__(self) -> str:
        return f"support.blocks({self.block}, {text_of(self.layout)})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        check_positions(n_query, n_key)
        shape = (-(-n_query // self.block), -(-n_key // self.block))
        if tuple(self.layout.shape[-2:]) != shape or not expands(self.layout.shape[:-2], batch):
            raise ShapeError(
                f"layout must broadcast to {(*batch, *shape)}, the blocks of {self.block} in {n_query} rows and "
                f"{n_key} keys; got {shape_text(self.layout)}."
            )
        layout = align(self.layout.to(device), len(batch), 2)
        row = torch.arange(n_query, dtype=torch.int64, device=device) // self.block
        if torch.compiler.is_compiling():  # the number of runs of a row depends on values
            column = torch.arange(n_key, dtype=torch.int64, device=device) // self.block
            return (Term(mask=layout[..., row, :][..., column]),)
        start, stop = _runs(layout)
        start, stop = ((t * self.block).clamp(max=n_key).to(torch.int32)[..., row, :] for t in (start, stop))
        return tuple(Term(start=a, stop=b) for a, b in zip(start.unbind(-1), stop.unbind(-1), strict=True))


def _runs(layout: Tensor) -> tuple[Tensor, Tensor]:  # (..., rows, cols) -> (..., rows, runs), twice
    """Where the runs of True begin and end in each row; rows with fewer runs are filled up with empty ones."""
    cols = layout.shape[-1]
    gap = layout.new_zeros((*layout.shape[:-1], 1))
    edge = torch.cat([gap, layout], -1) != torch.cat([layout, gap], -1)  # (..., rows, cols + 1): a run begins or ends
    at = torch.arange(cols + 1, dtype=torch.int64, device=layout.device)
    # the edges of a row in order, begin and end alternating, filled up with `cols`
    ordered = torch.where(edge, at, cols).sort(-1).values
    most = cols + 1
    if has_values(edge) and edge.numel():  # else the upper bound
        most = max(int(edge.sum(-1).max()), 2)
    ordered = torch.nn.functional.pad(ordered, (0, 1), value=cols)[..., : most + most % 2]
    return ordered[..., 0::2], ordered[..., 1::2]


@dataclass(frozen=True)
class _GlobalTokens(Support):
    positional = True
    positions: tuple[int, ...]  # sorted, without repeats

    def __repr__(self) -> str:
        return f"support.global_tokens({list(self.positions)})"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        check_positions(n_query, n_key)
        own = torch.tensor([p for p in self.positions if p < n_query], dtype=torch.int64, device=device)
        row = torch.zeros(n_query, dtype=torch.int32, device=device)
        sees_all = row.clone()
        sees_all[own] = n_key
        terms = [Term(stop=sees_all)]
        terms += [Term(start=row + first, stop=row + last) for first, last in _neighbours(self.positions, n_key)]
        return tuple(term.align(len(batch)) for term in terms)


def _neighbours(positions: Sequence[int], end: int) -> list[tuple[int, int]]:
    """Adjacent positions, as intervals [first, last)."""
    found: list[tuple[int, int]] = []
    for p in positions:
        if p < end:
            joins = found and found[-1][1] == p
            found[-1:] = [(found[-1][0], p + 1)] if joins else [*found[-1:], (p, p + 1)]
    return found


def strided(stride: int, window: int = 0) -> Support:
    """Every stride-th key from the query on, and a window around it: j = i mod stride, or |i - j| <= window.

    >>> strided(3).dense(1, 7).int().tolist()
    [[1, 0, 0, 1, 0, 0, 1]]
    >>> (strided(4, window=1) & window(None, 0)).visible(9, 9)  # row 8: 0, 4, 7, 8
    tensor([1, 2, 2, 2, 3, 3, 3, 3, 4])
    """
    check_whole("stride", stride, least=1)
    check_whole("window", window, least=0)
    every = _Residue(stride)
    return every if window == 0 else _Band(window, window) | every


def dilated(step: int, left: int | None, right: int | None) -> Support:
    """A window with gaps: j = i + t step for -left <= t <= right; None is unbounded.

    >>> dilated(2, 1, 1).dense(5, 5)[2].int().tolist()  # 0, 2 and 4
    [1, 0, 1, 0, 1]
    """
    check_whole("step", step, least=1)
    for name, reach in (("left", left), ("right", right)):
        if reach is not None:
            check_whole(name, reach)
    _check_reach("dilated", left, right)
    return window(None if left is None else left * step, None if right is None else right * step) & _Residue(step)


def blocks(block: int, layout: Tensor) -> Support:
    """Whole blocks of keys: layout[i // block, j // block]; the layout is (..., query blocks, key blocks), True shows.

    Leading dimensions broadcast as a mask's: one layout per head is (heads, ., .). The last block may be shorter.

    >>> blocks(2, torch.tensor([[True, False], [True, True]])).visible(4, 3)
    tensor([2, 2, 3, 3])
    """
    check_whole("block", block, least=1)
    check_bool("layout", layout)
    if layout.dim() < 2:
        raise ShapeError(f"layout must be (..., query blocks, key blocks); got {shape_text(layout)}.")
    return _Blocks(block, layout)


def global_tokens(positions: Sequence[int] | Tensor) -> Support:
    """Tokens that see every key and are seen by every query: i or j is one of the positions.

    Positions beyond the last query or key are ignored.

    >>> (window(1, 1) | global_tokens([0])).visible(5, 5)  # row 0 sees all; rows 2 to 4 their window and key 0
    tensor([5, 3, 4, 4, 3])
    """
    if isinstance(positions, Tensor):
        check_index_dtype("positions", positions)
        if not concrete(positions):
            raise DtypeError("positions must be known when the support is made; give a list of integers.")
        positions = positions.reshape(-1).tolist()
    if not isinstance(positions, Sequence) or isinstance(positions, str):
        raise DtypeError(f"positions must be a sequence of whole numbers; got {positions!r}. One is [{positions!r}].")
    for p in positions:
        check_whole("a global position", p, least=0)
    return _GlobalTokens(tuple(sorted(set(positions))))
