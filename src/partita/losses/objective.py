"""The terms of a cross entropy, as weights on what one pass knows of each row.

    loss_i = sample_i * ( on_target_i nll_i + on_partition_i log Z_i - linear_i
                          + z_loss (log Z_i)^2 - entropy_weight H_i )

Class indices, smoothing and class probabilities differ only in the first three numbers:

                   on_target               on_partition          linear
    index          (1 - e) weight_target   e mean(weight)        e mean_c(weight_c s_c)        e: the smoothing
    probabilities  0                       sum_c weight_c y_c    sum_c weight_c y_c s_c

`linear` needs no streaming: it is a score against a mean key (M-LOSS-9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partita import _checks
from partita.engine import State
from partita.errors import ShapeError, ValueRangeError
from partita.rows import reduce_rows

__all__ = ["Options", "Terms", "likeliest"]


@dataclass(frozen=True, eq=False)
class Options:
    """What a cross entropy may be asked for, in torch's words, checked once."""

    n_class: int
    weight: Tensor | None = None  # (n_class,)
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        _checks.check_reduction(self.reduction)
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueRangeError(f"label_smoothing must lie in [0, 1]; got {self.label_smoothing!r}.")
        _checks.check_whole("ignore_index", self.ignore_index)
        _checks.check_positive("z_loss", self.z_loss, zero=True)
        if not _checks.finite(self.entropy_weight):
            raise ValueRangeError(f"entropy_weight must be finite; got {self.entropy_weight!r}.")
        if self.weight is not None:
            _checks.check_float("weight", self.weight)
            if tuple(self.weight.shape) != (self.n_class,):
                raise ShapeError(
                    f"weight must hold one number per class, shape ({self.n_class},); "
                    f"got {_checks.shape_text(self.weight)}."
                )

    @property
    def regularised(self) -> bool:
        """Terms that are not linear in nll and log Z."""
        return self.z_loss != 0.0 or self.entropy_weight != 0.0

    def class_weight(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.weight is None else self.weight.to(dtype)

    def soften(self, probabilities: Tensor, dtype: torch.dtype) -> Tensor:  # (..., n_class)
        """weight_c y_c of given class probabilities, smoothed."""
        y = probabilities.to(dtype)
        if self.label_smoothing:
            y = y * (1.0 - self.label_smoothing) + self.label_smoothing / self.n_class
        by_class = self.class_weight(dtype)
        return y if by_class is None else y * by_class


def likeliest(probabilities: Tensor, dim: int) -> Tensor:
    """The class of the largest probability, and 0, which names none, where there is no class."""
    given = probabilities.detach()
    return given.argmax(dim) if given.shape[dim] else given.sum(dim).long()


@dataclass(frozen=True, eq=False)
class Terms:
    """Weights of one row each; `mean` divides by the sum of `share`."""

    on_target: Tensor
    on_partition: Tensor | None
    linear: Tensor | None
    share: Tensor  # what a row counts in a mean
    sample: Tensor | None
    kept: Tensor | None  # False where a row is ignored and yet went through the pass

    @staticmethod
    def of_probabilities(soft: Tensor, linear: Tensor, sample: Tensor | None) -> Terms:
        """Class probabilities, already weighted and smoothed; a mean counts every row once, as torch's does."""
        mass = soft.sum(-1)
        return Terms(torch.zeros_like(mass), mass, linear, torch.ones_like(mass), sample, None)

    def weigh(self, rows: Tensor) -> Tensor:
        """Rows times their sample weight, 0 where ignored."""
        if self.sample is not None:
            rows = rows * self.sample
        return rows if self.kept is None else torch.where(self.kept, rows, torch.zeros_like(rows))

    def rows(self, nll: Tensor, state: State, options: Options) -> Tensor:
        """The loss of every row."""
        out = self.on_target * nll
        if self.linear is not None and self.on_partition is not None:
            out = out + (self.on_partition * state.log_partition() - self.linear)
        if options.z_loss:
            out = out + options.z_loss * state.log_partition().square()
        if options.entropy_weight:
            out = out - options.entropy_weight * state.entropy()
        return self.weigh(out)

    def reduce(self, rows: Tensor, options: Options) -> Tensor:
        total = self.weigh(self.share).sum() if options.reduction == "mean" else None
        return reduce_rows(rows, options.reduction, total)
