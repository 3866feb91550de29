"""Losses of logits that exist already, classes in dimension 1 as torch has them.

               gradient by the logits            confidently wrong row
cross entropy  p - y                             keeps pulling: 1 as p_target -> 0
squared        2 J(p) (p - y)                    vanishes, because J(p) does (M-LOSS-5)
absolute       -2 p_target (e_target - p)        vanishes with p_target (M-LOSS-10)
focal          weights p - y by how wrong it is  keeps pulling (M-LOSS-8)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partita import _checks
from partita._checks import Reduction
from partita._torch_function import overridable
from partita.engine import Stats
from partita.engine.state import levels
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.losses.linear import over_rows
from partita.losses.objective import Options, Terms, likeliest
from partita.precision import loss_dtype
from partita.rows import Rows, loss_stats, placed, reduce_rows, sums_of

__all__ = ["brier_loss", "cross_entropy", "focal_loss", "mae_loss", "mse_loss"]


@overridable
def cross_entropy(
    input: Tensor,  # (n_class,), (N, n_class) or (N, n_class, d_1, ..., d_K) logits
    target: Tensor,  # class indices without the class dimension, or class probabilities of the shape of input
    *,
    weight: Tensor | None = None,  # (n_class,)
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    scale: float | Tensor = 1.0,
    z_loss: float = 0.0,
    entropy_weight: float = 0.0,
    sample_weight: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Stats]:
    """Cross entropy of explicit logits.

        loss_i = log sum_c exp(z_ic) - z_i,target_i              or  -sum_c y_ic log p_ic

    Equal to ``F.cross_entropy`` in its own arguments, but for nothing to average: 0, not nan. A head whose logits need
    not exist is `linear_cross_entropy`. With class weights `mean` divides by the weights of the rows' classes, as torch
    does; ``reduction="sum"`` divided by the number of rows lets a rare class really count more.
    Spec: M-LOSS-1, M-LOSS-2, M-LOSS-7, M-LOSS-9.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))  # log 4
    tensor(1.3863)
    """
    logits = _classes_last(input)
    n_class = logits.shape[-1]
    options = Options(n_class, weight, reduction, ignore_index, label_smoothing, z_loss, entropy_weight)
    if not isinstance(scale, Tensor):
        _checks.check_number("scale", scale)
    elif scale.numel() != 1:
        _checks.check_rows("scale", scale, logits, over="input")
    raised = scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    shape = logits.shape[:-1]
    sample = None if sample_weight is None else over_rows("sample_weight", sample_weight, shape).to(raised.dtype)
    probs = _probabilities(target, input)
    if probs is not None:
        if ignore_index >= 0:
            raise ValueRangeError("ignore_index names a class index; it cannot be given with class probabilities.")
        soft = options.soften(probs, raised.dtype)
        index = likeliest(probs, -1)
        _checks.check_classes(index, n_class, ignore_index)
        sums = sums_of(raised, index)
        terms = Terms.of_probabilities(options, soft, (soft * raised).sum(-1), sample)
    else:
        index, kept = _index(target, shape, n_class, ignore_index)
        sums = sums_of(raised, index)
        class_weight = options.class_weight(raised.dtype)
        linear = (raised if class_weight is None else raised * class_weight).sum(-1) if label_smoothing else None
        terms = Terms.of_classes(options, index, linear, sample, kept, raised.dtype)
    loss = terms.reduce(terms.rows(sums.nll(), sums.state)).to(loss_dtype(input))
    return (loss, placed(loss_stats(sums), Rows(shape, None, terms.kept).place)) if return_stats else loss


@overridable
def focal_loss(
    logits: Tensor,  # as the input of cross_entropy
    target: Tensor,  # class indices
    *,
    gamma: float = 2.0,
    alpha: float | Tensor | None = None,  # one number, or (n_class,)
    reduction: Reduction = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Cross entropy that looks away from what is already right.

        loss_i = -alpha_target (1 - p_target)^gamma log p_target

    gamma 0 is weighted cross entropy; `mean` divides by the number of rows. A function of nll alone, so that a streamed
    head has it too: ``(1 - exp(-nll))**gamma * nll``. Spec: M-LOSS-8.

    >>> focal_loss(torch.zeros(1, 2), torch.tensor([0]))  # (1/2)^2 log 2
    tensor(0.1733)
    """
    _checks.check_reduction(reduction)
    _checks.check_positive("gamma", gamma, zero=True)
    logits = _classes_last(logits)
    if isinstance(alpha, Tensor) and alpha.dim():
        _checks.check_classwise("alpha", alpha, logits.shape[-1])
    elif alpha is not None and not isinstance(alpha, Tensor):
        _checks.check_number("alpha", alpha)
    raised = logits.to(torch.promote_types(logits.dtype, torch.float32))
    index, kept = _index(target, logits.shape[:-1], logits.shape[-1], ignore_index)
    nll = sums_of(raised, index).nll()
    rows = nll
    if gamma:
        wrong = 1 - (-nll).exp()
        # at p_target = 1 the power of 0 has an infinite slope for gamma < 1, against a loss of 0
        sure = wrong <= 0
        rows = torch.where(sure, torch.zeros_like(nll), torch.where(sure, torch.ones_like(wrong), wrong) ** gamma * nll)
    if alpha is not None:
        by_class = isinstance(alpha, Tensor) and alpha.dim() > 0
        rows = rows * (alpha[_checks.within(index, logits.shape[-1])[0]] if by_class else alpha)  # type: ignore[index]
    return _mean_of_kept(rows, kept, reduction).to(loss_dtype(logits))


