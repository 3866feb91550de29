"""A linear head laid out for the engine: rows of queries against classes as keys.

    plain                  query (n, dim)          key (n_class, dim)                rows (n,)
    shifted, none ignored  query (..., T - s, dim) key (n_class, dim)                rows (..., T - s): a view, no copy
    d_1, ..., d_K outputs  query (n, dim)          key (d_1, ..., d_K, n_class, dim) rows (d_1, ..., d_K, n)

Rows whose target is ignored are left out before the pass, so that they cost nothing and cannot spoil anything. Where
values cannot be looked at (compiled, under vmap) or outputs have more dimensions, they go through and count 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita import _checks
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.losses.objective import Options, likeliest
from partita.precision import no_autocast
from partita.rows import in_row_blocks

__all__ = ["Head", "over_rows", "weighted_scores"]


@dataclass(frozen=True, eq=False)
class Head:
    query: Tensor
    key: Tensor
    bias: Tensor | None  # (*K, 1, n_class)
    scale: float | Tensor
    index: Tensor  # class of every row; the likeliest one where probabilities are given
    soft: Tensor | None  # (*rows, n_class)
    sample: Tensor | None
    mask: Tensor | None  # False where a row went through the pass and is ignored
    kept: Tensor | None  # flat positions of the rows that are left
    shape: tuple[int, ...]  # of reduction="none"
    outputs: int  # K

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.index.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def place(self, rows: Tensor) -> Tensor:
        """Results of the rows in the caller's shape, 0 where ignored."""
        if self.kept is not None:
            rows = rows.new_zeros(math.prod(self.shape)).index_put((self.kept,), rows)
        elif self.outputs:
            rows = rows.movedim(-1, 0)
        return rows.reshape(self.shape)

    @staticmethod
    def of(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None,
        scale: float | Tensor,
        sample_weight: Tensor | None,
        options: Options,
        shift: int,
    ) -> Head:
        outputs = tuple(linear_weight.shape[1:-1])
        soft = _is_soft(input, linear_weight, target, options)
        if soft and shift:
            raise ValueRangeError("shift moves class indices; with class probabilities give aligned targets.")
        lead, left = _window(tuple(input.shape[:-1]), shift, bool(outputs))
        shape, n, dim = (*lead, *outputs), math.prod(lead), input.shape[-1]
        sample = None if sample_weight is None else over_rows("sample_weight", sample_weight, shape, shift)
        if isinstance(scale, Tensor) and scale.dim():
            scale = over_rows("scale", scale, shape, -shift)
        target = target[..., shift:] if shift else target
        index = likeliest(target, len(lead)) if soft else target.long()  # uint8 would index as a mask
        counts = None if soft else index != options.ignore_index
        seen = counts is not None and _checks.has_values(counts)

        query, kept, mask = (input if left is None else input[..., :left, :]), None, None
        if counts is not None and seen and not outputs and not bool(counts.all()):
            kept = counts.reshape(n).nonzero()[:, 0]
            where = kept if left is None else _positions(input, left)[kept]
            query = input.reshape(input.shape[:-1].numel(), dim).index_select(0, where)
        elif counts is not None and not (seen and bool(counts.all())):
            mask, index = counts, torch.where(counts, index, torch.zeros_like(index))
        # cutting the last positions off several sequences leaves no flat view: then the batch stays a batch
        batched = kept is None and left is not None and len(lead) > 1
        if kept is None and not batched:
            query = query.reshape(n, dim)

        def lay(x: Tensor) -> Tensor:
            """A tensor of the caller's shape in the layout of the rows."""
            if kept is not None:
                return x.reshape(n)[kept]
            if outputs:
                return x.reshape(n, *outputs).movedim(0, -1)
            return x if batched else x.reshape(n)

        probabilities = None
        if soft:
            probabilities = target.reshape(n, options.n_class, *outputs).movedim((0, 1), (-2, -1))
        return Head(
            query,
            linear_weight.movedim(0, -2) if outputs else linear_weight,
            None if linear_bias is None else linear_bias.movedim(0, -1)[..., None, :],
            lay(scale) if isinstance(scale, Tensor) and scale.dim() else scale,
            lay(index),
            probabilities,
            None if sample is None else lay(sample),
            None if mask is None else lay(mask),
            kept,
            shape,
            len(outputs),
        )


