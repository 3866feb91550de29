"""Modules of the classification losses: they hold settings and parameters, and call `partita.losses`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from partita import losses
from partita.engine import Stats
from partita.errors import ShapeError

__all__ = [
    "BrierLoss",
    "CrossEntropyLoss",
    "DistillationLoss",
    "FocalLoss",
    "LinearCrossEntropyLoss",
    "MAELoss",
    "MSELoss",
    "NCELoss",
]


class LinearCrossEntropyLoss(nn.Module):
    """A linear classifier and its cross entropy in one, without logits; torch's constructor and state-dict names.

    Equal to ``nn.LinearCrossEntropyLoss`` in its own arguments. `linear` holds the weight; tie it by assigning
    ``module.linear.weight = embedding.weight``.

    >>> loss = LinearCrossEntropyLoss(4, 10)
    >>> _ = nn.init.zeros_(loss.linear.weight)
    >>> round(loss(torch.ones(2, 4), torch.tensor([3, 7])).item(), 4)  # log 10
    2.3026
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        scale: float | Tensor = 1.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        entropy_weight: float = 0.0,
        shift: int = 0,
        return_stats: bool = False,
    ):
        super().__init__()
        if weight is not None and tuple(weight.shape) != (num_classes,):
            raise ShapeError(f"weight must hold one number per class, ({num_classes},); got {tuple(weight.shape)}.")
        self.num_classes, self.out_features = num_classes, tuple(out_features)
        outputs = math.prod(self.out_features, start=num_classes)
        self.linear = nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.scale, self.softcap, self.z_loss, self.entropy_weight = scale, softcap, z_loss, entropy_weight
        self.shift, self.return_stats = shift, return_stats

    def forward(
        self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Stats]:
        shape = (self.num_classes, *self.out_features)
        return losses.linear_cross_entropy(
            input,
            self.linear.weight.reshape(*shape, self.linear.in_features),
            target,
            linear_bias=None if self.linear.bias is None else self.linear.bias.reshape(shape),
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            scale=self.scale,
            softcap=self.softcap,
            z_loss=self.z_loss,
            entropy_weight=self.entropy_weight,
            sample_weight=sample_weight,
            shift=self.shift,
            return_stats=self.return_stats,
        )

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, reduction={self.reduction}, label_smoothing={self.label_smoothing}"


class CrossEntropyLoss(nn.Module):
    """`cross_entropy` of logits; equal to ``nn.CrossEntropyLoss``, with 0 where nothing is left to average.

    >>> round(CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([0, 3])).item(), 4)  # log 4
    1.3863
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        entropy_weight: float = 0.0,
        return_stats: bool = False,
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.entropy_weight, self.return_stats = z_loss, entropy_weight, return_stats

    def forward(
        self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Stats]:
        return losses.cross_entropy(
            input,
            target,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            entropy_weight=self.entropy_weight,
            sample_weight=sample_weight,
            return_stats=self.return_stats,
        )


class FocalLoss(nn.Module):
    """`focal_loss` of logits: (1 - p)^gamma weighs down what is already right."""

    alpha: float | Tensor | None

    def __init__(
        self,
        gamma: float = 2.0,
        alpha: float | Tensor | None = None,
        *,
        reduction: str = "mean",
        ignore_index: int = -100,
    ):
        super().__init__()
        self.gamma, self.reduction, self.ignore_index = gamma, reduction, ignore_index
        if isinstance(alpha, Tensor):
            self.register_buffer("alpha", alpha)
        else:
            self.alpha = alpha

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return losses.focal_loss(
            input,
            target,
            gamma=self.gamma,
            alpha=self.alpha,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
        )

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, reduction={self.reduction}"


class _Error(nn.Module):
    def __init__(self, *, on: str = "probabilities", reduction: str = "mean", ignore_index: int = -100):
        super().__init__()
        self.on, self.reduction, self.ignore_index = on, reduction, ignore_index

    def extra_repr(self) -> str:
        return f"on={self.on}, reduction={self.reduction}"


class BrierLoss(_Error):
    """`brier_loss` of a classifier: |softmax(z) - y|^2, summed over classes; on="logits" leaves the softmax out.

    >>> BrierLoss()(torch.zeros(1, 2), torch.tensor([0]))  # (1/2)^2 + (1/2)^2
    tensor(0.5000)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return losses.brier_loss(input, target, on=self.on, reduction=self.reduction, ignore_index=self.ignore_index)


class MSELoss(BrierLoss):
    """The old name of `BrierLoss`."""


class MAELoss(_Error):
    """`mae_loss` of a classifier: |softmax(z) - y|_1, bounded by 2."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return losses.mae_loss(input, target, on=self.on, reduction=self.reduction, ignore_index=self.ignore_index)


class NCELoss(nn.Module):
    """`nce_loss`: data against k noise samples each."""

    def __init__(self, *, reduction: str = "mean"):
        super().__init__()
        self.reduction = reduction

    def forward(
        self, data_score: Tensor, noise_score: Tensor, data_log_noise: Tensor, noise_log_noise: Tensor
    ) -> Tensor:
        return losses.nce_loss(data_score, noise_score, data_log_noise, noise_log_noise, reduction=self.reduction)


class DistillationLoss(nn.Module):
    """`distillation_loss`: T^2 KL(teacher || student), both at temperature T."""

    def __init__(self, temperature: float = 1.0, *, reduction: str = "mean"):
        super().__init__()
        self.temperature, self.reduction = temperature, reduction

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        return losses.distillation_loss(student, teacher, temperature=self.temperature, reduction=self.reduction)
