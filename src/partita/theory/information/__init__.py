"""Entropy of a softmax row, its bounds and derivatives; mutual information; total correlation; the bottleneck."""

from __future__ import annotations

from partita.theory.information import bottleneck, budget, correlation, derivatives, floor, mutual, streaming
from partita.theory.information import entropy as entropy_file
from partita.theory.information.bottleneck import *
from partita.theory.information.budget import *
from partita.theory.information.correlation import *
from partita.theory.information.derivatives import *
from partita.theory.information.entropy import *
from partita.theory.information.floor import *
from partita.theory.information.mutual import *
from partita.theory.information.streaming import *

__all__ = [
    *bottleneck.__all__,
    *budget.__all__,
    *correlation.__all__,
    *derivatives.__all__,
    *entropy_file.__all__,
    *floor.__all__,
    *mutual.__all__,
    *streaming.__all__,
]
