"""The faces as type checkers see them: a Tensor, a pair with `return_stats=True`, either for a bool.

A test compares them with the functions.
"""

from typing import Literal, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from partita._checks import Reduction
from partita.attn.problem import Options
from partita.contrastive import ContrastStats, Exclusion, LabelStats, Queue
from partita.engine import Stats
from partita.losses import LossStats
from partita.scale import Policy
from partita.score import Score
from partita.support import Support

class _Loss(TypedDict, total=False):
    weight: Tensor | None
    reduction: Reduction
    label_smoothing: float
    scale: float | Tensor
    z_loss: float
    entropy_weight: float
    sample_weight: Tensor | None

class _CrossEntropy(_Loss, total=False):
    ignore_index: int

class _LinearCrossEntropy(_Loss, total=False):
    linear_bias: Tensor | None
    ignore_index: int | None
    softcap: float | None
    shift: int
    group: object | None

class _Group(TypedDict, total=False):
    group: object | None

class _Contrast(_Group, total=False):
    temperature: float | Tensor
    reduction: Reduction

class _InfoNCE(_Contrast, total=False):
    negative_mode: str
    normalize: bool
    symmetric: bool
    log_temperature: Tensor | None
    labels: Tensor | None
    exclude: Exclusion | None
    hardness: float
    decoupled: bool
    queue: Queue | None
    score: Score | None

class _SupCon(_Contrast, total=False):
    ref_emb: Tensor | None
    ref_labels: Tensor | None

_Rest = Tensor | float | bool | Policy | None  # of the options of attention that may be positional

class _Attention(_Group, Options, total=False):
    dropout_p: float
    sink: Tensor | None

class _SolveScale(TypedDict, total=False):
    entropy: float | Tensor | None
    width: float | Tensor | None
    support: Support | None
    bias: Tensor | None
    grouped: bool
    score: Score | None

@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_stats: Literal[False] = ...,
    **options: Unpack[_LinearCrossEntropy],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_stats: Literal[True],
    **options: Unpack[_LinearCrossEntropy],
) -> tuple[Tensor, LossStats]: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_stats: bool, **options: Unpack[_LinearCrossEntropy]
) -> Tensor | tuple[Tensor, LossStats]: ...
@overload
def cross_entropy(
    input: Tensor, target: Tensor, *, return_stats: Literal[False] = ..., **options: Unpack[_CrossEntropy]
) -> Tensor: ...
@overload
def cross_entropy(
    input: Tensor, target: Tensor, *, return_stats: Literal[True], **options: Unpack[_CrossEntropy]
) -> tuple[Tensor, LossStats]: ...
@overload
def cross_entropy(
    input: Tensor, target: Tensor, *, return_stats: bool, **options: Unpack[_CrossEntropy]
) -> Tensor | tuple[Tensor, LossStats]: ...
@overload
def info_nce_loss(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = ...,
    *,
    return_stats: Literal[False] = ...,
    **options: Unpack[_InfoNCE],
) -> Tensor: ...
@overload
def info_nce_loss(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = ...,
    *,
    return_stats: Literal[True],
    **options: Unpack[_InfoNCE],
) -> tuple[Tensor, ContrastStats]: ...
@overload
def info_nce_loss(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = ...,
    *,
    return_stats: bool,
    **options: Unpack[_InfoNCE],
) -> Tensor | tuple[Tensor, ContrastStats]: ...
@overload
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor | None = ...,
    *,
    return_stats: Literal[False] = ...,
    **options: Unpack[_Group],
) -> Tensor: ...
@overload
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor | None = ...,
    *,
    return_stats: Literal[True],
    **options: Unpack[_Group],
) -> tuple[Tensor, ContrastStats]: ...
@overload
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor | None = ...,
    *,
    return_stats: bool,
    **options: Unpack[_Group],
) -> Tensor | tuple[Tensor, ContrastStats]: ...
@overload
def nt_xent_loss(
    out0: Tensor, out1: Tensor, *, return_stats: Literal[False] = ..., **options: Unpack[_Contrast]
) -> Tensor: ...
@overload
def nt_xent_loss(
    out0: Tensor, out1: Tensor, *, return_stats: Literal[True], **options: Unpack[_Contrast]
) -> tuple[Tensor, ContrastStats]: ...
@overload
def nt_xent_loss(
    out0: Tensor, out1: Tensor, *, return_stats: bool, **options: Unpack[_Contrast]
) -> Tensor | tuple[Tensor, ContrastStats]: ...
@overload
def supcon_loss(
    embeddings: Tensor, labels: Tensor, *, return_stats: Literal[False] = ..., **options: Unpack[_SupCon]
) -> Tensor: ...
@overload
def supcon_loss(
    embeddings: Tensor, labels: Tensor, *, return_stats: Literal[True], **options: Unpack[_SupCon]
) -> tuple[Tensor, LabelStats]: ...
@overload
def supcon_loss(
    embeddings: Tensor, labels: Tensor, *, return_stats: bool, **options: Unpack[_SupCon]
) -> Tensor | tuple[Tensor, LabelStats]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: _Rest,
    return_stats: Literal[False] = ...,
    **options: Unpack[_Attention],
) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: _Rest, return_stats: Literal[True], **options: Unpack[_Attention]
) -> tuple[Tensor, Stats]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: _Rest, return_stats: bool, **options: Unpack[_Attention]
) -> Tensor | tuple[Tensor, Stats]: ...
@overload
def solve_scale(
    query: Tensor, key: Tensor, *, return_reached: Literal[False] = ..., **options: Unpack[_SolveScale]
) -> Tensor: ...
@overload
def solve_scale(
    query: Tensor, key: Tensor, *, return_reached: Literal[True], **options: Unpack[_SolveScale]
) -> tuple[Tensor, Tensor]: ...
@overload
def solve_scale(
    query: Tensor, key: Tensor, *, return_reached: bool, **options: Unpack[_SolveScale]
) -> Tensor | tuple[Tensor, Tensor]: ...
