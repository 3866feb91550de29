"""What a pass knows of each row, and how two passes are joined.

    peak   = max_j s_j                       e_j = exp(s_j - peak)        c_j = s_j - peak
    mass   = sum_j e_j
    first  = sum_j e_j c_j
    spread = sum_j e_j (c_j - first / mass)^2          about the mean: a raw second moment would cancel
    moment = sum_j e_j value_j
    count  = number of keys seen

A commutative monoid under `merge`: tiles, threads, key banks and machines may come in any order and grouping; the state
of no keys is neutral. The peak is a constant for the gradient: every number read off a state is the same for any peak,
so its derivatives are those of the sums alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from partita._checks import broadcast_batch, has_values
from partita.errors import ShapeError
from partita.precision import product

__all__ = ["LOWEST", "State", "Stats", "centre", "merge"]

LOWEST = -1e5  # exp of it is 0 in every dtype, its square is finite in float32


class Stats(NamedTuple):
    """Statistics of each row's distribution, (..., n_query), in float32 or better; natural logarithms."""

    log_partition: Tensor
    entropy: Tensor
    mean_score: Tensor
    score_variance: Tensor
    max_score: Tensor
    visible: Tensor


@dataclass(frozen=True, eq=False)
class State:
    """Sums of exp(score) over the keys seen so far, stored relative to their peak."""

    peak: Tensor  # (..., Q), -inf while no key was seen
    mass: Tensor  # (..., Q)
    first: Tensor  # (..., Q)
    spread: Tensor  # (..., Q)
    count: Tensor  # (..., Q)
    moment: Tensor | None = None  # (..., Q, V)
    known: Stats | None = None  # what `stats` gives, where the pass has worked it out; such sums have no gradient

    @staticmethod
    def of(scores: Tensor, value: Tensor | None = None) -> State:  # (..., Q, K), (..., K, V)
        """The state of one tile of explicit scores; -inf is a key that is not visible.

        >>> State.of(torch.zeros(1, 4)).entropy()  # uniform over 4 keys: log 4
        tensor([1.3863])
        """
        scores = scores if scores.dtype == torch.float64 else scores.float()
        peak = scores.detach().amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
        centred, weight = centre(scores, peak)
        mass, first = weight.sum(-1), (weight * centred).sum(-1)
        mean = first / torch.where(peak.isneginf(), torch.ones_like(mass), mass)
        spread = (weight * (centred - mean[..., None]) ** 2).sum(-1)
        count = (~scores.isneginf()).sum(-1).to(scores.dtype)
        moment = None if value is None else product(weight, value.to(scores.dtype))
        return State(peak, mass, first, spread, count, moment)

    def merge(self, other: State) -> State:
        """The state of both sets of keys, which must not overlap."""
        if (self.moment is None) != (other.moment is None):
            raise ShapeError("states merge only if both hold a value's moment, or neither; give value to both.")
        if self.peak.shape != other.peak.shape:
            broadcast_batch((("one state", self.peak.shape), ("the other", other.peak.shape)))
        peak = torch.maximum(self.peak, other.peak).detach()
        a, b = self._seen_from(peak), other._seen_from(peak)
        moment = None if a.moment is None or b.moment is None else a.moment + b.moment
        mass = a.mass + b.mass
        # the spread between the two means; a state of no keys has no mean, and no mass to weigh it with
        share = a.mass * (b.mass / torch.where(peak.isneginf(), torch.ones_like(mass), mass))
        gap = a._mean(a.first) - b._mean(b.first)
        spread = a.spread + b.spread + share * gap * gap
        return State(peak, mass, a.first + b.first, spread, a.count + b.count, moment)

    def _seen_from(self, peak: Tensor) -> State:
        """The same sums relative to a higher peak."""
        unseen = self.peak.isneginf()
        # -inf - -inf would be nan: a state of no keys has nothing to shift
        step = torch.where(unseen, torch.zeros_like(peak), self.peak - peak)
        shrink = torch.where(unseen, torch.zeros_like(peak), step.exp())
        first = shrink * (self.first + step * self.mass)
        moment = None if self.moment is None else shrink[..., None] * self.moment
        return State(peak, shrink * self.mass, first, shrink * self.spread, self.count, moment)

    def empty(self) -> Tensor:
        """Rows that saw no key."""
        return self.peak.isneginf()

    def log_mass(self) -> Tensor:
        """log sum exp(s - peak), 0 on an empty row; log Z without the peak's magnitude."""
        return torch.where(self.empty(), torch.ones_like(self.mass), self.mass).log()

    def _mean(self, total: Tensor) -> Tensor:
        return total / torch.where(self.mass == 0, torch.ones_like(self.mass), self.mass)

    def log_partition(self) -> Tensor:
        """log Z = peak + log mass; -inf on an empty row."""
        return self.peak + self.log_mass()

    def entropy(self) -> Tensor:
        """H = log mass - first / mass. Centred at the peak: log Z - E[score] would lose the digits of a large score."""
        return self.log_mass() - self._mean(self.first)

    def mean_score(self) -> Tensor:
        """E[score]; 0 on an empty row."""
        return torch.where(self.empty(), torch.zeros_like(self.peak), self.peak + self._mean(self.first))

    def score_variance(self) -> Tensor:
        """Var[score] = spread / mass; 0 on an empty row."""
        return self._mean(self.spread)

    def max_score(self) -> Tensor:
        """The largest score; no gradient (`Gibbs.top(1)` has one)."""
        return self.peak.detach()

    def visible(self) -> Tensor:
        """Number of keys seen."""
        return self.count.detach()

    def expectation(self, *, consume: bool = False) -> Tensor:  # (..., Q, V)
        """E[value]; 0 on an empty row. `consume` may reuse the moment's memory, for a state that is read just once."""
        if self.moment is None:
            raise ShapeError("this state holds no value; make it with gibbs.state(value).")
        mass = torch.where(self.empty(), torch.ones_like(self.mass), self.mass)[..., None]
        if consume and not self.moment.requires_grad and has_values(self.moment):
            return self.moment.div_(mass)
        return self.moment / mass

    def sink_mass(self, sink: Tensor) -> Tensor:
        """The share of a sink, a key of score `sink` and value 0: exp(sink) / (exp(sink) + Z)."""
        return torch.sigmoid(sink - self.log_partition())

    def stats(self) -> Stats:
        """All row statistics; what they share is computed once."""
        if self.known is not None:
            return self.known
        log_mass, mean = self.log_mass(), self._mean(self.first)
        score = torch.where(self.empty(), torch.zeros_like(self.peak), self.peak + mean)
        return Stats(
            self.peak + log_mass, log_mass - mean, score, self.score_variance(), self.max_score(), self.visible()
        )


def centre(scores: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """c = score - peak and e = exp(c); a masked score gives e = 0 and a finite c, so that e * c is 0 and not nan."""
    level = torch.where(peak.isneginf(), torch.zeros_like(peak), peak)
    centred = (scores - level[..., None]).clamp(min=LOWEST)
    return centred, centred.exp()


def merge(*states: State) -> State:
    """The state of all keys together, for states of the same queries over disjoint sets of keys.

    Exact (M-GIB-9), differentiable, and the same for any order and grouping.

    >>> half = State.of(torch.zeros(1, 2))
    >>> merge(half, half).entropy()  # uniform over 4 keys: log 4
    tensor([1.3863])
    """
    return merge_all(states)


def merge_all(states: Sequence[State]) -> State:
    if not states:
        raise ShapeError("merge needs at least one state.")
    total = states[0]
    for state in states[1:]:
        total = total.merge(state)
    return total
