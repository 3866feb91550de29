"""How far apart two distributions over the same keys are, as sums over keys of what each side adds.

With a = log p and b = log q of one key (P = exp a, Q = exp b), and m = log(beta P + (1 - beta) Q):

                     first side                second side               the divergence of a row
    forward          P (a - b)                 -P                        sum first
    reverse          -Q                        Q (b - a)                 sum second
    cross_entropy    -P b                      -P                        sum first
    js               beta P (a - m)            (1 - beta) Q (b - m)      sum first + sum second
    hellinger        -sqrt(P Q) / 2            -sqrt(P Q) / 2            1 + sum first + sum second

The two sides are the derivatives with respect to a and b, up to multiples of P and Q, which a softmax does not feel;
so the same numbers are the gradient of the scores s of p and t of q:

    d / d s_j = first_j - P_j sum first        d / d t_j = second_j - Q_j sum second

A pass keeps six numbers of a row, its *record*: peak and mass of both distributions, and both sums. What cannot be is
told by an infinite sum: KL(p||q) where p sees a key that q does not. There, and where p sees nothing, the gradient is
0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from partita.engine.state import filled

__all__ = ["KINDS", "Record", "both_sides"]

KINDS = ("forward", "reverse", "cross_entropy", "js", "hellinger")


class Record(NamedTuple):
    """What a pass over two distributions knows of each row."""

    peak: Tensor  # (*b, Q), of p; natural units, accumulation dtype
    mass: Tensor
    other_peak: Tensor  # of q
    other_mass: Tensor
    first: Tensor  # sums over keys of both sides
    second: Tensor

    def divergence(self, kind: str) -> Tensor:
        """The divergence of every row; 0 where p sees nothing."""
        total = self.second if kind == "reverse" else self.first
        if kind in ("js", "hellinger"):
            total = total + self.second
        # none of them is negative; a rounding may be
        total = (1 + total if kind == "hellinger" else total).clamp(min=0)
        return torch.where(self.mass == 0, torch.zeros_like(total), total)

    def kept(self, kind: str, g: Tensor) -> Tensor:
        """What of an upstream gradient reaches the scores: nothing where the divergence is infinite, or p empty."""
        lost = (self.mass == 0) | (self.second if kind == "reverse" else self.first).isposinf()
        return torch.where(lost, torch.zeros_like(g), g)

    def log_masses(self) -> tuple[Tensor, Tensor]:
        """log mass of both; 0 where there is none."""
        return filled(self.mass).log(), filled(self.other_mass).log()


def both_sides(kind: str, beta: float, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What each key adds on both sides (M-DIV-6); a and b are log-probabilities, finite where a key is not visible."""
    if kind == "forward":
        p = a.exp()
        return p * (a - b), -p
    if kind == "reverse":
        q = b.exp()
        return -q, q * (b - a)
    if kind == "cross_entropy":
        p = a.exp()
        return -(p * b), -p
    if kind == "hellinger":
        half = torch.exp((a + b) / 2) / -2
        return half, half
    m = torch.logaddexp(a + math.log(beta), b + math.log(1 - beta))
    return beta * a.exp() * (a - m), (1 - beta) * b.exp() * (b - m)
