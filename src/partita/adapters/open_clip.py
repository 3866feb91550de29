"""Losses as open_clip calls them: features, `logit_scale`, `logit_bias` and `output_dict` in its forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch import distributed as dist

from partita.contrastive import clip_loss, siglip_loss
from partita.distributed import for_ddp
from partita.errors import ValueRangeError

__all__ = ["ClipLoss", "SigLipLoss"]

_TRAVELS = ("bidir", "shift", "reduce", "gather")


class ClipLoss(nn.Module):
    """Drop-in for ``open_clip.loss.ClipLoss``: same value, same gradient, O(n) memory.

        loss = ( CE(rows) + CE(columns) ) / 2        of logit_scale <image_i, text_j> + logit_bias

    Over several ranks it is the global loss, with gradients for DDP's average, as with `gather_with_grad=True` there.
    Without that, gradients through other ranks' rows are left out there, and here it is refused. `local_loss` would
    give each rank the loss of its own rows, whose mean is the same; `cache_labels` has nothing to cache.

    >>> import torch
    >>> loss = ClipLoss()
    >>> loss(torch.eye(2), torch.eye(2), 1.0, output_dict=True)  # -log( e / (e + 1) )
    {'contrastive_loss': tensor(0.3133)}
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ):
        super().__init__()
        if world_size > 1 and not gather_with_grad:
            raise ValueRangeError(
                "over several ranks this loss has gradients through the rows of all: pass gather_with_grad=True."
            )
        if use_horovod:
            raise ValueRangeError("this loss runs over torch.distributed; there is no form of it for horovod.")
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self.rank, self.world_size, self.use_horovod = rank, world_size, use_horovod

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
    ) -> Any:
        group = dist.group.WORLD if self.world_size > 1 else None
        loss = clip_loss(image_features, text_features, logit_scale, logit_bias, group=group)
        assert isinstance(loss, Tensor)
        loss = loss if group is None else for_ddp(loss, group)
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(nn.Module):
    """Drop-in for ``open_clip.loss.SigLipLoss``: same value, same gradient, a few rows of the matrix at a time.

    Over several ranks each gives the loss of its own images among the texts of all, as there; how the texts travel
    (`dist_impl`) is this library's own: in blocks, round a ring, whatever was requested.
    """

    def __init__(
        self, cache_labels: bool = False, rank: int = 0, world_size: int = 1, dist_impl: str | None = None
    ) -> None:
        super().__init__()
        if dist_impl not in (None, *_TRAVELS):
            raise ValueRangeError(f"dist_impl must be None or one of {', '.join(_TRAVELS)}; got {dist_impl!r}.")
        self.cache_labels, self.rank, self.world_size, self.dist_impl = cache_labels, rank, world_size, dist_impl

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
        output_dict: bool = False,
    ) -> Any:
        group = dist.group.WORLD if self.world_size > 1 else None
        rows = siglip_loss(image_features, text_features, logit_scale, logit_bias, reduction="none", group=group)
        loss = rows.sum() / max(len(image_features), 1)
        return {"contrastive_loss": loss} if output_dict else loss
