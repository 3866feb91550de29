"""Face 3: attention, its variants, positions, and long sequences in blocks."""

from typing import TYPE_CHECKING

from partita.attn.bias import ALiBi, Bias, RelativeBias, alibi_slopes
from partita.attn.distill import attention_divergence
from partita.attn.entropy import entropy_penalty, mean_entropy
from partita.attn.hierarchy import blockwise_attention, hierarchical_attention
from partita.attn.normalisers import LinearState, WeightStats, l1_attention, linear_attention, sigmoid_attention
from partita.attn.pairwise import PairHook, ScaleInvariant, pair_attention
from partita.attn.positions import rotary, sinusoidal
from partita.attn.reach import NTK, Clipped, Interpolated, NoPositions, PartialRotary, Positions, Rotary, YaRN
from partita.attn.rotary_attention import rotary_attention
from partita.attn.variants import (
    TopK,
    gumbel_attention,
    hard_attention,
    top_k_attention,
)

if TYPE_CHECKING:  # what it returns depends on its flags
    from partita._signatures import attention
else:
    from partita.attn.sdpa import attention

__all__ = [
    "NTK",
    "ALiBi",
    "Bias",
    "Clipped",
    "Interpolated",
    "NoPositions",
    "LinearState",
    "PairHook",
    "PartialRotary",
    "Positions",
    "RelativeBias",
    "Rotary",
    "ScaleInvariant",
    "TopK",
    "YaRN",
    "WeightStats",
    "alibi_slopes",
    "attention",
    "attention_divergence",
    "blockwise_attention",
    "entropy_penalty",
    "gumbel_attention",
    "hard_attention",
    "hierarchical_attention",
    "l1_attention",
    "linear_attention",
    "mean_entropy",
    "pair_attention",
    "rotary",
    "rotary_attention",
    "sigmoid_attention",
    "sinusoidal",
    "top_k_attention",
]
