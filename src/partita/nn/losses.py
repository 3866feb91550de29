"""Modules of the losses: they hold settings and parameters, and call `partita.losses` and `partita.contrastive`.

A learned temperature is kept as its logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partita import contrastive, losses
from partita._checks import Reduction, check_classwise, check_float, check_number, check_positive, check_whole
from partita.engine import Stats
from partita.errors import ShapeError
from partita.score import Score

__all__ = [
    "BrierLoss", "ClipLoss", "CrossEntropyLoss", "DistillationLoss", "FocalLoss", "InfoNCELoss",
    "LinearCrossEntropyLoss", "MAELoss", "MSELoss", "NCELoss", "NTXentLoss", "SigLipLoss", "SupConLoss",
]  # fmt: skip


class _Loss(nn.Module):
    """A loss with its settings: attributes of the module, and arguments of its function by the same names."""

    function: Callable[..., Any]
    shown: tuple[str, ...] = ()  # settings in the repr

    def __init__(self, **settings: Any):
        super().__init__()
        self._held = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._held}

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named, **self.settings())

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.shown)


class LinearCrossEntropyLoss(_Loss):
    """A linear classifier and its cross entropy in one, without logits; torch's constructor and state-dict names.

    Equal to ``nn.LinearCrossEntropyLoss`` in its own arguments. `linear` holds the weight; tie it by assigning
    ``module.linear.weight = embedding.weight``.

    >>> loss = LinearCrossEntropyLoss(4, 10)
    >>> _ = nn.init.zeros_(loss.linear.weight)
    >>> round(loss(torch.ones(2, 4), torch.tensor([3, 7])).item(), 4)  # log 10
    2.3026
    """

    weight: Tensor | None
    shown = ("num_classes", "reduction", "label_smoothing")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
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
        super().__init__(
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, scale=scale,
            softcap=softcap, z_loss=z_loss, entropy_weight=entropy_weight, shift=shift, return_stats=return_stats,
        )  # fmt: skip
        if not isinstance(out_features, (tuple, list)):
            raise ShapeError(f"out_features must be a tuple of sizes; got {out_features!r}.")
        sizes = (("in_features", in_features), ("num_classes", num_classes), *(("a size", n) for n in out_features))
        for name, size in sizes:
            check_whole(name, size, least=0)
        if weight is not None:
            check_classwise("weight", weight, num_classes)
        self.num_classes, self.out_features = num_classes, tuple(out_features)
        outputs = math.prod(self.out_features, start=num_classes)
        self.linear = nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)

    def forward(
        self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Stats]:
        shape = (self.num_classes, *self.out_features)
        weight = self.linear.weight.reshape(*shape, self.linear.in_features)
        bias = None if self.linear.bias is None else self.linear.bias.reshape(shape)
        given: Any = {"linear_bias": bias, "weight": self.weight, "sample_weight": sample_weight, **self.settings()}
        return losses.linear_cross_entropy(input, weight, target, **given)


class CrossEntropyLoss(_Loss):
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
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        entropy_weight: float = 0.0,
        return_stats: bool = False,
    ):
        super().__init__(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss,
            entropy_weight=entropy_weight, return_stats=return_stats,
        )  # fmt: skip
        if weight is not None:
            check_float("weight", weight)
        self.register_buffer("weight", weight)

    def forward(
        self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Stats]:
        given: Any = {"weight": self.weight, "sample_weight": sample_weight, **self.settings()}
        return losses.cross_entropy(input, target, **given)


class FocalLoss(_Loss):
    """`focal_loss` of logits: (1 - p)^gamma weighs down targets that are already likely."""

    alpha: float | Tensor | None
    shown = ("gamma", "reduction")

    def __init__(
        self,
        gamma: float = 2.0,
        alpha: float | Tensor | None = None,
        *,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
    ):
        super().__init__(gamma=gamma, reduction=reduction, ignore_index=ignore_index)
        if isinstance(alpha, Tensor):
            self.register_buffer("alpha", alpha)
        else:
            self.alpha = alpha

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return losses.focal_loss(input, target, alpha=self.alpha, **self.settings())


class _Error(_Loss):
    shown = ("on", "reduction")

    def __init__(self, *, on: str = "probabilities", reduction: Reduction = "mean", ignore_index: int = -100):
        super().__init__(on=on, reduction=reduction, ignore_index=ignore_index)


class BrierLoss(_Error):
    """`brier_loss` of a classifier: |softmax(z) - y|^2, summed over classes; on="logits" leaves the softmax out.

    >>> BrierLoss()(torch.zeros(1, 2), torch.tensor([0]))  # (1/2)^2 + (1/2)^2
    tensor(0.5000)
    """

    function = staticmethod(losses.brier_loss)


class MSELoss(BrierLoss):
    """The old name of `BrierLoss`."""


class MAELoss(_Error):
    """`mae_loss` of a classifier: |softmax(z) - y|_1, bounded by 2."""

    function = staticmethod(losses.mae_loss)


class NCELoss(_Loss):
    """`nce_loss(data_score, noise_score, data_log_noise, noise_log_noise)`: data against k noise samples each."""

    function = staticmethod(losses.nce_loss)

    def __init__(self, *, reduction: Reduction = "mean"):
        super().__init__(reduction=reduction)


class DistillationLoss(_Loss):
    """`distillation_loss(student, teacher)`: T^2 KL(teacher || student), both at temperature T."""

    function = staticmethod(losses.distillation_loss)

    def __init__(self, temperature: float = 1.0, *, reduction: Reduction = "mean"):
        super().__init__(temperature=temperature, reduction=reduction)


# ---- contrast -------------------------------------------------------------------------------------------------------


class InfoNCELoss(_Loss):
    """`info_nce_loss` with its settings; `learnable` makes the temperature a parameter, by its logarithm.

    >>> loss = InfoNCELoss(temperature=1.0, learnable=True)
    >>> x = torch.eye(3)
    >>> round(loss(x, x).item(), 4)  # -log( e / (e + 2) )
    0.5514
    >>> [name for name, _ in loss.named_parameters()]
    ['log_temperature']
    """

    log_temperature: Tensor | None
    queue: contrastive.Queue | None

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        learnable: bool = False,
        reduction: Reduction = "mean",
        negative_mode: str = "unpaired",
        normalize: bool = True,
        symmetric: bool = False,
        hardness: float = 0.0,
        decoupled: bool = False,
        queue: contrastive.Queue | None = None,
        score: Score | None = None,
        return_stats: bool = False,
    ):
        super().__init__(
            temperature=temperature, reduction=reduction, negative_mode=negative_mode, normalize=normalize,
            symmetric=symmetric, hardness=hardness, decoupled=decoupled, queue=queue, score=score,
            return_stats=return_stats,
        )  # fmt: skip
        check_positive("temperature", temperature)
        logarithm = nn.Parameter(torch.tensor(math.log(temperature))) if learnable else None
        self.register_parameter("log_temperature", logarithm)

    def forward(
        self,
        query: Tensor,
        positive_key: Tensor,
        negative_keys: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        exclude: contrastive.Exclusion | None = None,
    ) -> Tensor | tuple[Tensor, Stats]:
        given: Any = {"log_temperature": self.log_temperature, "labels": labels, "exclude": exclude, **self.settings()}
        out = contrastive.info_nce_loss(query, positive_key, negative_keys, **given)
        if self.queue is not None and self.training:
            self.queue.push(positive_key.detach(), labels if self.queue.labelled else None)
        return out

    def extra_repr(self) -> str:
        learned = self.log_temperature is not None
        return f"temperature={self.temperature}, learnable={learned}, symmetric={self.symmetric}"


class _Tower(_Loss):
    """A logit scale, learned by its logarithm and clamped to a maximum, and a bias."""

    log_scale: Tensor
    logit_bias: Tensor | None

    def __init__(
        self, logit_scale: float, logit_bias: float | None, learnable: bool, max_scale: float, **settings: Any
    ):
        super().__init__(**settings)
        check_positive("logit_scale", logit_scale)
        check_positive("max_scale", max_scale)
        if logit_bias is not None:
            check_number("logit_bias", logit_bias)
        self.max_scale = max_scale
        for name, given in (("log_scale", math.log(logit_scale)), ("logit_bias", logit_bias)):
            learned = None if given is None else nn.Parameter(torch.tensor(float(given)), bool(learnable))
            self.register_parameter(name, learned)

    def scale(self) -> Tensor:
        """exp(log_scale), at most max_scale."""
        return self.log_scale.clamp(max=math.log(self.max_scale)).exp()


class ClipLoss(_Tower):
    """`clip_loss` with its own logit scale, started at 1/0.07 and held at most 100, as CLIP has it.

    >>> round(ClipLoss(1.0)(torch.eye(2), torch.eye(2)).item(), 4)  # -log( e / (e + 1) )
    0.3133
    """

    def __init__(
        self,
        logit_scale: float = 1 / 0.07,
        logit_bias: float | None = None,
        *,
        learnable: bool = True,
        max_scale: float = 100.0,
        return_stats: bool = False,
    ):
        super().__init__(logit_scale, logit_bias, learnable, max_scale, return_stats=return_stats)

    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor | tuple[Tensor, Stats]:
        return contrastive.clip_loss(image_features, text_features, self.scale(), self.logit_bias, **self.settings())


class SigLipLoss(_Tower):
    """`siglip_loss` with its own logit scale and bias, started at 10 and -10, as SigLIP has them."""

    def __init__(
        self, logit_scale: float = 10.0, logit_bias: float = -10.0, *, learnable: bool = True, max_scale: float = 1e3
    ):
        super().__init__(logit_scale, logit_bias, learnable, max_scale)

    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        return contrastive.siglip_loss(image_features, text_features, self.scale(), self.logit_bias)


class NTXentLoss(_Loss):
    """`nt_xent_loss(out0, out1)` of two views."""

    function = staticmethod(contrastive.nt_xent_loss)

    def __init__(self, temperature: float = 0.5, *, reduction: Reduction = "mean", return_stats: bool = False):
        super().__init__(temperature=temperature, reduction=reduction, return_stats=return_stats)


class SupConLoss(_Loss):
    """`supcon_loss(embeddings, labels, ref_emb=None, ref_labels=None)` of labelled embeddings."""

    function = staticmethod(contrastive.supcon_loss)

    def __init__(self, temperature: float = 0.1, *, reduction: Reduction = "mean", return_stats: bool = False):
        super().__init__(temperature=temperature, reduction=reduction, return_stats=return_stats)
