"""The parts of an attention layer: backward pass, cost, positions, normalisation."""

from __future__ import annotations

from partita.theory.layer.backward import AttentionGradients, attention_backward, projection_gradients, query_gradient
from partita.theory.layer.cost import Cost, attention_cost, balance_length
from partita.theory.layer.norms import layer_norm, qk_norm_width, rms_norm
from partita.theory.layer.positions import (
    ScoreParts,
    distance_bias,
    score_parts,
    sinusoidal_positions,
    sinusoidal_similarity,
)

__all__ = [
    "AttentionGradients",
    "Cost",
    "ScoreParts",
    "attention_backward",
    "attention_cost",
    "balance_length",
    "distance_bias",
    "layer_norm",
    "projection_gradients",
    "qk_norm_width",
    "query_gradient",
    "rms_norm",
    "score_parts",
    "sinusoidal_positions",
    "sinusoidal_similarity",
]
