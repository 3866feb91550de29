"""Cross entropy of a linear classifier, without its logits."""

from __future__ import annotations

from torch import Tensor

from partita import _checks
from partita._overrides import overridable
from partita.engine import Stats
from partita.errors import DtypeError, ShapeError
from partita.gibbs import Gibbs
from partita.losses.head import Head, weighted_scores
from partita.losses.objective import Options, Terms
from partita.losses.sharded import Slice, check_slice
from partita.precision import autocasts, loss_dtype
from partita.processes import processes_of
from partita.rows import among_all_rows, blank_ignored, loss_stats, reduce_rows

__all__ = ["linear_cross_entropy", "weighted_nll"]


@overridable
def linear_cross_entropy(
    input: Tensor,  # (..., dim)
    linear_weight: Tensor,  # (n_class, dim), or (n_class, d_1, ..., d_K, dim)
    target: Tensor,  # (..., d_1, ..., d_K) class indices, or (..., n_class, d_1, ..., d_K) class probabilities
    *,
    linear_bias: Tensor | None = None,  # (n_class, d_1, ..., d_K)
    weight: Tensor | None = None,  # (n_class,)
    reduction: str = "mean",
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
        whole. Every rank gets the same loss; the gradient of the input comes in parts that add up over ranks.
    """
    processes = processes_of(group)
    given = -100 if ignore_index is None else ignore_index
    with processes.checks():
        _check_operands(input, linear_weight, linear_bias)
        options = Options(
            linear_weight.shape[0], weight, reduction, given, label_smoothing, float(z_loss), float(entropy_weight)
        )
        check_slice(processes, target)
        head = Head.of(input, linear_weight, target, linear_bias, scale, sample_weight, options, shift)
        capped = softcap is not None
        gibbs = Gibbs(head.query, head.key, scale=head.scale, bias=head.bias, softcap=softcap, cap_bias=capped)
    dtype, statistics = loss_dtype(input), return_stats or entropy_weight != 0.0
    rules = (reduction, given, return_stats, shift)
    own = Slice.agree(processes, head, linear_weight, linear_bias, options, softcap, rules)
    terms = _terms(own, head, options, softcap)
    if processes.alone and reduction != "none" and not return_stats and not options.regularised:
        total = terms.weigh(terms.share).sum() if reduction == "mean" else None
        return weighted_nll(gibbs, head.index, terms, total).to(dtype)
    sums = own.sums(gibbs, rank=return_stats, statistics=statistics)
    rows = terms.rows(sums.nll(), sums.state, options)
    loss = head.place(rows) if reduction == "none" else terms.reduce(rows, options)
    if not return_stats:
        return loss.to(dtype)
    stats = loss_stats(sums)
    if head.kept is not None:
        return loss.to(dtype), among_all_rows(stats, head.kept, head.shape)
    stats = stats if head.mask is None else blank_ignored(stats, head.mask)
    return loss.to(dtype), type(stats)(*(head.place(field) for field in stats))


def weighted_nll(gibbs: Gibbs, target: Tensor, terms: Terms, total: Tensor | None) -> Tensor:
    """The scalar sum_i (on_target_i nll_i + on_partition_i log Z_i - linear_i), divided by `total`.

    Every coefficient is known before the pass, so this is the place where a backend may compute the gradients while it
    goes forward.
    """
    if terms.linear is None:
        out = gibbs.weighted_nll(target, terms.weigh(terms.on_target))
    else:
        sums = gibbs.reduce(target=target, statistics=False)
        out = terms.rows(sums.nll(), sums.state, Options(gibbs.key.shape[-2])).sum()
    return out if total is None else reduce_rows(out, "mean", total)


def _terms(own: Slice, head: Head, options: Options, softcap: float | None) -> Terms:
    if head.soft is not None:
        soft = options.soften(head.soft, head.dtype)
        return Terms.of_probabilities(soft, weighted_scores(head, soft, softcap), head.sample)
    linear = None
    if options.label_smoothing:
        linear = weighted_scores(head, options.class_weight(head.dtype), softcap)
    return own.terms(options, linear, head.sample, head.mask, head.dtype)


def _check_operands(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    """In the words of this face: the engine would speak of query and key."""
    _checks.check_float("input", input)
    _checks.check_float("linear_weight", linear_weight)
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
    if input.dtype != linear_weight.dtype and not autocasts(input.device.type):
        raise DtypeError(
            f"input and linear_weight must share their dtype; got {input.dtype} and {linear_weight.dtype}. "
            f"Convert one with .to(), or use torch.autocast."
        )
    _checks.check_device(("input", "linear_weight", "linear_bias"), (input, linear_weight, linear_bias))
    if linear_bias is not None and tuple(linear_bias.shape) != tuple(linear_weight.shape[:-1]):
        raise ShapeError(
            f"linear_bias must have one number per class, shape {tuple(linear_weight.shape[:-1])}; "
            f"got {_checks.shape_text(linear_bias)}."
        )
