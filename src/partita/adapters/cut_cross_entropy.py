"""`linear_cross_entropy` as cut-cross-entropy calls it; what only steers its kernels is accepted and does nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from partita._checks import Reduction
from partita.errors import ValueRangeError
from partita.losses import linear_cross_entropy as _linear_cross_entropy
from partita.losses import token_stats

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]

# This library's kernels never leave gradients out, and accumulate in float32 at least.
_KERNEL_OPTIONS = {"filter_eps", "accum_e_fp32", "accum_c_fp32", "filter_e_grad", "filter_c_grad", "impl", "use_kahan"}


def linear_cross_entropy(
    e: Tensor,  # (..., dim)
    c: Tensor,  # (vocabulary, dim)
    targets: Tensor,  # (...)
    bias: Tensor | None = None,  # (vocabulary,)
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Drop-in for ``cut_cross_entropy.linear_cross_entropy``: cross entropy of ``softcap(e @ c.T + bias)``.

    No logits are held, and no gradient is filtered out (`impl="cce_exact"` there). The loss has the dtype of `e`; with
    nothing to count `mean` is 0. The release 25.1 has no `bias`: pass what follows `targets` by name.

    >>> import torch
    >>> linear_cross_entropy(torch.zeros(1, 4), torch.zeros(10, 4), torch.tensor([3]), impl="cce")  # log 10
    tensor(2.3026)

    return_lse: (loss, log Z of every row), 0 where ignored; a second pass.
    """
    if options.pop("vocab_parallel_options", None) is not None:
        raise ValueRangeError(
            "vocab_parallel_options has no form here: pass group= to partita.linear_cross_entropy, with a slice of the "
            "vocabulary on every rank."
        )
    if unknown := options.keys() - _KERNEL_OPTIONS:
        raise TypeError(f"linear_cross_entropy has no argument {', '.join(sorted(unknown))}.")
    if bias is not None and not isinstance(bias, Tensor):
        raise ValueRangeError(
            f"bias must be a tensor (vocabulary,) or None; got {bias!r}. Pass ignore_index and what follows it by name."
        )
    given: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap, "shift": int(shift)}
    loss = _linear_cross_entropy(e, c, targets, linear_bias=bias, reduction=reduction, **given)
    return (loss, token_stats(e, c, targets, bias=bias, want="logsumexp", **given).logsumexp) if return_lse else loss


class LinearCrossEntropy(nn.Module):
    """Drop-in for ``cut_cross_entropy.LinearCrossEntropy``: keeps the options of `linear_cross_entropy`."""

    def __init__(
        self,
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        shift: bool | int = 0,
        **options: Any,
    ):
        super().__init__()
        self.options = {
            "ignore_index": ignore_index, "softcap": softcap, "reduction": reduction, "shift": shift, **options,
        }  # fmt: skip

    def forward(self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None) -> Any:
        return linear_cross_entropy(e, c, targets, bias, **self.options)
