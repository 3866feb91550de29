"""The parts of an attention layer: backward pass, cost, positions, normalisation."""

from __future__ import annotations

from partita.theory.layer import backward, cost, norms, positions
from partita.theory.layer.backward import *
from partita.theory.layer.cost import *
from partita.theory.layer.norms import *
from partita.theory.layer.positions import *

__all__ = [*backward.__all__, *cost.__all__, *norms.__all__, *positions.__all__]
