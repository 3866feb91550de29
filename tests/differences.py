"""Derivatives against finite differences, in float64, along one random direction of all inputs and one of all outputs.

A whole Jacobian takes two calls for every number that goes in, hundreds of passes for a small problem. One direction
takes two: v^T J u is compared, u and v random, which no wrong J survives but by a chance of measure zero. What could
hide a wrong entry is the tolerance, since one of n entries is 1/n of the sum: so it is set by what central differences
can do here, not by torch's habit. Their error is about eps^2 f''' / 6 + 2e-16 |f| / eps; with eps = 1e-6 and |f|, f'''
up to some hundreds, as for the problems of these tests, that is below 1e-7. torch widens `atol` by the sums of u and v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

RELATIVE, ABSOLUTE = 1e-6, 1e-7


def gradcheck(function: Callable[..., Any], inputs: Any, **given: Any) -> bool:
    """First derivatives; raises where they are wrong."""
    return torch.autograd.gradcheck(function, inputs, fast_mode=True, **{"rtol": RELATIVE, "atol": ABSOLUTE} | given)


def gradgradcheck(function: Callable[..., Any], inputs: Any, **given: Any) -> bool:
    """Second derivatives, by differences of the first."""
    return torch.autograd.gradgradcheck(
        function, inputs, fast_mode=True, **{"rtol": RELATIVE, "atol": ABSOLUTE} | given
    )
