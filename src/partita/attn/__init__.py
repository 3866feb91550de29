"""Face 3: attention, its variants, positions, and long sequences in blocks."""

from typing import TYPE_CHECKING

from partita.attn.entropy import attention_divergence, entropy_penalty, mean_entropy
from partita.attn.normalisers import LinearState, WeightStats, l1_attention, linear_attention, sigmoid_attention
from partita.attn.positions import (
    NTK,
    ALiBi,
    Bias,
    Clipped,
    Interpolated,
    NoPositions,
    PartialRotary,
    Positions,
    RelativeBias,
    Rotary,
    YaRN,
    alibi_slopes,
    rotary,
    sinusoidal,
)
from partita.attn.rotary_attention import rotary_attention
from partita.attn.variants import (
    PairHook,
    ScaleInvariant,
    TopK,
    blockwise_attention,
    gumbel_attention,
    hard_attention,
    hierarchical_attention,
    pair_attention,
    top_k_attention,
)

if TYPE_CHECKING:  # what it returns depends on its flags
    from partita._signatures import attention
else:
    from partita.attn.sdpa import attention

__all__ = [
    "NTK", "ALiBi", "Bias", "Clipped", "Interpolated", "NoPositions", "LinearState", "PairHook", "PartialRotary",
    "Positions", "RelativeBias", "Rotary", "ScaleInvariant", "TopK", "YaRN", "WeightStats", "alibi_slopes", "attention",
    "attention_divergence", "blockwise_attention", "entropy_penalty", "gumbel_attention", "hard_attention",
    "hierarchical_attention", "l1_attention", "linear_attention", "mean_entropy", "pair_attention", "rotary",
    "rotary_attention", "sigmoid_attention", "sinusoidal", "top_k_attention",
]  # fmt: skip
