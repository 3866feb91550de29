"""InfoNCE and noise-contrastive estimation: losses, gradients, curvature."""

from __future__ import annotations

from partita.theory.contrast.curvature import (
    info_nce_hessian_joint,
    info_nce_hessian_keys,
    info_nce_hessian_mixed,
    info_nce_hessian_query,
)
from partita.theory.contrast.infonce import (
    BatchGradients,
    InfoNCEGradients,
    candidates_in_batch,
    hardness_weights,
    info_nce,
    info_nce_batch_gradients,
    info_nce_gradients,
    normalized_gradient,
)
from partita.theory.contrast.nce import (
    generalized_kl_gradient,
    nce_gradients,
    nce_logits,
    nce_population_gradient,
    nce_population_loss,
    nce_posterior,
    nce_sample_loss,
)

__all__ = [
    "BatchGradients",
    "InfoNCEGradients",
    "candidates_in_batch",
    "generalized_kl_gradient",
    "hardness_weights",
    "info_nce",
    "info_nce_batch_gradients",
    "info_nce_gradients",
    "info_nce_hessian_joint",
    "info_nce_hessian_keys",
    "info_nce_hessian_mixed",
    "info_nce_hessian_query",
    "nce_gradients",
    "nce_logits",
    "nce_population_gradient",
    "nce_population_loss",
    "nce_posterior",
    "nce_sample_loss",
    "normalized_gradient",
]
