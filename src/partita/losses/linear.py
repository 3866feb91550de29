"""Cross entropy of a linear classifier, without its logits.

The head is laid out for the engine as rows of queries against classes as keys.

    plain                  query (n, dim)          key (n_class, dim)                rows (n,)
    shifted, none ignored  query (..., T - s, dim) key (n_class, dim)                rows (..., T - s): a view, no copy
    d_1, ..., d_K outputs  query (n, dim)          key (d_1, ..., d_K, n_class, dim) rows (d_1, ..., d_K, n)

Rows whose target is ignored are left out before the pass, so that they cost nothing and cannot spoil anything. Where
values cannot be looked at (compiled, under vmap) or outputs have more dimensions, they go through and count 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from partita import _checks
from partita._torch_function import overridable
from partita.collective import Collective, Fact, collective_of
from partita.engine import Stats
from partita.engine.dispatch import execute, weighted_nll
from partita.engine.request import Request, build
from partita.engine.small import scores
from partita.engine.state import divided
from partita.errors import DtypeError, ShapeError, TargetError, ValueRangeError
from partita.losses.objective import Options, Slice, Terms, check_slice, likeliest
from partita.precision import check_same_dtype, loss_dtype, no_autocast
from partita.rows import among_all_rows, blank_ignored, in_row_blocks, loss_stats, reduce_rows

__all__ = ["linear_cross_entropy", "over_rows"]


@overridable
def linear_cross_entropy(
    input: Tensor,  # (..., dim)
    linear_weight: Tensor,  # (n_class, dim), or (n_class, d_1, ..., d_K, dim)
    target: Tensor,  # (..., d_1, ..., d_K) class indices, or (..., n_class, d_1, ..., d_K) class probabilities
    *,
    linear_bias: Tensor | None = None,  # (n_class, d_1, ..., d_K)
    weight: Tensor | None = None,  # (n_class,)
    reduction: _checks.Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    scale: float | Tensor = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    entropy_weight: float = 0.0,
    sample_weight: Tensor | None = None,  # the shape of the class indices
    return_stats: bool = False,
    shift: int = 0,
    group: object | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """Cross entropy of a linear classifier, without its logits.

        s_ic   = softcap(scale_i * <input_i, weight_c> + bias_c)
        loss_i = log sum_c exp(s_ic) - s_i,target_i            + z_loss * (log Z_i)^2 - entropy_weight * H_i

    Equal to ``F.linear_cross_entropy`` in its own arguments, and to ``F.cross_entropy(F.linear(input, linear_weight),
    target)``, for any leading dimensions. Ignored rows are dropped before anything is computed; nothing left gives 0. A
    frozen input or weight costs no gradient. `sample_weight` multiplies a row's loss with all its terms, and `mean`
    divides by the sum of the weights. A positive `entropy_weight` rewards entropy. Spec: M-LOSS-1, M-LOSS-7, M-LOSS-9,
    M-LOSS-11.

    >>> linear_cross_entropy(torch.zeros(1, 4), torch.zeros(10, 4), torch.tensor([3]))  # log 10
    tensor(2.3026)

    scale: a number, or a tensor that broadcasts to the rows; has a gradient.
    shift: 1 for next-token prediction, target (..., T) as the tokens themselves: position t predicts target t + 1, and
        the hidden states are not copied. `reduction="none"` gives (..., T - shift).
    return_stats: also a `ClassStats` of the rows, with rank, correctness, confidence and the predicted class, all from
        the same pass; across a group too, where it names a class of the whole.
    group: a torch.distributed group (or DeviceMesh) over which the classes are spread: each rank passes its slice of
        linear_weight, linear_bias and weight, in rank order, the same input, and targets that name classes of the
        whole. Every rank gets the same loss; the gradient of the input comes in parts that add up over ranks. Under DDP
        pass `partita.distributed.replicate(input, group)`, as DDP averages what has to be summed.
    """
    if (
        linear_bias is None and weight is None and softcap is None and sample_weight is None and group is None
        and type(scale) is float and scale == 1.0 and type(ignore_index) is int and ignore_index < 0
        and {type(label_smoothing), type(z_loss), type(entropy_weight)} == {float} and type(shift) is int and shift == 0
        and label_smoothing == z_loss == entropy_weight == 0.0 and not return_stats
        and reduction in ("mean", "sum", "none")
    ):  # fmt: skip
        found = _small(input, linear_weight, target, reduction)
        if found is not None:
            return found
    processes = collective_of(group)
    alone, given = processes.alone, -100 if ignore_index is None else ignore_index
    with processes.validate():
        _check_operands(input, linear_weight, linear_bias, scale)
        if softcap is not None:
            _checks.check_positive("softcap", softcap)
        options = Options(linear_weight.shape[0], weight, reduction, given, label_smoothing, z_loss, entropy_weight)
        _checks.check_whole("shift", shift, least=0)
        check_slice(processes, target)
        head = _Head.of(input, linear_weight, target, linear_bias, scale, sample_weight, options, shift, alone)
        capped: dict[str, Any] = {"softcap": softcap, "cap_bias": softcap is not None, "checked": True}
        make = functools.partial(build, head.query, head.key, scale=head.scale, bias=head.bias, **capped)
        if not alone:
            make()  # what is wrong is an error on every rank
    dtype, statistics = loss_dtype(input), bool(return_stats) or entropy_weight != 0.0
    scalar = alone and reduction != "none" and not return_stats and not options.regularised
    if (
        scalar
        and weight is None
        and not label_smoothing
        and head.soft is None
        and head.sample is None
        and head.mask is None
    ):
        request = make(target=head.index, statistics=False)  # every row counts alike, and how much is known
        each = 1.0 / max(head.index.numel(), 1) if reduction == "mean" else 1.0
        return weighted_nll(request, request.scale.new_full((), each).expand(head.index.shape)).to(dtype)
    rules = (reduction, given, return_stats, shift)
    own = _slice_of(processes, head, linear_weight, linear_bias, options, softcap, rules)
    terms = _terms(own, head, options, softcap)
    if scalar:
        total = terms.weigh(terms.share).sum() if reduction == "mean" else None
        return _weighted_sum(make, head.index, terms, total).to(dtype)
    makes = [make]
    if not alone:
        cut = processes.leaves((head.query, head.scale), head.key, head.bias)
        makes = [functools.partial(build, q, k, scale=s, bias=b, **capped) for (q, s), k, b in cut]
    sums = own.sums(makes, rank=bool(return_stats), statistics=statistics)
    rows = terms.rows(sums.nll(), sums.state, options)
    loss = processes.replicated(head.place(rows) if reduction == "none" else terms.reduce(rows, options))
    if not return_stats:
        return loss.to(dtype)
    stats = loss_stats(sums)
    if head.kept is not None:
        return loss.to(dtype), among_all_rows(stats, head.kept, head.shape)
    stats = stats if head.mask is None else blank_ignored(stats, head.mask)
    return loss.to(dtype), type(stats)(*(head.place(field) for field in stats))


def _small(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: _checks.Reduction) -> Tensor | None:
    """Plain cross entropy of few rows over few classes, none of them ignored; None for everything else."""
    if type(target) is not Tensor or target.dtype != torch.int64 or not target.is_cpu:
        return None
    logits = scores(input, linear_weight)
    if logits is None or target.shape != logits.shape[:1]:
        return None
    low, high = torch.stack(torch.aminmax(target)).tolist()
    if low < 0 or high >= logits.shape[1]:
        return None
    return cross_entropy(logits, target, reduction=reduction)


def _weighted_sum(make: Callable[..., Request], target: Tensor, terms: Terms, total: Tensor | None) -> Tensor:
    """The scalar sum_i (on_target_i nll_i + on_partition_i log Z_i - linear_i), divided by `total`.

    Every coefficient is known before the pass, so this is the place where a backend may compute the gradients while it
    goes forward.
    """
    request = make(target=target, statistics=False)
    if terms.linear is None:
        weight = terms.weigh(terms.on_target)
        return weighted_nll(request, weight if total is None else divided(weight, total))
    sums = execute(request)
    out = terms.rows(sums.nll(), sums.state, Options(request.key.shape[-2])).sum()
    return out if total is None else reduce_rows(out, "mean", total)


def _terms(own: Slice, head: _Head, options: Options, softcap: float | None) -> Terms:
    if head.soft is not None:
        soft = options.soften(head.soft, head.dtype)
        return Terms.of_probabilities(soft, _weighted_scores(head, soft, softcap), head.sample)
    linear = None
    if options.label_smoothing:
        linear = _weighted_scores(head, options.class_weight(head.dtype), softcap)
    return own.terms(options, linear, head.sample, head.mask, head.dtype)


def _check_operands(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, scale: float | Tensor) -> None:
    """In the names of this face: errors of the engine name query and key."""
    _checks.check_float("input", input)
    _checks.check_float("linear_weight", linear_weight)
    if not isinstance(scale, (Tensor, float)):
        _checks.check_number("scale", scale)
    if input.dim() < 1 or linear_weight.dim() < 2:
        raise ShapeError(
            f"input must be (..., dim) and linear_weight (n_class, dim); got {_checks.shape_text(input)} and "
            f"{_checks.shape_text(linear_weight)}."
        )
    if input.shape[-1] != linear_weight.shape[-1]:
        raise ShapeError(
            f"input and linear_weight must share their last dim; got {_checks.shape_text(input)} and "
            f"{_checks.shape_text(linear_weight)}. nn.Linear keeps its weight as (n_class, dim)."
        )
    check_same_dtype(("input", "linear_weight"), input, linear_weight)
    if linear_bias is not None:
        _checks.check_float("linear_bias", linear_bias)
    if linear_bias is not None and tuple(linear_bias.shape) != tuple(linear_weight.shape[:-1]):
        raise ShapeError(
            f"linear_bias must have one number per class, shape {tuple(linear_weight.shape[:-1])}; "
            f"got {_checks.shape_text(linear_bias)}."
        )
    _checks.check_device(("input", "linear_weight", "linear_bias"), (input, linear_weight, linear_bias))


def _slice_of(
    processes: Collective,
    head: _Head,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    options: Options,
    softcap: float | None,
    rules: tuple[object, ...],
) -> Slice:
    """The sizes of all slices; raises on every rank if their rows or options differ."""
    if processes.alone:
        return Slice(processes, options.n_class, None, head.index)
    with processes.validate():
        scale, index, own = head.scale, head.index, linear_weight.shape[0]
        _checks.check_device(("input", "target"), (head.query, index))
        known = _checks.concrete(index) and index.numel()
        low, high = (int(edge) for edge in torch.aminmax(index)) if known else (0, -1)
        given: dict[str, Fact] = {
            "the dtype of input": head.query.dtype,
            "the rows of input": tuple(head.rows),
            "the last dimension of input": head.query.shape[-1],
            "the dtype of linear_weight": linear_weight.dtype,
            "target (its checksum)": _checksum(index),
            "scale": scale if isinstance(scale, Tensor) else float(scale),
            "softcap": softcap,
            "whether there is a linear_bias": linear_bias is not None,
            "whether there are class weights": options.weight is not None,
            "whether there are sample weights": head.sample is not None,
            "label_smoothing": float(options.label_smoothing),
            "z_loss": options.z_loss,
            "entropy_weight": options.entropy_weight,
        }
    processes = processes.check_same(f"linear_cross_entropy {rules}", [own], given)
    (sizes,) = processes.sizes
    total = sum(sizes)
    if low < 0 or high >= total:  # targets are the same everywhere, so this is an error everywhere
        raise TargetError(
            f"target must name a class of the whole, 0 <= target < {total} = {' + '.join(map(str, sizes))}; "
            f"got values from {low} to {high}."
        )
    first = sum(sizes[: processes.rank])
    here = (index >= first) & (index < first + own)
    return Slice(processes, total, here, torch.where(here, index - first, torch.zeros_like(index)))


def _checksum(index: Tensor) -> int:
    """One integer for indices in their order: other indices, or the same in another order, give another one.

    Each index and its position are scattered over 64 bits (the finaliser of splitmix64) and added up, which takes
    integers only and is the same on every device. Two different targets agree by chance once in 2^64.
    """
    if not _checks.concrete(index):
        return 0
    flat = index.reshape(-1).long()
    bits = flat + (torch.arange(1, len(flat) + 1, device=flat.device) * -0x61C8864680B583EB)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ (bits >> shift)) * factor
    return int((bits ^ (bits >> 31)).sum())


# ---- the head as rows and classes -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Head:
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
        whole: bool,  # all classes are here
    ) -> _Head:
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
        if soft and not options.n_class:
            _checks.check_classes(index, options.n_class, options.ignore_index)  # of no classes there is no likeliest
        query, kept, mask = (input if left is None else input[..., :left, :]), None, None
        if not soft:
            counts = index != options.ignore_index
            every = _every_counts(counts, index, options, whole)
            if every is False and not outputs:
                kept = counts.reshape(n).nonzero()[:, 0]
                where = kept if left is None else _positions(input, left)[kept]
                query = input.reshape(input.shape[:-1].numel(), dim).index_select(0, where)
            elif not every:
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
        return _Head(
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


def _every_counts(counts: Tensor, index: Tensor, options: Options, whole: bool) -> bool | None:
    """Whether no row is ignored, and every index names a class; the targets are read once. None: not known here.

    Nothing is known while tracing, nor on a device, whose values are not read.
    """
    if not _checks.has_values(counts):
        return None
    if not whole:
        return bool(counts.all())
    wrong = counts & ((index < 0) | (index >= options.n_class))
    every, fine = torch.stack([counts.all(), ~wrong.any()]).tolist()
    if not fine:
        _checks.check_classes(index[counts], options.n_class, options.ignore_index)
    return bool(every)


def _weighted_scores(head: _Head, coefficient: Tensor | None, softcap: float | None) -> Tensor:
    """sum_c coefficient_c s_c of every row, without streaming: a score against the weighted sum of the keys.

    coefficient: None (all 1), (n_class,), or (*rows, n_class). Under a softcap the sum is over
    all scores, a few rows at a time.
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
    _checks.check_float(name, given)
    if given.dim() and shape and given.shape[-1] == shape[-1] + abs(shift) and shift:
        given = given[..., shift:] if shift > 0 else given[..., :shift]
    if not _checks.expands(given.shape, shape):
        raise ShapeError(f"{name} must broadcast to the rows {tuple(shape)}; got {_checks.shape_text(given)}.")
    return given.expand(shape)
