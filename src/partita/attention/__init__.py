"""Face 3: attention, its variants, positions, and long sequences in blocks."""

from partita.attention.bias import ALiBi, Bias, RelativeBias, alibi_slopes
from partita.attention.hierarchy import blockwise_attention, hierarchical_attention, segmented_attention
from partita.attention.pairwise import PairHook, ScaleInvariant, pair_attention
from partita.attention.positions import rotary, sinusoidal
from partita.attention.sdpa import attention
from partita.attention.variants import (
    TopK,
    gumbel_attention,
    hard_attention,
    l1_attention,
    mean_entropy,
    top_k_attention,
)

__all__ = [
    "ALiBi",
    "Bias",
    "PairHook",
    "RelativeBias",
    "ScaleInvariant",
    "TopK",
    "alibi_slopes",
    "attention",
    "blockwise_attention",
    "gumbel_attention",
    "hard_attention",
    "hierarchical_attention",
    "l1_attention",
    "mean_entropy",
    "pair_attention",
    "rotary",
    "segmented_attention",
    "sinusoidal",
    "top_k_attention",
]
