"""Distillation: the target is a teacher's distribution, softened by a temperature.

    loss = T^2 D( softmax(teacher / T), softmax(student / T) )

D is a divergence of `partita.divergence` with the teacher first: forward is KL(teacher||student), which makes the
student cover what the teacher does, reverse is KL(student||teacher), which makes it keep to what the teacher does.
The factor T^2 keeps the size of the gradient as T changes (M-TMP-4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita import _checks
from partita._torch_function import overridable
from partita.comparison import check_kind, divergence, score_divergence, weighted_divergence
from partita.engine.divergences import Kind
from partita.errors import ShapeError
from partita.losses.vocabulary import check_head, distribution
from partita.precision import loss_dtype
from partita.rows import Rows, reduce_rows

__all__ = ["distillation_loss", "linear_distillation_loss"]


@overridable
def distillation_loss(
    student: Tensor,  # (..., n_class) logits
    teacher: Tensor,  # (..., n_class) logits
    *,
    kind: Kind = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: _checks.Reduction = "mean",
) -> Tensor:
    """T^2 KL(teacher || student) of explicit logits, both at the temperature; the teacher gets no gradient.

    >>> teacher = torch.tensor([[3.0, 1.0]]).log()  # (3/4, 1/4) against (1/2, 1/2): log 2 - H(3/4)
    >>> distillation_loss(torch.zeros(1, 2), teacher)
    tensor(0.1308)

    kind, beta: another divergence, as in `partita.divergence`, the teacher first.
    """
    _check(temperature, reduction, kind, beta)
    _checks.check_float("student", student)
    _checks.check_float("teacher", teacher)
    _checks.check_device(("student", "teacher"), (student, teacher))
    if student.shape != teacher.shape:
        raise ShapeError(
            f"student and teacher must have one shape; got {_checks.shape_text(student)} and "
            f"{_checks.shape_text(teacher)}."
        )
    ours, theirs = student / temperature, teacher.detach() / temperature
    rows = score_divergence(theirs, ours, kind, beta=beta)
    return reduce_rows(temperature**2 * rows, reduction).to(loss_dtype(student))


@overridable
def linear_distillation_loss(
    input: Tensor,  # (..., dim)
    linear_weight: Tensor,  # (n_class, dim)
    teacher_input: Tensor,  # (..., dim_teacher)
    teacher_weight: Tensor,  # (n_class, dim_teacher)
    *,
    kind: Kind = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    linear_bias: Tensor | None = None,  # (n_class,)
    teacher_bias: Tensor | None = None,  # (n_class,)
    target: Tensor | None = None,  # (...) class indices, read for ignore_index alone
    ignore_index: int = -100,
    sample_weight: Tensor | None = None,  # (...)
    reduction: _checks.Reduction = "mean",
) -> Tensor:
    """The same for two linear heads over one vocabulary, with the logits of neither; widths may differ.

        loss_i = T^2 D( softmax(teacher_weight teacher_input_i / T), softmax(weight input_i / T) )

    Rows whose target is ignore_index are left out before anything is computed. `mean` divides by the sum of the
    weights; nothing left gives 0. The teacher gets no gradient. A few rows of both logits exist at a time.

    >>> x, w = torch.eye(2), torch.eye(2)
    >>> round(linear_distillation_loss(x, w, x, w, temperature=2.0).abs().item(), 6)
    0.0
    """
    _check(temperature, reduction, kind, beta)
    names = ("input", "linear_weight", "linear_bias"), ("teacher_input", "teacher_weight", "teacher_bias")
    lead = check_head(input, linear_weight, linear_bias, names=names[0], n_class="n_class")
    teacher_lead = check_head(teacher_input, teacher_weight, teacher_bias, names=names[1], n_class="n_class")
    if linear_weight.shape[0] != teacher_weight.shape[0]:
        raise ShapeError(
            f"both heads must have the same number of classes; got {linear_weight.shape[0]} and "
            f"{teacher_weight.shape[0]}."
        )
    if lead != teacher_lead:
        raise ShapeError(
            f"input and teacher_input must have the same rows; got {_checks.shape_text(input)} and "
            f"{_checks.shape_text(teacher_input)}."
        )
    rows = Rows(lead)
    if target is not None:
        _checks.check_index_dtype("target", target)
        if tuple(target.shape) != lead:
            raise ShapeError(f"target must have one index per row, shape {lead}; got {_checks.shape_text(target)}.")
        rows = Rows.of(target != ignore_index)
    dtype = torch.promote_types(input.dtype, torch.float32)
    weight = torch.ones(lead, dtype=dtype, device=input.device)
    if sample_weight is not None:
        _checks.check_rows("sample_weight", sample_weight, input[..., 0])
        weight = sample_weight.detach().to(dtype).expand(lead)
    weight = rows.take(weight if rows.counts is None else weight.masked_fill(~rows.counts, 0))

    student = distribution(rows.take(input), linear_weight, linear_bias, temperature, None)
    teacher_bias = None if teacher_bias is None else teacher_bias.detach()
    given = rows.take(teacher_input.detach()), teacher_weight.detach(), teacher_bias
    teacher = distribution(*given, temperature, None)
    if reduction == "none":
        found = rows.place(temperature**2 * weight * divergence(teacher, student, kind, beta=beta))
        return found.to(loss_dtype(input))
    total = weighted_divergence(teacher, student, temperature**2 * weight, kind, beta=beta)
    return reduce_rows(total, reduction, weight.sum()).to(loss_dtype(input))


def _check(temperature: float, reduction: _checks.Reduction, kind: Kind, beta: float) -> None:
    _checks.check_positive("temperature", temperature)
    _checks.check_reduction(reduction)
    check_kind(kind, beta)
