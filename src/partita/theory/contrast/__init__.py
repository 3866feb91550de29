"""InfoNCE and noise-contrastive estimation: losses, gradients, curvature."""

from __future__ import annotations

from partita.theory.contrast import curvature, infonce, nce
from partita.theory.contrast.curvature import *
from partita.theory.contrast.infonce import *
from partita.theory.contrast.nce import *

__all__ = [*curvature.__all__, *infonce.__all__, *nce.__all__]
