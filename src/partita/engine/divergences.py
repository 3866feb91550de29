"""The distance of two distributions over the same keys, as sums over keys of what each side adds.

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
marked by an infinite sum: KL(p||q) where p sees a key that q does not. There, and where p sees nothing, the gradient is
0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from partita.engine.state import LOWEST, filled, levels

__all__ = ["KINDS", "Kind", "Record", "both_sides", "written_out"]

Kind = Literal["forward", "reverse", "cross_entropy", "js", "hellinger"]
KINDS: tuple[Kind, ...] = get_args(Kind)


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


def both_sides(
    kind: str, beta: float, a: Tensor, b: Tensor, add: Callable[[Tensor, Tensor], Tensor] = torch.logaddexp
) -> tuple[Tensor, Tensor]:
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
    m = add(a + math.log(beta), b + math.log(1 - beta))
    return beta * a.exp() * (a - m), (1 - beta) * b.exp() * (b - m)


def written_out(s: Tensor, t: Tensor, kind: str, beta: float) -> Tensor:  # (*b, Q, K) each -> (*b, Q)
    """The divergence of every row from all scores of both, by torch; 0 where `Record.kept` keeps no gradient."""
    a, b = _log_probabilities(s), _log_probabilities(t)
    seen, unseen = (t, s) if kind == "reverse" else (s, t)
    lost = s.isneginf().all(-1)
    if kind not in ("js", "hellinger"):
        lost = lost | (~seen.isneginf() & unseen.isneginf()).any(-1)
    own, their = both_sides(kind, beta, a, b, _log_sum)
    total = (their if kind == "reverse" else own + their if kind in ("js", "hellinger") else own).sum(-1)
    total = 1 + total if kind == "hellinger" else total
    return torch.where(lost, torch.zeros_like(total), total)


def _log_probabilities(scores: Tensor) -> Tensor:
    """As the tiles have them: finite and constant where a key is not visible."""
    hidden = scores.isneginf()
    found = torch.where(hidden, torch.zeros_like(scores), scores) - levels(scores)[..., None]
    return torch.where(hidden, torch.full_like(found, LOWEST), found)


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    """torch.logaddexp, whose second derivative is nan where one is far below the other."""
    above = a >= b
    gap = torch.nn.functional.logsigmoid(torch.where(above, a - b, b - a))
    return torch.where(above, a, b) - gap
