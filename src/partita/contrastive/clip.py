"""Two towers with a learned logit scale: CLIP's softmax over rows and columns, SigLIP's sigmoid of every pair."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from partita import _checks
from partita._torch_function import overridable
from partita.collective import collective_of
from partita.contrastive.candidates import agree, check_pairs
from partita.contrastive.infonce import diagonal_loss
from partita.engine import Stats
from partita.errors import ShapeError
from partita.precision import loss_dtype, product

__all__ = ["clip_loss", "siglip_loss"]

_NAMES = ("image_features", "text_features")


@overridable
def clip_loss(
    image_features: Tensor,  # (n, dim), as they come: CLIP normalises in its towers
    text_features: Tensor,  # (n, dim)
    logit_scale: float | Tensor,
    logit_bias: float | Tensor | None = None,
    *,
    return_stats: bool = False,
    group: object | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """The symmetric loss of CLIP, without its logits; equal to open_clip's ClipLoss.

        s_ij = logit_scale <image_i, text_j> + logit_bias        loss = ( CE(rows) + CE(columns) ) / 2, diagonal targets

    The bias cancels in the loss and shows in the statistics, which are of the images' rows. Spec: M-INC-4.
    Over a `group` as `info_nce_loss`; under DDP call `partita.distributed.for_ddp(loss, group).backward()`.

    >>> x = torch.eye(2)
    >>> clip_loss(x, x, 1.0)  # -log( e / (e + 1) )
    tensor(0.3133)
    """
    processes = collective_of(group)
    with processes.validate():
        check_pairs(image_features, text_features, _NAMES)
        _scalar("logit_scale", logit_scale, image_features)
        scale = logit_scale.reshape(()) if isinstance(logit_scale, Tensor) else logit_scale
        bias = None if logit_bias is None else _scalar("logit_bias", logit_bias, image_features).reshape(1, 1)
        processes.check_pass(image_features, text_features, scale)
    features = dict(zip(_NAMES, (image_features, text_features), strict=True))
    processes = agree(processes, "clip_loss", features, scale, (return_stats, bias is None))
    return diagonal_loss(
        image_features, text_features, scale, return_stats=return_stats, bias=bias, processes=processes
    )


@overridable
def siglip_loss(
    image_features: Tensor,  # (n, dim)
    text_features: Tensor,  # (n, dim)
    logit_scale: float | Tensor,
    logit_bias: float | Tensor | None = None,
    *,
    reduction: _checks.Reduction = "mean",
    group: object | None = None,
) -> Tensor:
    """Every pair its own yes-or-no question: SigLIP, a few rows of the matrix at a time.

        loss_i = sum_j -log sigmoid( z_ij s_ij ),      z = 1 on the diagonal, -1 elsewhere

    `mean` divides by the number of rows, as open_clip's SigLipLoss does. There is no partition function here, hence no
    statistics of one. Over a `group` the texts of all ranks take part, passed round in blocks; under DDP call
    `partita.distributed.for_ddp(loss, group).backward()`.

    >>> siglip_loss(torch.zeros(4, 2), torch.zeros(4, 2), 1.0)  # 4 log 2
    tensor(2.7726)
    """
    processes = collective_of(group)
    with processes.validate():
        _checks.check_reduction(reduction)
        check_pairs(image_features, text_features, _NAMES)
        scale = _scalar("logit_scale", logit_scale, image_features)
        bias = _scalar("logit_bias", 0.0 if logit_bias is None else logit_bias, image_features)
    features = dict(zip(_NAMES, (image_features, text_features), strict=True))
    learned = torch.is_grad_enabled() and (scale.requires_grad, bias.requires_grad)
    processes = agree(processes, "siglip_loss", features, scale, (reduction, learned), others={"logit_bias": bias})
    rows = processes.sum_over_keys(_questions, image_features, text_features, [scale, bias])
    return processes.reduce(rows, reduction).to(loss_dtype(image_features))


def _questions(image: Tensor, number: Tensor, text: Tensor, numbers: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    """Of each image to all these texts; the one with its number is its own."""
    s = factor * product(image, text.mT) + shift
    # the sign comes first: softplus(s) - s in place of softplus(-s) would lose a "yes" that is nearly certain
    return -logsigmoid(torch.where(numbers == number[:, None], s, -s)).sum(-1)


def _scalar(name: str, given: float | Tensor, like: Tensor) -> Tensor:
    """One number as a tensor of the precision of the sums."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if not isinstance(given, Tensor):
        _checks.check_number(name, given)
    elif given.is_meta:
        _checks.check_device(("image_features", name), (like, given))
    elif given.is_complex():
        _checks.check_float(name, given)
    tensor = torch.as_tensor(given, dtype=dtype, device=like.device)
    if tensor.numel() != 1:
        raise ShapeError(f"{name} must be one number; got {_checks.shape_text(tensor)}.")
    return tensor.reshape(())
