"""Noise and adversaries on the scores: exact effects, predictions, certificates."""

from __future__ import annotations

from partita.theory.robustness.adversary import (
    Attack,
    attack_l2,
    attack_linf,
    attack_linf_exact,
    output_sensitivity,
    output_sensitivity_norm,
)
from partita.theory.robustness.averaging import (
    NoiseEffect,
    monte_carlo_noise,
    noise_bias,
    noise_covariance,
    noise_effect,
    noise_identity,
    noise_sd_bound,
    ratio_expansion,
)
from partita.theory.robustness.lipschitz import (
    attention_change_bound,
    certified_radius,
    softmax_change_bound,
    value_diameter,
    worst_two_point_law,
)
from partita.theory.robustness.noise import (
    GaussianNoise,
    LaplaceNoise,
    Noise,
    UniformNoise,
    correlated_sigma,
    laplace_error_exponent,
)

__all__ = [
    "Attack",
    "GaussianNoise",
    "LaplaceNoise",
    "Noise",
    "NoiseEffect",
    "UniformNoise",
    "attack_l2",
    "attack_linf",
    "attack_linf_exact",
    "attention_change_bound",
    "certified_radius",
    "correlated_sigma",
    "laplace_error_exponent",
    "monte_carlo_noise",
    "noise_bias",
    "noise_covariance",
    "noise_effect",
    "noise_identity",
    "noise_sd_bound",
    "output_sensitivity",
    "output_sensitivity_norm",
    "ratio_expansion",
    "softmax_change_bound",
    "value_diameter",
    "worst_two_point_law",
]