def weighted_scores(head: Head, coefficient: Tensor | None, softcap: float | None) -> Tensor:
    """sum_c coefficient_c s_c of every row, without streaming: a score against the weighted sum of the keys.

    coefficient: None (all 1), (n_class,), or (*rows, n_class). A softcap bends the scores, so that the sum has to look
    at each of them; then a few rows are held at a time.
    """
    dtype = head.dtype
    with no_autocast(head.query):
        query, key = head.query.to(dtype), head.key.to(dtype)
        scale = head.scale.to(dtype) if isinstance(head.scale, Tensor) else head.scale
        bias = None if head.bias is None else head.bias.to(dtype)
        if softcap is not None:
            return _capped(query, key, bias, scale, coefficient, softcap)
        if coefficient is None or coefficient.dim() == 1:
            mean = key.sum(-2) if coefficient is None else (coefficient[:, None] * key).sum(-2)
            score = scale * (query @ mean[..., None])[..., 0]
        else:
            score = scale * (query * (coefficient @ key)).sum(-1)
        if bias is not None:
            score = score + (bias if coefficient is None else bias * coefficient).sum(-1)
        return score


def _capped(
    query: Tensor, key: Tensor, bias: Tensor | None, scale: float | Tensor, coefficient: Tensor | None, cap: float
) -> Tensor:
    """The same sum over softcap(scale * <query, key> + bias)."""
    rows = (*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2])
    factor = scale if isinstance(scale, Tensor) else torch.tensor(scale, dtype=query.dtype, device=query.device)
    if coefficient is None:
        coefficient = torch.ones((), dtype=query.dtype, device=query.device)
    offset = torch.zeros((1, 1), dtype=query.dtype, device=query.device) if bias is None else bias
    per_row = coefficient.dim() > 1

    def total(q: Tensor, f: Tensor, own: Tensor, k: Tensor, b: Tensor) -> Tensor:
        # rows come first here, so that they can be cut; the engine has them last but one
        s = f.movedim(0, -1)[..., None] * (q.movedim(0, -2) @ k.mT)
        s = cap * torch.tanh((s + b) / cap)
        return (s * (own.movedim(0, -2) if per_row else own)).sum(-1).movedim(-1, 0)

    cut = [query.movedim(-2, 0), factor.expand(rows).movedim(-1, 0)]
    shared = [key, offset]
    if per_row:
        cut.append(coefficient.movedim(-2, 0))
    else:
        shared.insert(0, coefficient)
    width = key.shape[-2] * max(1, math.prod(rows[:-1]))
    return in_row_blocks(total, cut, shared, width).movedim(0, -1)


def _is_soft(input: Tensor, linear_weight: Tensor, target: Tensor, options: Options) -> bool:
    """Whether target holds class probabilities; a shape that fits neither kind is an error."""
    lead, outputs = tuple(input.shape[:-1]), tuple(linear_weight.shape[1:-1])
    probabilities, index = (*lead, options.n_class, *outputs), (*lead, *outputs)
    if not isinstance(target, Tensor):
        raise DtypeError(f"target must be a tensor; got {type(target).__name__}.")
    if target.is_floating_point():
        if tuple(target.shape) != probabilities:
            raise ShapeError(
                f"class probabilities must have shape {probabilities}; got {_checks.shape_text(target)}. "
                f"Class indices are integers: target.long()."
            )
        if options.ignore_index >= 0:
            raise ValueRangeError("ignore_index names a class index; it cannot be given with class probabilities.")
        return True
    _checks.check_index_dtype("target", target)
    if tuple(target.shape) != index:
        raise ShapeError(f"class indices must have shape {index}; got {_checks.shape_text(target)}.")
    return False


def _window(lead: tuple[int, ...], shift: int, outputs: bool) -> tuple[tuple[int, ...], int | None]:
    """Rows that are left by a shift, and how many positions of each sequence they are."""
    _checks.check_whole("shift", shift, least=0)
    if shift == 0:
        return lead, None
    if not lead or outputs:
        raise ShapeError("shift needs positions, input (..., T, dim), and a matrix of classes.")
    left = lead[-1] - shift if lead[-1] > shift else 0  # in a graph a comparison, not a maximum
    return (*lead[:-1], left), left


def _positions(input: Tensor, left: int) -> Tensor:
    """Flat row numbers of the first positions of each sequence."""
    lead = input.shape[:-1]
    return torch.arange(lead.numel(), device=input.device).reshape(lead)[..., :left].reshape(-1)


def over_rows(name: str, given: Tensor, shape: Sequence[int], shift: int = 0) -> Tensor:
    """A number per row: cut like the targets (shift > 0) or like the inputs (shift < 0), then spread."""
    if given.dim() and shape and given.shape[-1] == shape[-1] + abs(shift) and shift:
        given = given[..., shift:] if shift > 0 else given[..., :shift]
    if not _checks.expands(given.shape, shape):
        raise ShapeError(f"{name} must broadcast to the rows {tuple(shape)}; got {_checks.shape_text(given)}.")
    return given.expand(shape)
