"""The faces as type checkers see them; written by release/signatures.py, held to the functions by a test."""

from typing import Any, Literal, overload

from torch import Tensor

from partita.attn import Bias
from partita.contrastive import ContrastStats, Exclusion, LabelStats, Queue
from partita.engine import Stats
from partita.losses import LossStats
from partita.scale import Policy
from partita.score import Score
from partita.support import Support

@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    reduction: str = ...,
    ignore_index: int | None = ...,
    label_smoothing: float = ...,
    scale: float | Tensor = ...,
    softcap: float | None = ...,
    z_loss: float = ...,
    entropy_weight: float = ...,
    sample_weight: Tensor | None = ...,
    return_stats: Literal[False] = ...,
    shift: int = ...,
    group: object | None = ...,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    reduction: str = ...,
    ignore_index: int | None = ...,
    label_smoothing: float = ...,
    scale: float | Tensor = ...,
    softcap: float | None = ...,
    z_loss: float = ...,
    entropy_weight: float = ...,
    sample_weight: Tensor | None = ...,
    return_stats: Literal[True],
    shift: int = ...,
    group: object | None = ...,
) -> tuple[Tensor, LossStats]: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    reduction: str = ...,
    ignore_index: int | None = ...,
    label_smoothing: float = ...,
    scale: float | Tensor = ...,
    softcap: float | None = ...,
    z_loss: float = ...,
    entropy_weight: float = ...,
    sample_weight: Tensor | None = ...,
    return_stats: bool,
    shift: int = ...,
    group: object | None = ...,
) -> Tensor | tuple[Tensor, LossStats]: ...
@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = ...,
    reduction: str = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    scale: float | Tensor = ...,
    z_loss: float = ...,
    entropy_weight: float = ...,
    sample_weight: Tensor | None = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = ...,
    reduction: str = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    scale: float | Tensor = ...,
    z_loss: float = ...,
    entropy_weight: float = ...,
    sample_weight: Tensor | None = ...,
    return_stats: Literal[True],
) -> tuple[Tensor, LossStats]: ...
@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = ...,
    reduction: str = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    scale: float | Tensor = ...,
    z_loss: float = ...,
    entropy_weight: float = ...,
    sample_weight: Tensor | None = ...,
    return_stats: bool,
) -> Tensor | tuple[Tensor, LossStats]: ...
@overload
def info_nce_loss(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = ...,
    *,
    temperature: float | Tensor = ...,
    reduction: str = ...,
    negative_mode: str = ...,
    normalize: bool = ...,
    symmetric: bool = ...,
    return_stats: Literal[False] = ...,
    group: object | None = ...,
    log_temperature: Tensor | None = ...,
    labels: Tensor | None = ...,
    exclude: Exclusion | None = ...,
    hardness: float = ...,
    decoupled: bool = ...,
    queue: Queue | None = ...,
) -> Tensor: ...
@overload
def info_nce_loss(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = ...,
    *,
    temperature: float | Tensor = ...,
    reduction: str = ...,
    negative_mode: str = ...,
    normalize: bool = ...,
    symmetric: bool = ...,
    return_stats: Literal[True],
    group: object | None = ...,
    log_temperature: Tensor | None = ...,
    labels: Tensor | None = ...,
    exclude: Exclusion | None = ...,
    hardness: float = ...,
    decoupled: bool = ...,
    queue: Queue | None = ...,
) -> tuple[Tensor, ContrastStats]: ...
@overload
def info_nce_loss(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = ...,
    *,
    temperature: float | Tensor = ...,
    reduction: str = ...,
    negative_mode: str = ...,
    normalize: bool = ...,
    symmetric: bool = ...,
    return_stats: bool,
    group: object | None = ...,
    log_temperature: Tensor | None = ...,
    labels: Tensor | None = ...,
    exclude: Exclusion | None = ...,
    hardness: float = ...,
    decoupled: bool = ...,
    queue: Queue | None = ...,
) -> Tensor | tuple[Tensor, ContrastStats]: ...
@overload
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor | None = ...,
    *,
    return_stats: Literal[False] = ...,
    group: object | None = ...,
) -> Tensor: ...
@overload
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor | None = ...,
    *,
    return_stats: Literal[True],
    group: object | None = ...,
) -> tuple[Tensor, ContrastStats]: ...
@overload
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor | None = ...,
    *,
    return_stats: bool,
    group: object | None = ...,
) -> Tensor | tuple[Tensor, ContrastStats]: ...
@overload
def nt_xent_loss(
    out0: Tensor,
    out1: Tensor,
    *,
    temperature: float | Tensor = ...,
    reduction: str = ...,
    return_stats: Literal[False] = ...,
    group: object | None = ...,
) -> Tensor: ...
@overload
def nt_xent_loss(
    out0: Tensor,
    out1: Tensor,
    *,
    temperature: float | Tensor = ...,
    reduction: str = ...,
    return_stats: Literal[True],
    group: object | None = ...,
) -> tuple[Tensor, ContrastStats]: ...
@overload
def nt_xent_loss(
    out0: Tensor,
    out1: Tensor,
    *,
    temperature: float | Tensor = ...,
    reduction: str = ...,
    return_stats: bool,
    group: object | None = ...,
) -> Tensor | tuple[Tensor, ContrastStats]: ...
@overload
def supcon_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = ...,
    ref_emb: Tensor | None = ...,
    ref_labels: Tensor | None = ...,
    reduction: str = ...,
    return_stats: Literal[False] = ...,
    group: object | None = ...,
) -> Tensor: ...
@overload
def supcon_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = ...,
    ref_emb: Tensor | None = ...,
    ref_labels: Tensor | None = ...,
    reduction: str = ...,
    return_stats: Literal[True],
    group: object | None = ...,
) -> tuple[Tensor, LabelStats]: ...
@overload
def supcon_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = ...,
    ref_emb: Tensor | None = ...,
    ref_labels: Tensor | None = ...,
    reduction: str = ...,
    return_stats: bool,
    group: object | None = ...,
) -> Tensor | tuple[Tensor, LabelStats]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | Tensor | Policy | None = ...,
    enable_gqa: bool = ...,
    *,
    support: Support | None = ...,
    bias: Tensor | Bias | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    return_stats: Literal[False] = ...,
    return_received: Literal[False] = ...,
    group: object | None = ...,
    score: Score | None = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | Tensor | Policy | None = ...,
    enable_gqa: bool = ...,
    *,
    support: Support | None = ...,
    bias: Tensor | Bias | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    return_stats: Literal[True],
    return_received: Literal[False] = ...,
    group: object | None = ...,
    score: Score | None = ...,
) -> tuple[Tensor, Stats]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | Tensor | Policy | None = ...,
    enable_gqa: bool = ...,
    *,
    support: Support | None = ...,
    bias: Tensor | Bias | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    return_stats: bool,
    return_received: Literal[False] = ...,
    group: object | None = ...,
    score: Score | None = ...,
) -> Tensor | tuple[Tensor, Stats]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | Tensor | Policy | None = ...,
    enable_gqa: bool = ...,
    *,
    support: Support | None = ...,
    bias: Tensor | Bias | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    return_stats: bool = ...,
    return_received: Literal[True],
    group: object | None = ...,
    score: Score | None = ...,
) -> tuple[Any, ...]: ...
@overload
def solve_scale(
    query: Tensor,
    key: Tensor,
    *,
    entropy: float | Tensor | None = ...,
    width: float | Tensor | None = ...,
    support: Support | None = ...,
    bias: Tensor | None = ...,
    grouped: bool = ...,
    score: Score | None = ...,
    return_reached: Literal[False] = ...,
) -> Tensor: ...
@overload
def solve_scale(
    query: Tensor,
    key: Tensor,
    *,
    entropy: float | Tensor | None = ...,
    width: float | Tensor | None = ...,
    support: Support | None = ...,
    bias: Tensor | None = ...,
    grouped: bool = ...,
    score: Score | None = ...,
    return_reached: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def solve_scale(
    query: Tensor,
    key: Tensor,
    *,
    entropy: float | Tensor | None = ...,
    width: float | Tensor | None = ...,
    support: Support | None = ...,
    bias: Tensor | None = ...,
    grouped: bool = ...,
    score: Score | None = ...,
    return_reached: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
