"""How far one attention is from another: a loss for distilling attention, or for training an indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from partita import _checks
from partita.attn.problem import Options, distribution
from partita.comparison import check_kind, divergence, weighted_divergence
from partita.precision import loss_dtype
from partita.rows import reduce_rows
from partita.scale import Policy
from partita.support import Support

__all__ = ["attention_divergence"]


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
    kind: str = "forward",
    beta: float = 0.5,
    sample_weight: Tensor | None = None,  # broadcasts to the rows (..., heads, n_query)
    reduction: str = "mean",
) -> Tensor:
    """The divergence of an attention's weights from a teacher's, row by row, with the weights of neither.

        loss_i = D( softmax(teacher scores_i), softmax(scores_i) )

    Both see the same keys; dims, scales and softcaps are their own. `forward` is KL(teacher||student). The teacher gets
    no gradient: give both to `partita.divergence` for one. `mean` divides by the sum of the weights, so that a weight
    of 0 leaves a padded row out.

    >>> x = torch.eye(2)
    >>> attention_divergence(0 * x, x, torch.zeros(2, 5), torch.ones(2, 5), reduction="none")  # both are uniform
    tensor([0., 0.])
    """
    _checks.check_reduction(reduction)
    check_kind(kind, beta)
    common: Options = {"attn_mask": attn_mask, "is_causal": is_causal, "enable_gqa": enable_gqa, "support": support}
    own: Options = {**common, "scale": scale, "softcap": softcap}
    others: Options = {**common, "scale": teacher_scale, "softcap": teacher_softcap}
    student = distribution(query, key, **own)
    teacher = distribution(teacher_query.detach(), teacher_key.detach(), **others)
    weight = torch.ones((), dtype=torch.float32, device=query.device)
    if sample_weight is not None:
        _checks.check_rows("sample_weight", sample_weight, query[..., 0])
        weight = sample_weight.detach()
    weight = weight.to(torch.promote_types(query.dtype, torch.float32)).expand(query.shape[:-1])
    if reduction == "none":
        return (weight * divergence(teacher, student, kind, beta=beta)).to(loss_dtype(query))
    total = weighted_divergence(teacher, student, weight, kind, beta=beta)
    return reduce_rows(total, reduction, weight.sum()).to(loss_dtype(query))
