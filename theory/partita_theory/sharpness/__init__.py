"""Scale against length: Gaussian scores, condensation, growth laws, calibration, control, temperature."""

from __future__ import annotations

from partita_theory._domain import public
from partita_theory.sharpness import policies, transition
from partita_theory.sharpness.policies import *
from partita_theory.sharpness.transition import *

__all__ = [*public(vars(policies)), *public(vars(transition), "critical_scale")]
