"""What partita's distributions are and do: the mathematics of softmax(score * scale), and experiments that try it.

Functions on tensors, in nats:

    information   entropy, its floor, bounds and derivatives; mutual information; total correlation; bottleneck
    robustness    noise and adversaries on the scores
    geometry      simplex, Jacobian, Fisher metric, curvature of losses
    spectrum      attention matrices as operators; heads; projections; initialisation
    sharpness     scale against length: Gaussian scores, condensation, growth laws, calibration, control
    contrast      InfoNCE and noise-contrastive estimation
    layer         the parts of an attention layer: backward, cost, positions, norms
    law           the dense Gibbs law and how laws of blocks merge
    selection     top-k, hard and Gumbel choice
    ring          time and bytes of a pass over the keys of several processes

A function whose docstring says "streams" takes a `partita.Gibbs` (or query and key) and holds nothing of size
n_query * n_key; the others work on the tensors they are given. An id at the end of an equation, such as (M-ENT-1), is
that of its statement in theory/docs/reference/statements.md.

Programs:

    experiments   one file per question; `partita study list | run | show`
    errata        formulas in circulation that are wrong, next to the right ones, as numbers
    demo          `partita demo`
    stretch       `partita stretch`: which way of reading carries a trained model beyond its length of training
    lab           `partita lab`: a page to play with one softmax

Names are loaded when first used: the lab page needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita._later import load

if TYPE_CHECKING:
    from partita.metrics import InformationBound as InformationBound
    from partita.metrics import mutual_information_bound as mutual_information_bound
    from partita_theory import contrast as contrast
    from partita_theory import geometry as geometry
    from partita_theory import information as information
    from partita_theory import law as law
    from partita_theory import layer as layer
    from partita_theory import robustness as robustness
    from partita_theory import selection as selection
    from partita_theory import sharpness as sharpness
    from partita_theory import spectrum as spectrum

_HOME = {"InformationBound": "information", "mutual_information_bound": "information"}

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


def __getattr__(name: str) -> Any:
    return load(__name__, name, _HOME)
