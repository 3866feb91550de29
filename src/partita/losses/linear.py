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
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from partita import _checks
from partita._torch_function import overridable
from partita.collective import Collective, Fact, collective_of
from partita.engine import Stats
from partita.engine.dispatch import scores, weighted_nll
from partita.engine.listed import of_rows
from partita.engine.request import Request, build
from partita.engine.small import scores as small_scores
from partita.engine.state import divided
from partita.errors import DtypeError, ShapeError, TargetError, ValueRangeError
from partita.losses.objective import Options, Terms, likeliest
from partita.losses.vocabulary import check_head, local_ids
from partita.precision import accumulation_dtype, loss_dtype, no_autocast
from partita.recompute import by_rows, row_blocks
from partita.rows import Rows, loss_stats, placed

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
    with processes.validate():
        names = ("input", "linear_weight", "linear_bias")
        check_head(input, linear_weight, linear_bias, names=names, n_class="n_class", outputs=True)
        if not isinstance(scale, (Tensor, float)):
            _checks.check_number("scale", scale)
        if softcap is not None:
            _checks.check_positive("softcap", softcap)
        given = -100 if ignore_index is None else ignore_index
        options = Options(linear_weight.shape[0], weight, reduction, given, label_smoothing, z_loss, entropy_weight)
        _checks.check_whole("shift", shift, least=0)
        alone = processes.alone
        if not alone and isinstance(target, Tensor) and target.is_floating_point():
            raise ValueRangeError("class probabilities have no form over a group: give class indices, target.long().")
        head = _Head(
            input, linear_weight, target, linear_bias, scale, softcap, sample_weight, options, shift, processes
        )
        if not alone:
            head.request()  # what is wrong is an error on every rank
    dtype, statistics = loss_dtype(input), bool(return_stats) or entropy_weight != 0.0
    scalar = alone and reduction != "none" and not return_stats and not options.regularised
    if scalar and head.alike and weight is None and not label_smoothing:
        request = head.request(target=head.index, statistics=False)  # every row counts alike, and how much is known
        each = 1.0 / max(head.index.numel(), 1) if reduction == "mean" else 1.0
        return weighted_nll(request, request.scale.new_full((), each).expand(head.index.shape)).to(dtype)
    index, here = head.index, None
    if not alone:
        rules = (reduction, given, return_stats, shift)
        processes = _agreed(processes, head, options, rules)
        index, here = local_ids(processes, index)
    terms = _terms(head, options, index, here, processes)
    if scalar and terms.linear is None:  # every coefficient is known before the pass
        each_row = terms.weigh(terms.on_target)
        each_row = divided(each_row, terms.weigh(terms.share).sum()) if reduction == "mean" else each_row
        return weighted_nll(head.request(target=index, statistics=False), each_row).to(dtype)
    makes = [head.request] if alone else head.leaves(processes)
    sums = processes.slices(makes, index, here, rank=bool(return_stats), statistics=statistics)
    rows = terms.rows(sums.nll(), sums.state)
    loss = processes.replicated(head.place(rows) if reduction == "none" else terms.reduce(rows)).to(dtype)
    return (loss, placed(loss_stats(sums), head.place)) if return_stats else loss


def _small(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: _checks.Reduction) -> Tensor | None:
    """Plain cross entropy of few rows over few classes, none of them ignored; None for everything else."""
    if type(target) is not Tensor or target.dtype != torch.int64 or not target.is_cpu:
        return None
    logits = small_scores(input, linear_weight)
    if logits is None or target.shape != logits.shape[:1]:
        return None
    low, high = torch.stack(torch.aminmax(target)).tolist()
    if low < 0 or high >= logits.shape[1]:
        return None
    return cross_entropy(logits, target, reduction=reduction)


def _terms(head: _Head, options: Options, index: Tensor, here: Tensor | None, processes: Collective) -> Terms:
    if head.soft is not None:
        soft = options.soften(head.soft, head.dtype)
        return Terms.of_probabilities(options, soft, head.weighted_scores(soft), head.sample)
    linear = head.weighted_scores(options.class_weight(head.dtype)) if options.label_smoothing else None
    return Terms.of_classes(options, index, linear, head.sample, head.mask, head.dtype, processes, here)


def _agreed(processes: Collective, head: _Head, options: Options, rules: tuple[object, ...]) -> Collective:
    """The same processes with the sizes of their slices; raises on every rank if their rows or options differ."""
    with processes.validate():
        scale, index = head.scale, head.index
        _checks.check_device(("input", "target"), (head.query, index))
        known = _checks.concrete(index) and index.numel()
        low, high = (int(edge) for edge in torch.aminmax(index)) if known else (0, -1)
        given: dict[str, Fact] = {
            "the dtype of input": head.query.dtype,
            "the rows of input": tuple(index.shape),
            "the last dimension of input": head.query.shape[-1],
            "the dtype of linear_weight": head.key.dtype,
            "target (its checksum)": _checksum(index),
            "scale": scale if isinstance(scale, Tensor) else float(scale),
            "softcap": head.softcap,
            "whether there is a linear_bias": head.bias is not None,
            "whether there are class weights": options.weight is not None,
            "whether there are sample weights": head.sample is not None,
            "label_smoothing": float(options.label_smoothing),
            "z_loss": options.z_loss,
            "entropy_weight": options.entropy_weight,
        }
    processes = processes.check_same(f"linear_cross_entropy {rules}", [options.n_class], given)
    (sizes,) = processes.sizes
    if low < 0 or high >= sum(sizes):  # targets are the same everywhere, so this is an error everywhere
        raise TargetError(
            f"target must name a class of the whole, 0 <= target < {sum(sizes)} = {' + '.join(map(str, sizes))}; "
            f"got values from {low} to {high}."
        )
    return processes


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


