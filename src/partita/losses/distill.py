"""Distillation: the target is a teacher's distribution, softened by a temperature.

    loss = T^2 KL( softmax(teacher / T) || softmax(student / T) )        d/d student = T (p_student - p_teacher)

The factor T^2 keeps the size of the gradient as T changes (M-TMP-4).
"""

from __future__ import annotations

from torch import Tensor

from partita import _checks
from partita.engine import State
from partita.errors import ShapeError
from partita.gibbs import Gibbs
from partita.precision import loss_dtype
from partita.rows import probabilities, reduce_rows

__all__ = ["distillation_loss", "linear_distillation_loss"]


def distillation_loss(
    student: Tensor,  # (..., n_class) logits
    teacher: Tensor,  # (..., n_class) logits
    *,
    temperature: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """T^2 KL(teacher || student) of explicit logits, both at the temperature; the teacher gets no gradient.

    >>> teacher = torch.tensor([[3.0, 1.0]]).log()  # (3/4, 1/4) against (1/2, 1/2): log 2 - H(3/4)
    >>> distillation_loss(torch.zeros(1, 2), teacher)
    tensor(0.1308)
    """
    _check(temperature, reduction)
    if student.shape != teacher.shape:
        raise ShapeError(
            f"student and teacher must have one shape; got {_checks.shape_text(student)} and "
            f"{_checks.shape_text(teacher)}."
        )
    ours, theirs = student / temperature, teacher.detach() / temperature
    p, fixed = probabilities(theirs), State.of(theirs)
    rows = State.of(ours).log_partition() - (p * ours).sum(-1) - fixed.entropy()
    return reduce_rows(temperature**2 * rows, reduction)


def linear_distillation_loss(
    input: Tensor,  # (n, dim)
    linear_weight: Tensor,  # (n_class, dim)
    teacher_input: Tensor,  # (n, dim_teacher)
    teacher_weight: Tensor,  # (n_class, dim_teacher)
    *,
    temperature: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """The same for two linear heads, with the logits of neither: the teacher's mean class vector is all it needs.

        KL = log Z_student - <input, E_teacher[weight]> / T - H_teacher

    >>> x, w = torch.eye(2), torch.eye(2)
    >>> round(linear_distillation_loss(x, w, x, w, temperature=2.0).abs().item(), 6)
    0.0
    """
    _check(temperature, reduction)
    if linear_weight.shape[0] != teacher_weight.shape[0]:
        raise ShapeError(
            f"both heads must have as many classes; got {linear_weight.shape[0]} and {teacher_weight.shape[0]}."
        )
    teacher = Gibbs(teacher_input.detach(), teacher_weight.detach(), scale=1 / temperature).state(linear_weight)
    agreement = (input * teacher.expectation().to(input.dtype)).sum(-1) / temperature
    student = Gibbs(input, linear_weight, scale=1 / temperature).reduce(statistics=False).state
    rows = student.log_partition() - agreement - teacher.entropy()
    return reduce_rows(temperature**2 * rows, reduction).to(loss_dtype(input))


def _check(temperature: float, reduction: str) -> None:
    _checks.check_positive("temperature", temperature)
    _checks.check_reduction(reduction)
