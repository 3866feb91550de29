"""What goes into a backend with the request, and what comes out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from partita.engine.state import State, Stats, SumGrads, filled

if TYPE_CHECKING:
    from partita.engine.request import Request

__all__ = ["OPERANDS", "PARAMETER", "SumGrads", "Sums"]

OPERANDS = ("query", "key", "value", "scale", "bias")  # what a pass can be differentiated by, in this order everywhere
PARAMETER = "parameter "  # and a number: the parameters of a score that is a function


class Sums(NamedTuple):
    """Everything a pass gives, per row: one record from the kernel, through autograd, to the reader.

    What was not wanted is None. Relative to the peak, as in `State`.
    """

    peak: Tensor  # (*b, Q); a backend may keep more digits of it than of the sums, for its own backward
    mass: Tensor  # (*b, Q)
    count: Tensor  # type: ignore[assignment]  # (*b, Q); hides tuple.count
    first: Tensor | None = None  # (*b, Q)
    spread: Tensor | None = None  # (*b, Q)
    statistics: Tensor | None = None  # (5, *b, Q): log Z, entropy, mean, variance and maximum of the score
    moment: Tensor | None = None  # (*b, Q, V)
    mean: Tensor | None = None  # (*b, Q, V): E[value], where the request wants it and not the moment
    target_score: Tensor | None = None  # (*b, Q)
    rank: Tensor | None = None  # (*b, Q) int64
    argmax: Tensor | None = None  # (*b, Q) int64: the first key of the largest score, or -1
    node: torch.autograd.graph.Node | None = None  # of the pass, where autograd records it

    @staticmethod
    def of(
        state: State, target_score: Tensor | None = None, rank: Tensor | None = None, mean: Tensor | None = None
    ) -> Sums:
        """Those of a state."""
        s = state
        known = None if s.known is None else torch.stack(s.known[:5])
        return Sums(s.peak, s.mass, s.count, s.first, s.spread, known, s.moment, mean, target_score, rank)

    @property
    def state(self) -> State:
        """The sums as a monoid, with its peak in the dtype of the sums."""
        known = None
        if self.statistics is not None:
            log_partition, entropy, mean, variance, top = self.statistics.unbind()
            known = Stats(log_partition, entropy, mean, variance, top.detach(), self.count)
        first = torch.zeros_like(self.mass) if self.first is None else self.first
        spread = (
            torch.full_like(self.mass, 0.0 if self.first is None else torch.nan) if self.spread is None else self.spread
        )
        peak = self.peak.to(self.mass.dtype) if known is None else known.max_score
        return State(peak, self.mass, first, spread, self.count, self.moment, known)

    def answering(self, request: Request) -> Sums:
        """All sums the request wants: statistics or none, the mean value or its moment, whose memory it takes."""
        state, found = self.state, self
        if request.mean and state.moment is not None:
            found = found._replace(moment=None, mean=state.expectation(consume=True))
        if not request.statistics:
            return found._replace(first=None, spread=None)
        return found._replace(statistics=torch.stack(state.stats()[:5]))

    def nll(self) -> Tensor:
        """log Z - score of the target: (peak - score) + log mass, which keeps the digits of a large score.

        +inf where the target is not visible.
        """
        score = self.target_score
        assert score is not None
        hidden = score.isneginf()
        gap = self.peak.to(score.dtype) - torch.where(hidden, torch.zeros_like(score), score)
        return torch.where(hidden, torch.inf, filled(self.mass).log() + gap)
