"""Entropy in the loss: the mean over rows, and the penalty of a layer (M-INF-5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita._checks import finite
from partita.engine import Stats
from partita.errors import ShapeError, ValueRangeError

__all__ = ["check_entropy_weight", "entropy_penalty", "mean_entropy", "weighs"]


def entropy_penalty(stats: Stats, weight: float | Sequence[float] | Tensor) -> Tensor:
    """What an entropy-regularised loss adds for one layer, differentiable (M-INF-5).

        penalty = -mean_i weight_i H_i / log n_i          over the rows i that see two keys or more

    A positive weight keeps attention broad, a negative one sharpens it. The entropy is taken as a share of the largest
    it could be, so that short and long rows count alike; 0 if no row has a choice.

    >>> even = partita.Gibbs(torch.zeros(2, 1), torch.zeros(5, 1)).stats()
    >>> entropy_penalty(even, 0.01)  # as broad as can be
    tensor(-0.0100)

    weight: a number, or one per head: (heads,) for statistics (..., heads, n_query).
    """
    each = torch.as_tensor(weight, dtype=stats.entropy.dtype, device=stats.entropy.device)
    if each.dim():
        heads = stats.entropy.shape[-2] if stats.entropy.dim() > 1 else 1
        # two comparisons: whether a tuple holds a size that is a symbol cannot be asked while tracing
        if each.dim() != 1 or (each.shape[0] != 1 and each.shape[0] != heads):
            raise ShapeError(f"weight must be one number, or one per head ({heads}); got {tuple(each.shape)}.")
        each = each[:, None]
    chosen = stats.visible >= 2
    n = torch.where(chosen, stats.visible, torch.full_like(stats.visible, 2.0))
    share = torch.where(chosen, stats.entropy / n.log(), torch.zeros_like(stats.entropy))
    return -(each * share).sum() / chosen.sum().clamp(min=1)


def weighs(weight: float | Sequence[float] | Tensor) -> bool:
    """Whether a penalty is wanted at all; what several numbers are is not asked."""
    return not isinstance(weight, (int, float)) or weight != 0.0


def check_entropy_weight(weight: float | Sequence[float] | Tensor, heads: int | None = None) -> None:
    """A finite number, or one for each head."""
    weight = weight.reshape(-1).tolist() if isinstance(weight, Tensor) else weight
    each = list(weight) if isinstance(weight, Sequence) else [weight]
    if not all(isinstance(x, (int, float)) and finite(x) for x in each):
        raise ValueRangeError(f"attention_entropy_weight must be a finite number, or one per head; got {weight!r}.")
    if heads is not None and len(each) not in (1, heads):
        raise ShapeError(f"attention_entropy_weight must be one number or one per head ({heads}); got {len(each)}.")


def mean_entropy(stats: Stats) -> Tensor:
    """Mean entropy of the rows that see a key, differentiable: what an entropy-regularised loss adds.

        loss - beta * mean_entropy(stats)        beta > 0 keeps attention broad, beta < 0 sharpens it   (M-INF-5)

    >>> mean_entropy(partita.Gibbs(torch.zeros(2, 1), torch.zeros(5, 1)).stats())  # log 5
    tensor(1.6094)
    """
    seen = stats.visible > 0
    return torch.where(seen, stats.entropy, 0.0).sum() / seen.sum().clamp(min=1)