class _Head:
    """Queries, keys and what belongs to a row, in the layout of the rows."""

    def __init__(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None,
        scale: float | Tensor,
        softcap: float | None,
        sample_weight: Tensor | None,
        options: Options,
        shift: int,
        processes: Collective,
    ):
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
        query = input if left is None else input[..., :left, :]
        if soft:
            rows = Rows(shape)
        else:
            counts = index != options.ignore_index
            rows = Rows.of(counts, fixed=bool(outputs))
            if processes.alone and (rows.counts is None or _checks.has_values(index)):
                left_out = rows.where is not None or rows.counts is not None
                _checks.check_classes(index[counts] if left_out else index, options.n_class, options.ignore_index)
            if rows.where is not None:
                where = rows.where if left is None else _positions(input, left)[rows.where]
                query = input.reshape(input.shape[:-1].numel(), dim).index_select(0, where)
            elif rows.counts is not None:
                index = torch.where(counts, index, torch.zeros_like(index))
        # cutting the last positions off several sequences leaves no flat view: then the batch stays a batch
        batched = rows.where is None and left is not None and len(lead) > 1

        def lay(x: Tensor) -> Tensor:
            """A tensor of the caller's shape in the layout of the rows."""
            if outputs:
                return x.reshape(n, *outputs).movedim(0, -1)
            return x if batched else rows.take(x)

        self.query = query if rows.where is not None or batched else query.reshape(n, dim)
        self.key = linear_weight.movedim(0, -2) if outputs else linear_weight
        self.bias = None if linear_bias is None else linear_bias.movedim(0, -1)[..., None, :]  # (*K, 1, n_class)
        self.scale = lay(scale) if isinstance(scale, Tensor) and scale.dim() else scale
        self._cap: dict[str, Any] = {"softcap": softcap, "cap_bias": softcap is not None, "checked": True}
        self.request = functools.partial(build, self.query, self.key, scale=self.scale, bias=self.bias, **self._cap)
        self.softcap, self.outputs, self.rows = softcap, bool(outputs), rows
        self.index = lay(index)  # class of every row; the likeliest one where probabilities are given
        self.soft: Tensor | None = None  # (*rows, n_class)
        if soft:
            self.soft = target.reshape(n, options.n_class, *outputs).movedim((0, 1), (-2, -1))
        self.sample = None if sample is None else lay(sample)
        self.mask = None if rows.counts is None else lay(rows.counts)

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.query.dtype)

    @property
    def alike(self) -> bool:
        """Every row has a class, and counts alike."""
        return self.soft is None and self.sample is None and self.mask is None

    def leaves(self, processes: Collective) -> list[Callable[..., Request]]:
        """As `request`, of each leaf that this rank's slice is cut into over a group in exact rows."""
        cut = processes.leaves((self.query, self.scale), self.key, self.bias)
        return [functools.partial(build, q, k, scale=scale, bias=bias, **self._cap) for (q, scale), k, bias in cut]

    def place(self, found: Tensor, blank: float = 0) -> Tensor:
        """Results of the rows in the caller's shape, blank where ignored."""
        return self.rows.place(found.movedim(-1, 0) if self.outputs else found, blank)

    def weighted_scores(self, coefficient: Tensor | None) -> Tensor:
        """sum_c coefficient_c s_c of every row, without streaming: a score against the weighted sum of the keys.

        coefficient: None (all 1), (n_class,), or (*rows, n_class). Under a softcap the sum is over all scores, some
        rows at a time.
        """
        dtype = self.dtype
        with no_autocast(self.query):
            if self.softcap is not None:
                return self._capped(coefficient)
            query, key = self.query.to(dtype), self.key.to(dtype)
            scale = self.scale.to(dtype) if isinstance(self.scale, Tensor) else self.scale
            if coefficient is None or coefficient.dim() == 1:
                mean = key.sum(-2) if coefficient is None else (coefficient[:, None] * key).sum(-2)
                score = scale * (query @ mean[..., None])[..., 0]
            else:
                score = scale * (query * (coefficient @ key)).sum(-1)
            if self.bias is not None:
                bias = self.bias.to(dtype)
                score = score + (bias if coefficient is None else bias * coefficient).sum(-1)
            return score

    def _capped(self, coefficient: Tensor | None) -> Tensor:
        request = self.request()

        def total(rows: slice) -> tuple[Tensor]:
            s = scores(of_rows(request, rows))
            if coefficient is not None:
                s = s * (coefficient if coefficient.dim() == 1 else coefficient[..., rows, :])
            return (s.sum(-1),)

        (found,) = by_rows(total, row_blocks(request.n_query, max(request.n_key, 1), request.batch), (0,))
        return found


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
