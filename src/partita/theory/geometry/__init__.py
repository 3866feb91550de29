"""The simplex, the softmax Jacobian, Fisher metric, curvature of losses, smooth maxima."""

from __future__ import annotations

from partita.theory.geometry import (
    attenuation,
    cross_entropy,
    divergence,
    fisher,
    jacobian,
    loss_shapes,
    simplex,
    smooth_maximum,
    squared_error,
)
from partita.theory.geometry.attenuation import *
from partita.theory.geometry.cross_entropy import *
from partita.theory.geometry.divergence import *
from partita.theory.geometry.fisher import *
from partita.theory.geometry.jacobian import *
from partita.theory.geometry.loss_shapes import *
from partita.theory.geometry.simplex import *
from partita.theory.geometry.smooth_maximum import *
from partita.theory.geometry.squared_error import *

__all__ = [
    *attenuation.__all__,
    *cross_entropy.__all__,
    *divergence.__all__,
    *fisher.__all__,
    *jacobian.__all__,
    *loss_shapes.__all__,
    *simplex.__all__,
    *smooth_maximum.__all__,
    *squared_error.__all__,
]
