"""The mathematics of softmax(score * scale) as functions on tensors, in nats.

    information   entropy, its floor, bounds and derivatives; mutual information; total correlation; bottleneck
    robustness    noise and adversaries on the scores
    geometry      simplex, Jacobian, Fisher metric, curvature of losses
    spectrum      attention matrices as operators; heads; projections; initialisation
    sharpness     scale against length: Gaussian scores, condensation, growth laws, calibration, control
    contrast      InfoNCE and noise-contrastive estimation
    layer         the parts of an attention layer: backward, cost, positions, norms
    law           the dense Gibbs law and how laws of blocks merge
    selection     top-k, hard and Gumbel choice

A function whose docstring says "streams" takes a `partita.Gibbs` (or query and key) and holds nothing of size
n_query * n_key; the others work on the tensors they are given. "Spec: M-ENT-1" names a statement of docs/statements.md.
"""

from __future__ import annotations

from partita.theory import (
    contrast,
    geometry,
    information,
    law,
    layer,
    robustness,
    selection,
    sharpness,
    spectrum,
)
from partita.theory.information import InformationBound, mutual_information_bound

__all__ = [
    "InformationBound",
    "contrast",
    "geometry",
    "information",
    "law",
    "layer",
    "mutual_information_bound",
    "robustness",
    "selection",
    "sharpness",
    "spectrum",
]
