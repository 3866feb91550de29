"""Face 1: classification reads log Z - score of the target.

linear    cross entropy of a linear head, without its logits
logits    cross entropy, squared, absolute and focal loss of logits that exist
nce       telling data from noise
regression  squared and absolute error with a scale
vocabulary  hidden states against a vocabulary, which may be spread over ranks
tokens    log p, entropy and more of a policy's tokens
reference   how far a policy is from a reference
distill   a teacher's distribution as the target
"""

from __future__ import annotations

from partita.losses.distill import distillation_loss, linear_distillation_loss
from partita.losses.linear import linear_cross_entropy
from partita.losses.logits import brier_loss, cross_entropy, focal_loss, mae_loss, mse_loss
from partita.losses.nce import nce_loss
from partita.losses.reference import kl_estimate, token_divergence
from partita.losses.regression import gaussian_nll_loss, laplace_nll_loss
from partita.losses.tokens import TokenStats, token_stats
from partita.rows import ClassStats, LossStats

__all__ = [
    "ClassStats",
    "LossStats",
    "TokenStats",
    "brier_loss",
    "cross_entropy",
    "distillation_loss",
    "focal_loss",
    "gaussian_nll_loss",
    "kl_estimate",
    "laplace_nll_loss",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "mae_loss",
    "mse_loss",
    "nce_loss",
    "token_divergence",
    "token_stats",
]