@overridable
def brier_loss(
    input: Tensor, target: Tensor, *, on: str = "probabilities", reduction: Reduction = "mean", ignore_index: int = -100
) -> Tensor:
    """Squared error of a classifier, summed over classes, no factor 1/2: the Brier score. `mse_loss` is its old name.

        on="probabilities":  |softmax(z) - y|^2       gradient 2 J(p) (p - y): gone where the row is surely wrong
        on="logits":         |z - y|^2                gradient 2 (z - y): regression of the indicator, no softmax

    target: class indices, or class probabilities of the shape of input. Between 0 and 2 on probabilities.
    Spec: M-LOSS-4, M-LOSS-5, M-LOSS-6.

    >>> brier_loss(torch.zeros(1, 2), torch.tensor([0]))  # 2 (1 - 1/2)^2
    tensor(0.5000)
    """
    return _error(input, target, on, ignore_index, reduction, torch.square)


mse_loss = brier_loss


@overridable
def mae_loss(
    input: Tensor, target: Tensor, *, on: str = "probabilities", reduction: Reduction = "mean", ignore_index: int = -100
) -> Tensor:
    """Absolute error of a classifier, summed over classes.

        on="probabilities":  |softmax(z) - y|_1 = 2 (1 - p_target) for a class index: bounded, so that a wrong label
                             costs 2 at most        gradient -2 p_target (e_target - p)

    Spec: M-LOSS-10.

    >>> mae_loss(torch.zeros(1, 4), torch.tensor([0]))  # 2 (1 - 1/4)
    tensor(1.5000)
    """
    return _error(input, target, on, ignore_index, reduction, torch.abs)


def _error(
    input: Tensor, target: Tensor, on: str, ignore_index: int, reduction: Reduction, size: Callable[[Tensor], Tensor]
) -> Tensor:
    if on not in ("probabilities", "logits"):
        raise ValueRangeError(f"on must be 'probabilities' or 'logits'; got {on!r}.")
    logits, y = _classes_last(input), _probabilities(target, input)
    raised = logits.to(torch.promote_types(logits.dtype, torch.float32))
    kept: Tensor | None = None
    if y is None:
        index, kept = _index(target, logits.shape[:-1], logits.shape[-1], ignore_index)
        # torch's one_hot would fix the number of classes in a graph
        y = (index[..., None] == torch.arange(logits.shape[-1], device=index.device)).to(raised.dtype)
        lost = _checks.within(index, logits.shape[-1])[1]
        y = y if lost is None else y.masked_fill(lost[..., None], torch.nan)
    found = (raised - levels(raised)[..., None]).exp() if on == "probabilities" else raised
    return _mean_of_kept(size(found - y.to(raised.dtype)).sum(-1), kept, reduction).to(loss_dtype(input))


def _mean_of_kept(rows: Tensor, kept: Tensor | None, reduction: Reduction) -> Tensor:
    _checks.check_reduction(reduction)
    if kept is None:
        return reduce_rows(rows, reduction)
    rows = torch.where(kept, rows, torch.zeros_like(rows))
    return reduce_rows(rows, reduction, kept.sum().to(rows.dtype))


def _classes_last(input: Tensor) -> Tensor:
    """torch's (n_class,), (N, n_class, ...) with the classes in the last dimension."""
    _checks.check_float("input", input)
    if input.dim() == 0:
        raise ShapeError("input must hold logits, (n_class,) or (N, n_class, ...); got a single number.")
    return input if input.dim() == 1 else input.movedim(1, -1)


def _probabilities(target: Tensor, input: Tensor) -> Tensor | None:
    """Class probabilities with the classes in the last dimension; None for class indices."""
    if not isinstance(target, Tensor) or not target.is_floating_point():
        return None
    if target.shape != input.shape:
        raise ShapeError(
            f"class probabilities must have the shape of input, {_checks.shape_text(input)}; "
            f"got {_checks.shape_text(target)}."
        )
    return _classes_last(target)


def _index(target: Tensor, shape: torch.Size, n_class: int, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Class indices that can be gathered, and which rows count (None: all)."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise DtypeError("target must hold class indices; use target.long().")
    _checks.check_index_dtype("target", target)
    _checks.check_whole("ignore_index", ignore_index)
    if target.shape != shape:
        raise ShapeError(f"class indices must have shape {tuple(shape)}; got {_checks.shape_text(target)}.")
    index = target.long()  # before the comparison: -100 is 156 among uint8
    kept = index != ignore_index
    safe = torch.where(kept, index, torch.zeros_like(index))
    if n_class or (_checks.has_values(kept) and bool(kept.any())):
        _checks.check_classes(safe, n_class, ignore_index)
    return safe, kept
