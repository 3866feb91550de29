"""The simplex, the softmax Jacobian, Fisher metric, curvature of losses, smooth maxima."""

from __future__ import annotations

from partita_theory.geometry import losses, simplex
from partita_theory.geometry.losses import *
from partita_theory.geometry.simplex import *

__all__ = [*losses.__all__, *simplex.__all__]
