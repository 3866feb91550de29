"""Log-probabilities and entropy as verl 0.9 calls for them: `linear_cross_entropy` and `FusedLinearForPPO`.

undo = partita.adapters.verl.install()       # verl's models with fused kernels take both from here
...
undo()                                       # or: with install(): ...
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from partita._checks import shape_text
from partita.adapters._installed import Installed, put
from partita.errors import ShapeError, ValueRangeError
from partita.losses import token_stats

__all__ = ["FusedLinearForPPO", "Installed", "install", "linear_cross_entropy"]

MADE_FOR = "0.9.1"


def install() -> Installed:
    """Let the fused forwards of verl's models take both functions from this library; the result undoes it.

    verl calls them with ``use_fused_kernels=True``, in the back ends "torch" and "triton" and in its modules for
    Megatron. A second call before the first is undone is refused, and so is a verl whose functions take other arguments
    than those of 0.9.1.
    """
    return put(
        "verl",
        MADE_FOR,
        {
            ("verl.utils.experimental.torch_functional", "FusedLinearForPPO"): FusedLinearForPPO,
            ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"): linear_cross_entropy,
        },
        also=[f"verl.models.mcore.model_forward_{name}" for name in ("fused", "1f1b_overlap")],
    )


def linear_cross_entropy(
    hidden: Tensor,  # (..., dim)
    weight: Tensor,  # (vocabulary, dim), or this rank's slice
    labels: Tensor,  # (...)
    temperature: float | Tensor = 1.0,  # a number, one per token, or one per sample
    reduction: str = "none",
    dist_process_group: object | None = None,
    *,
    sum_pi_squared: bool = False,
) -> tuple[Tensor, ...]:
    """Drop-in for ``verl.utils.kernel.linear_cross_entropy.linear_cross_entropy``: (log-probabilities, entropy).

        log_prob_i = log softmax(hidden_i @ weight.T / temperature_i)[labels_i]

    Both are flat, (tokens,) in float32 or better; `reduction` "sum" or "mean" is of the log-probabilities alone. Labels
    of -100 give 0. On every device, for every width of hidden.

    >>> import torch
    >>> linear_cross_entropy(torch.zeros(1, 4), torch.zeros(10, 4), torch.tensor([3]))[0]  # -log 10
    tensor([-2.3026])

    dist_process_group: the ranks that hold the vocabulary in slices, in order. The gradient of hidden is this rank's
        part, as there.
    sum_pi_squared: a third result, sum_v p_i(v)^2 as of ``calculate_sum_pi_squared_from_logits``, by a second pass.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueRangeError(f"reduction must be 'none', 'sum' or 'mean'; got {reduction!r}.")
    flat = [x.reshape(-1) for x in _stats(hidden, weight, labels, temperature, dist_process_group, sum_pi_squared)]
    if reduction != "none":
        flat[0] = flat[0].sum() if reduction == "sum" else flat[0].mean()
    return tuple(flat)


class FusedLinearForPPO(nn.Module):
    """Drop-in for ``verl.utils.experimental.torch_functional.FusedLinearForPPO``: (log-probabilities, entropy).

    Both have the shape of `input_ids`; log-probabilities are float32 or better, the entropy has the dtype of
    `hidden_states`. `chunk_size` and `impl_backend` are taken and have no effect: nothing of the size of a chunk of
    logits is made. `sum_pi_squared=True` in the call gives a third result.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch"):
        super().__init__()
        if impl_backend not in ("torch", "liger"):
            raise ValueRangeError(f"impl_backend must be 'torch' or 'liger', as verl's; got {impl_backend!r}.")
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self,
        hidden_states: Tensor,  # (..., dim)
        vocab_weights: Tensor,  # (vocabulary, dim)
        input_ids: Tensor,  # (...), already shifted
        temperature: float | Tensor = 1.0,
        *,
        sum_pi_squared: bool = False,
    ) -> tuple[Tensor, ...]:
        log_probs, entropy, *more = _stats(hidden_states, vocab_weights, input_ids, temperature, None, sum_pi_squared)
        return log_probs, entropy.to(hidden_states.dtype), *more


def _stats(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float | Tensor, group: Any, squared: bool
) -> list[Tensor]:
    if labels.shape != hidden.shape[:-1]:
        if labels.numel() != hidden.shape[:-1].numel():
            raise ShapeError(
                f"labels must be one per row of hidden, {tuple(hidden.shape[:-1])}; got {shape_text(labels)}."
            )
        labels = labels.reshape(hidden.shape[:-1])
    if isinstance(temperature, Tensor):
        if temperature.dim() == 1 and labels.dim() == 2 and len(temperature) == len(labels):
            temperature = temperature[:, None]  # one per sample
        elif temperature.numel() == labels.numel():
            temperature = temperature.reshape(labels.shape)
    want = ["log_prob", "entropy"] + ["log_sum_sq"] * squared
    found = list(token_stats(hidden, weight, labels, temperature=temperature, want=want, group=group))
    return [*found[:2], *(x.exp() for x in found[2:])]
