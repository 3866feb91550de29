"""Scale against length: Gaussian scores, condensation, growth laws, calibration, control, temperature."""

from __future__ import annotations

from partita.theory.sharpness import (
    condensed,
    control,
    critical,
    cumulant,
    gaussian,
    growth,
    needle,
    policies,
    temperature,
)
from partita.theory.sharpness.condensed import *
from partita.theory.sharpness.control import *
from partita.theory.sharpness.critical import *
from partita.theory.sharpness.cumulant import *
from partita.theory.sharpness.gaussian import *
from partita.theory.sharpness.growth import *
from partita.theory.sharpness.needle import *
from partita.theory.sharpness.policies import *
from partita.theory.sharpness.temperature import *

__all__ = [
    *condensed.__all__,
    *control.__all__,
    *critical.__all__,
    *cumulant.__all__,
    *gaussian.__all__,
    *growth.__all__,
    *needle.__all__,
    *policies.__all__,
    *temperature.__all__,
]
