"""What goes into a backend besides the request, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from partita.engine.state import State

__all__ = ["OPERANDS", "Sums", "Upstream"]

OPERANDS = ("query", "key", "value", "scale", "bias")  # what a pass can be differentiated by, in this order everywhere


class Sums(NamedTuple):
    """Everything a pass gives, per row."""

    state: State
    target_score: Tensor | None = None
    rank: Tensor | None = None
    mean: Tensor | None = None  # E[value], where the request asks for it and not for the moment
    node: torch.autograd.graph.Node | None = None  # of the pass, where somebody differentiates it

    def nll(self) -> Tensor:
        """log Z - score of the target: (peak - score) + log mass, which keeps the digits of a large score.

        +inf where the target is not visible.
        """
        state, score = self.state, self.target_score
        assert score is not None
        hidden = score.isneginf()
        gap = state.peak.to(score.dtype) - torch.where(hidden, torch.zeros_like(score), score)
        return torch.where(hidden, torch.inf, state.log_mass() + gap)


@dataclass(frozen=True, eq=False)
class Upstream:
    """Gradients of the raw sums: those of `mass`, `first`, `sum_j e_j c_j^2`, `moment` and the target's score."""

    mass: Tensor  # (*b, Q)
    first: Tensor
    second: Tensor
    moment: Tensor | None  # (*b, Q, V)
    target: Tensor | None  # (*b, Q)

    @staticmethod
    def over(
        rows: tuple[int, ...],
        mass: Tensor,
        first: Tensor | None,
        second: Tensor | None,
        moment: Tensor | None,
        target: Tensor | None,
    ) -> Upstream:
        """Spread over the rows, zeros for the sums nobody asked for."""
        zero = torch.zeros_like(mass)
        return Upstream(
            mass.expand(rows),
            (zero if first is None else first).expand(rows),
            (zero if second is None else second).expand(rows),
            None if moment is None else moment.expand(*rows, moment.shape[-1]),
            None if target is None else target.expand(rows),
        )
