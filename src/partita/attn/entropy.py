"""Entropy in the loss, the penalty of a layer (M-INF-5), and the divergence of one attention from another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita._checks import Reduction, check_float, check_kind, check_number, check_reduction, check_rows, finite
from partita._torch_function import overridable
from partita.attn.problem import Problem
from partita.comparison import check_kind as check_divergence
from partita.comparison import divergence, weighted_divergence
from partita.engine import Stats
from partita.engine.divergences import Kind
from partita.errors import ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.precision import loss_dtype
from partita.rows import reduce_rows
from partita.scale import Policy
from partita.support import Support

__all__ = ["attention_divergence", "check_entropy_weight", "entropy_penalty", "mean_entropy", "weighs"]

_STATS = "They come with return_stats=True, or from Gibbs(query, key).stats()."


def entropy_penalty(stats: Stats, weight: float | Sequence[float] | Tensor) -> Tensor:
    """What an entropy-regularised loss adds for one layer, differentiable (M-INF-5).

        penalty = -mean_i weight_i H_i / log n_i          over the rows i that see two keys or more

    A positive weight keeps attention broad, a negative one sharpens it. The entropy is divided by its largest value, so
    that short and long rows count alike; 0 if no row has a choice.

    >>> even = partita.Gibbs(torch.zeros(2, 1), torch.zeros(5, 1)).stats()
    >>> entropy_penalty(even, 0.01)  # as broad as can be
    tensor(-0.0100)

    weight: a number, or one per head: (heads,) for statistics (..., heads, n_query).
    """
    check_kind("stats", stats, Stats, _STATS)
    if not isinstance(weight, Tensor):
        for x in weight if isinstance(weight, Sequence) else (weight,):
            check_number("weight", x)
    each = torch.as_tensor(weight, dtype=stats.entropy.dtype, device=stats.entropy.device)
    if each.dim():
        heads = stats.entropy.shape[-2] if stats.entropy.dim() > 1 else 1
        # two comparisons: whether a tuple holds a size that is a symbol is not known while tracing
        if each.dim() != 1 or (each.shape[0] != 1 and each.shape[0] != heads):
            raise ShapeError(f"weight must be one number, or one per head ({heads}); got {tuple(each.shape)}.")
        each = each[:, None]
    chosen = stats.visible >= 2
    n = torch.where(chosen, stats.visible, torch.full_like(stats.visible, 2.0))
    share = torch.where(chosen, stats.entropy / n.log(), torch.zeros_like(stats.entropy))
    return -(each * share).sum() / chosen.sum().clamp(min=1)


def weighs(weight: float | Sequence[float] | Tensor) -> bool:
    """Whether there is a penalty; several numbers count as one."""
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
    check_kind("stats", stats, Stats, _STATS)
    seen = stats.visible > 0
    return torch.where(seen, stats.entropy, 0.0).sum() / seen.sum().clamp(min=1)


@overridable
def attention_divergence(
    query: Tensor,  # (..., heads, n_query, dim)
    key: Tensor,  # (..., heads, n_key, dim)
    teacher_query: Tensor,  # (..., heads, n_query, dim_teacher)
    teacher_key: Tensor,  # (..., heads, n_key, dim_teacher)
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | Policy | None = None,
    enable_gqa: bool = False,
    *,
    teacher_scale: float | Tensor | Policy | None = None,
    support: Support | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    kind: Kind = "forward",
    beta: float = 0.5,
    sample_weight: Tensor | None = None,  # broadcasts to the rows (..., heads, n_query)
    reduction: Reduction = "mean",
) -> Tensor:
    """The divergence of an attention's weights from a teacher's, row by row, with the weights of neither.

        loss_i = D( softmax(teacher scores_i), softmax(scores_i) )

    Both see the same keys; dims, scales and softcaps may differ. `forward` is KL(teacher||student). The teacher gets no
    gradient (`partita.divergence` gives both one). `mean` divides by the sum of the weights: 0 leaves a row out.

    >>> x = torch.eye(2)
    >>> attention_divergence(0 * x, x, torch.zeros(2, 5), torch.ones(2, 5), reduction="none")  # both are uniform
    tensor([0., 0.])
    """
    check_reduction(reduction)
    check_divergence(kind, beta)
    check_float("teacher_query", teacher_query)
    check_float("teacher_key", teacher_key)

    def attends(query: Tensor, key: Tensor, scale: float | Tensor | Policy | None, softcap: float | None) -> Gibbs:
        return Problem.of(query, key, attn_mask, is_causal, support, None, scale, softcap, None, enable_gqa).gibbs()

    student = attends(query, key, scale, softcap)
    teacher = attends(teacher_query.detach(), teacher_key.detach(), teacher_scale, teacher_softcap)
    weight = torch.ones((), dtype=torch.float32, device=query.device)
    if sample_weight is not None:
        check_rows("sample_weight", sample_weight, query[..., 0])
        weight = sample_weight.detach()
    weight = weight.to(torch.promote_types(query.dtype, torch.float32)).expand(query.shape[:-1])
    if reduction == "none":
        return (weight * divergence(teacher, student, kind, beta=beta)).to(loss_dtype(query))
    total = weighted_divergence(teacher, student, weight, kind, beta=beta)
    return reduce_rows(total, reduction, weight.sum()).to(loss_dtype(query))
