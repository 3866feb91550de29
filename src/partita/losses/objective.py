"""The terms of a cross entropy, as weights on what one pass knows of each row.

    loss_i = sample_i * ( on_target_i nll_i + on_partition_i log Z_i - linear_i
                          + z_loss (log Z_i)^2 - entropy_weight H_i )

Class indices, smoothing and class probabilities differ only in the first three numbers:

                   on_target               on_partition          linear
    index          (1 - e) weight_target   e mean(weight)        e mean_c(weight_c s_c)        e: the smoothing
    probabilities  0                       sum_c weight_c y_c    sum_c weight_c y_c s_c

`linear` needs no streaming: it is a score against a mean key (M-LOSS-9).

Over a group every rank holds a slice of the class vectors, in rank order. The gradient of a slice is whole; that of the
input comes in parts, what flows back through the rank's own classes.

    log Z = log sum_r Z_r          score of the target: from the one rank that holds it          rank = sum_r rank_r
    predicted class: that of the first rank whose largest score is the largest
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partita import _checks
from partita.collective import ALONE, Collective
from partita.engine import State
from partita.rows import reduce_rows

__all__ = ["Options", "Terms", "likeliest"]


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a cross entropy, named as in torch, checked once."""

    n_class: int
    weight: Tensor | None = None  # (n_class,)
    reduction: _checks.Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        _checks.check_reduction(self.reduction)
        if type(self.label_smoothing) is not float or self.label_smoothing != 0.0:
            _checks.check_number("label_smoothing", self.label_smoothing, 0, 1)
        _checks.check_whole("ignore_index", self.ignore_index)
        if type(self.z_loss) is not float or self.z_loss != 0.0:
            _checks.check_positive("z_loss", self.z_loss, zero=True)
        if type(self.entropy_weight) is not float or self.entropy_weight != 0.0:
            _checks.check_number("entropy_weight", self.entropy_weight)
        if self.weight is not None:
            _checks.check_classwise("weight", self.weight, self.n_class)

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

    options: Options
    on_target: Tensor
    share: Tensor  # what a row counts in a mean
    sample: Tensor | None
    kept: Tensor | None  # False where a row is ignored and yet went through the pass
    on_partition: Tensor | None = None
    linear: Tensor | None = None

    @staticmethod
    def of_probabilities(options: Options, soft: Tensor, linear: Tensor, sample: Tensor | None) -> Terms:
        """Class probabilities, already weighted and smoothed; a mean counts every row once, as torch's does."""
        mass = soft.sum(-1)
        return Terms(options, torch.zeros_like(mass), torch.ones_like(mass), sample, None, mass, linear)

    @staticmethod
    def of_classes(
        options: Options,
        index: Tensor,
        linear: Tensor | None,
        sample: Tensor | None,
        kept: Tensor | None,
        dtype: torch.dtype,
        processes: Collective = ALONE,
        here: Tensor | None = None,
    ) -> Terms:
        """Class indices; over a group, class weights and smoothing are sums over the slices.

        index, here: the class of a row in this rank's slice, 0 where it is elsewhere; which are here, None for all.
        linear: sum_c weight_c s_c over the classes of this slice, where there is smoothing.
        """
        weight = options.class_weight(dtype)
        own = like = torch.ones(index.shape, dtype=dtype, device=index.device)
        if weight is not None:
            # of no classes 0, with a gradient
            own = weight[_checks.within(index, len(weight))[0]] if len(weight) else like * weight.sum()
            own = own if here is None else processes.total(torch.where(here, own, torch.zeros_like(like)))
        sample = None if sample is None else processes.share(sample)
        if linear is None:
            return Terms(options, own, own, sample, kept)
        whole = options.n_class if processes.alone else sum(processes.sizes[0])
        mass = float(whole) if weight is None else processes.total(weight.sum())
        smooth, each = options.label_smoothing, options.label_smoothing / whole
        return Terms(
            options, (1.0 - smooth) * own, own, sample, kept, like * (each * mass), each * processes.total(linear)
        )

    def weigh(self, rows: Tensor) -> Tensor:
        """Rows times their sample weight, 0 where ignored."""
        if self.sample is not None:
            rows = rows * self.sample
        return rows if self.kept is None else torch.where(self.kept, rows, torch.zeros_like(rows))

    def rows(self, nll: Tensor, state: State) -> Tensor:
        """The loss of every row."""
        out = self.on_target * nll
        if self.linear is not None and self.on_partition is not None:
            out = out + (self.on_partition * state.log_partition() - self.linear)
        if self.options.z_loss:
            out = out + self.options.z_loss * state.log_partition().square()
        if self.options.entropy_weight:
            out = out - self.options.entropy_weight * state.entropy()
        return self.weigh(out)

    def reduce(self, rows: Tensor) -> Tensor:
        total = self.weigh(self.share).sum() if self.options.reduction == "mean" else None
        return reduce_rows(rows, self.options.reduction, total)
