"""Entropy of a softmax row, its bounds and derivatives; mutual information; total correlation; the bottleneck."""

from __future__ import annotations

from partita_theory.information import mutual, shannon
from partita_theory.information.mutual import *
from partita_theory.information.shannon import *

__all__ = [*mutual.__all__, *shannon.__all__]
