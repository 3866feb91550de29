"""Modules of the contrastive losses; a learned temperature is kept as its logarithm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from partita import contrastive
from partita._checks import check_positive
from partita.engine import Stats

__all__ = ["ClipLoss", "InfoNCELoss", "NTXentLoss", "SigLipLoss", "SupConLoss"]


class InfoNCELoss(nn.Module):
    """`info_nce_loss` with its settings; `learnable` makes the temperature a parameter, by its logarithm.

    >>> loss = InfoNCELoss(temperature=1.0, learnable=True)
    >>> x = torch.eye(3)
    >>> round(loss(x, x).item(), 4)  # -log( e / (e + 2) )
    0.5514
    >>> [name for name, _ in loss.named_parameters()]
    ['log_temperature']
    """

    log_temperature: Tensor | None

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        learnable: bool = False,
        reduction: str = "mean",
        negative_mode: str = "unpaired",
        normalize: bool = True,
        symmetric: bool = False,
        hardness: float = 0.0,
        decoupled: bool = False,
        queue: contrastive.Queue | None = None,
        return_stats: bool = False,
    ):
        super().__init__()
        check_positive("temperature", temperature)
        self.temperature = temperature
        logarithm = nn.Parameter(torch.tensor(math.log(temperature))) if learnable else None
        self.register_parameter("log_temperature", logarithm)
        self.reduction, self.negative_mode, self.normalize = reduction, negative_mode, normalize
        self.symmetric, self.hardness, self.decoupled = symmetric, hardness, decoupled
        self.queue, self.return_stats = queue, return_stats

    def forward(
        self,
        query: Tensor,
        positive_key: Tensor,
        negative_keys: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        exclude: contrastive.Exclusion | None = None,
    ) -> Tensor | tuple[Tensor, Stats]:
        out = contrastive.info_nce_loss(
            query,
            positive_key,
            negative_keys,
            temperature=self.temperature,
            log_temperature=self.log_temperature,
            reduction=self.reduction,
            negative_mode=self.negative_mode,
            normalize=self.normalize,
            symmetric=self.symmetric,
            hardness=self.hardness,
            decoupled=self.decoupled,
            labels=labels,
            exclude=exclude,
            queue=self.queue,
            return_stats=self.return_stats,
        )
        if self.queue is not None and self.training:
            self.queue.push(positive_key.detach(), labels if self.queue.labelled else None)
        return out

    def extra_repr(self) -> str:
        learned = self.log_temperature is not None
        return f"temperature={self.temperature}, learnable={learned}, symmetric={self.symmetric}"


class _Tower(nn.Module):
    """A logit scale, learned by its logarithm and held below a cap, and a bias."""

    logit_bias: Tensor | None

    def __init__(self, logit_scale: float, logit_bias: float | None, learnable: bool, max_scale: float):
        super().__init__()
        check_positive("logit_scale", logit_scale)
        check_positive("max_scale", max_scale)
        self.max_scale = max_scale
        self.log_scale = nn.Parameter(torch.tensor(math.log(logit_scale)), requires_grad=learnable)
        bias = None if logit_bias is None else nn.Parameter(torch.tensor(float(logit_bias)), requires_grad=learnable)
        self.register_parameter("logit_bias", bias)

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
        super().__init__(logit_scale, logit_bias, learnable, max_scale)
        self.return_stats = return_stats

    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor | tuple[Tensor, Stats]:
        return contrastive.clip_loss(
            image_features, text_features, self.scale(), self.logit_bias, return_stats=self.return_stats
        )


class SigLipLoss(_Tower):
    """`siglip_loss` with its own logit scale and bias, started at 10 and -10, as SigLIP has them."""

    def __init__(
        self, logit_scale: float = 10.0, logit_bias: float = -10.0, *, learnable: bool = True, max_scale: float = 1e3
    ):
        super().__init__(logit_scale, logit_bias, learnable, max_scale)

    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        return contrastive.siglip_loss(image_features, text_features, self.scale(), self.logit_bias)


class NTXentLoss(nn.Module):
    """`nt_xent_loss` of two views."""

    def __init__(self, temperature: float = 0.5, *, reduction: str = "mean", return_stats: bool = False):
        super().__init__()
        self.temperature, self.reduction, self.return_stats = temperature, reduction, return_stats

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor | tuple[Tensor, Stats]:
        return contrastive.nt_xent_loss(
            out0, out1, temperature=self.temperature, reduction=self.reduction, return_stats=self.return_stats
        )


class SupConLoss(nn.Module):
    """`supcon_loss` of labelled embeddings."""

    def __init__(self, temperature: float = 0.1, *, reduction: str = "mean", return_stats: bool = False):
        super().__init__()
        self.temperature, self.reduction, self.return_stats = temperature, reduction, return_stats

    def forward(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Stats]:
        return contrastive.supcon_loss(
            embeddings,
            labels,
            temperature=self.temperature,
            ref_emb=ref_emb,
            ref_labels=ref_labels,
            reduction=self.reduction,
            return_stats=self.return_stats,
        )
