"""Attention matrices as operators: eigenvalues, ranks, heads, projections, initialisation."""

from __future__ import annotations

from partita.theory.spectrum.heads import (
    HeadDiversity,
    head_affinity,
    head_cosine,
    head_diversity,
    head_fisher_rao,
    head_kl,
    joint_entropy_bounds,
)
from partita.theory.spectrum.initialisation import (
    initial_sharpness,
    sharpness_initialiser_std,
    xavier_gain,
    xavier_variance,
)
from partita.theory.spectrum.markov import (
    Stationary,
    dobrushin,
    leading_eigenvalues,
    pull,
    push,
    singular_value,
    spectral_gap,
    stationary,
)
from partita.theory.spectrum.projections import RowFactors, match_form, match_singular_values, row_svd, score_bound
from partita.theory.spectrum.rank import (
    effective_rank,
    eigenvalue_entropy,
    stable_rank,
    stable_rank_bound,
    stable_rank_streaming,
    von_neumann_entropy,
)

__all__ = [
    "HeadDiversity",
    "RowFactors",
    "Stationary",
    "dobrushin",
    "effective_rank",
    "eigenvalue_entropy",
    "head_affinity",
    "head_cosine",
    "head_diversity",
    "head_fisher_rao",
    "head_kl",
    "initial_sharpness",
    "joint_entropy_bounds",
    "leading_eigenvalues",
    "match_form",
    "match_singular_values",
    "pull",
    "push",
    "row_svd",
    "score_bound",
    "sharpness_initialiser_std",
    "singular_value",
    "spectral_gap",
    "stable_rank",
    "stable_rank_bound",
    "stable_rank_streaming",
    "stationary",
    "von_neumann_entropy",
    "xavier_gain",
    "xavier_variance",
]
