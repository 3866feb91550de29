"""`LigerFusedLinearCrossEntropyLoss` and its function as Liger-Kernel calls them, on any device."""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita._checks import Reduction
from partita.losses import linear_cross_entropy, token_stats
from partita.rows import reduce_rows

__all__ = ["CrossEntropyOutput", "LigerFusedLinearCrossEntropyLoss", "liger_fused_linear_cross_entropy"]


class CrossEntropyOutput(NamedTuple):
    """What is returned where more than the loss was wanted; None where it was not."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def liger_fused_linear_cross_entropy(
    input: Tensor,  # (rows, dim)
    weight: Tensor,  # (vocabulary, dim)
    target: Tensor,  # (rows,)
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Any:
    """Drop-in for Liger's function of this name: cross entropy, and ``lse_square_scale * (log Z)^2``, without logits.

    `accum_dtype` and `chunk_mem_const` steer its kernels and do nothing: sums are in float32 at least. As there, class
    weights do not weigh the z-loss, `use_token_scaling` multiplies a row by the probability of its target, and only the
    loss has a gradient. Token scaling, and a z-loss that is returned or next to class weights, take a second pass.

    >>> liger_fused_linear_cross_entropy(torch.zeros(1, 4), torch.zeros(10, 4), torch.tensor([3]))  # log 10
    tensor(2.3026)
    """
    more = return_token_accuracy or return_predicted_tokens
    second = use_token_scaling or return_z_loss or (lse_square_scale and ce_weight is not None)
    known: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap}
    found: Any = linear_cross_entropy(
        input, weight, target, linear_bias=bias, weight=ce_weight, label_smoothing=label_smoothing, return_stats=more,
        reduction="none" if second else reduction, z_loss=0.0 if second else lse_square_scale, **known,
    )  # fmt: skip
    stats: Any
    loss, stats = found if more else (found, None)
    counts, z_loss = target != ignore_index, None
    if second:
        read = token_stats(input, weight, target, bias=bias, want=("log_prob", "logsumexp"), **known)
        z = lse_square_scale * read.logsumexp.square()
        if use_token_scaling:
            p = read.log_prob.detach().exp()
            loss, z = loss * p, z * p
        number = counts.sum()
        share = number if ce_weight is None else ce_weight[target[counts]].sum()
        loss = reduce_rows(loss, reduction, share) + reduce_rows(z, reduction, number)
        z_loss = reduce_rows(z, reduction, number).detach() if return_z_loss else None
    if not (more or return_z_loss):
        return loss
    accuracy = stats.correct.float() if return_token_accuracy else None
    if accuracy is not None and reduction != "none":
        accuracy = accuracy.sum() / counts.sum()
    return CrossEntropyOutput(loss, z_loss, accuracy, stats.predicted if return_predicted_tokens else None)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Drop-in for Liger's module of this name: the options of the function from `ce_weight` on, in its order."""

    def __init__(self, *options: Any, **named: Any):
        super().__init__()
        signature(liger_fused_linear_cross_entropy).bind(*[None] * 4, *options, **named)  # raises on unknown names
        self.options, self.named = options, named

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, *self.options, **self.named)
