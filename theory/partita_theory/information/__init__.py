"""Entropy of a softmax row, its bounds and derivatives; mutual information; total correlation; the bottleneck."""

from __future__ import annotations

from partita_theory._domain import public
from partita_theory.information import mutual, shannon
from partita_theory.information.mutual import *
from partita_theory.information.shannon import *

__all__ = [*public(vars(mutual), "InformationBound", "mutual_information_bound"), *public(vars(shannon))]
