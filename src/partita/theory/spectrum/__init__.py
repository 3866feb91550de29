"""Attention matrices as operators: eigenvalues, ranks, heads, projections, initialisation."""

from __future__ import annotations

from partita.theory.spectrum import heads, initialisation, markov, projections, rank
from partita.theory.spectrum.heads import *
from partita.theory.spectrum.initialisation import *
from partita.theory.spectrum.markov import *
from partita.theory.spectrum.projections import *
from partita.theory.spectrum.rank import *

__all__ = [*heads.__all__, *initialisation.__all__, *markov.__all__, *projections.__all__, *rank.__all__]
