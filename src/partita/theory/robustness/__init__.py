"""Noise and adversaries on the scores: exact effects, predictions, certificates."""

from __future__ import annotations

from partita.theory.robustness import adversary, averaging, lipschitz, noise
from partita.theory.robustness.adversary import *
from partita.theory.robustness.averaging import *
from partita.theory.robustness.lipschitz import *
from partita.theory.robustness.noise import *

__all__ = [*adversary.__all__, *averaging.__all__, *lipschitz.__all__, *noise.__all__]
