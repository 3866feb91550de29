"""Temperature, the reciprocal of scale: where a field speaks of it, and distillation, which softens with it."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import Number, above_zero, number, require
from partita.theory.information.entropy import entropy

__all__ = [
    "distillation_gradient",
    "distillation_loss",
    "effective_temperature",
    "entropy_sweep",
    "scale_of_temperature",
]


def scale_of_temperature(temperature: Number) -> Tensor:
    """The factor that multiplies scores when a temperature divides them; 1/sqrt(dim) is the temperature sqrt(dim).

        scale = 1 / temperature

    Spec: M-TMP-1.

    >>> scale_of_temperature(0.25).item()
    4.0
    """
    return 1 / above_zero("temperature", temperature)


def effective_temperature(n: Number, dim: Number, kappa: Number = 1.0) -> Tensor:
    """The temperature that the scale kappa log(n) / dim stands for.

        T = dim / (kappa * log n)

    Infinite at n = 1 (scale 0, all weight on the only key); refused for n = 0. Spec: M-TMP-3.

    >>> effective_temperature(1, 64).item()
    inf
    """
    n = number(n)
    require(n >= 1, f"a row without keys has no temperature; got n = {n}.")
    return number(dim) / (number(kappa) * n.log())


def entropy_sweep(scores: Tensor, temperatures: Tensor) -> Tensor:  # (..., n), (m,) -> (m, ...)
    """Entropy of the same scores at several temperatures: it rises from log(ties at the top) to log n.

        H(softmax(scores / t))

    Monotone only without a bias. Spec: M-TMP-2, M-GIB-3.

    >>> entropy_sweep(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1e-3, 1e6]))  # log 2 and log 3
    tensor([0.6931, 1.0986])
    """
    return torch.stack([entropy(scores / t) for t in temperatures])


def distillation_loss(teacher: Tensor, student: Tensor, temperature: Number = 1.0) -> Tensor:  # (..., n) -> (...)
    """Divergence of a student's softened law from its teacher's; the square keeps gradients comparable across T.

        T^2 * KL(softmax(teacher / T) || softmax(student / T))

    Spec: M-TMP-4.
    From Hinton, Vinyals and Dean (2015), Distilling the knowledge in a neural network.

    >>> distillation_loss(torch.zeros(3), torch.zeros(3), 4.0).item()
    0.0
    """
    t = above_zero("temperature", temperature, student.dtype)
    log_t, log_s = torch.log_softmax(teacher / t, -1), torch.log_softmax(student / t, -1)
    return t**2 * (log_t.exp() * (log_t - log_s)).sum(-1)


def distillation_gradient(teacher: Tensor, student: Tensor, temperature: Number = 1.0) -> Tensor:  # (..., n)
    """Its gradient by the student's logits, both laws at temperature T.

        T * (p_student - p_teacher)

    Spec: M-TMP-4.

    >>> distillation_gradient(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]), 2.0)
    tensor([0., 0.])
    """
    t = number(temperature).to(student.dtype)
    return t * (torch.softmax(student / t, -1) - torch.softmax(teacher / t, -1))
