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

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from partita._checks import broadcast_batch, has_values
from partita._look import rows_text
from partita.errors import ShapeError
from partita.precision import product

__all__ = ["LOWEST", "State", "Stats", "centre", "divided", "filled", "levels", "merge", "raw_gradients"]

LOWEST = -1e5  # exp of it is 0 in every dtype, its square is finite in float32


class Stats(NamedTuple):
    """Statistics of each row's distribution, (..., n_query), in float32 or better; natural logarithms."""

    log_partition: Tensor
    entropy: Tensor
    mean_score: Tensor
    score_variance: Tensor
    max_score: Tensor
    visible: Tensor

    def __repr__(self) -> str:
        return rows_text(type(self).__name__, self._asdict())


@dataclass(frozen=True, eq=False)
class State:
    """Sums of exp(score) over the keys seen so far, stored relative to their peak."""

    peak: Tensor  # (..., Q), -inf while no key was seen
    mass: Tensor  # (..., Q)
    first: Tensor  # (..., Q)
    spread: Tensor  # (..., Q)
    count: Tensor  # (..., Q)
    moment: Tensor | None = None  # (..., Q, V)
    known: Stats | None = None  # what `stats` gives, where the pass has worked it out

    def __repr__(self) -> str:
        sums = {name: getattr(self, name) for name in ("peak", "mass", "first", "spread", "count")}
        moment = "" if self.moment is None else f"\n  moment  {tuple(self.moment.shape)}"
        return rows_text("State", sums) + moment

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
        mean = divided(first, mass)
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
        a, b = self.seen_from(peak), other.seen_from(peak)
        moment = None if a.moment is None or b.moment is None else a.moment + b.moment
        mass = a.mass + b.mass
        # The spread between the two means. They are taken before the sums shrink: of a state far below the peak, mass
        # and first underflow together, and the derivative of their ratio with them.
        gap = self.mean_from(peak) - other.mean_from(peak)
        spread = a.spread + b.spread + a.mass * divided(b.mass, mass) * gap * gap
        return State(peak, mass, a.first + b.first, spread, a.count + b.count, moment)

    def add_(self, other: State) -> None:
        """Merge another state into this one, in its memory; this peak may be kept in float64, for sums in float32."""
        total = replace(self, moment=None, known=None).merge(replace(other, moment=None, known=None))
        if self.moment is not None and other.moment is not None:
            own, more = (state._step(total.peak)[1][..., None] for state in (self, other))
            self.moment.mul_(own).addcmul_(other.moment, more)
        for name in ("peak", "mass", "first", "spread", "count"):
            getattr(self, name).copy_(getattr(total, name))

    def seen_from(self, peak: Tensor) -> State:
        """The same sums relative to a higher peak."""
        step, shrink = self._step(peak)
        first = shrink * (self.first + step * self.mass)
        moment = None if self.moment is None else shrink[..., None] * self.moment
        return State(peak, shrink * self.mass, first, shrink * self.spread, self.count, moment)

    def mean_from(self, peak: Tensor) -> Tensor:
        """E[score] - peak for a higher peak; some number where no key was seen."""
        return divided(self.first, self.mass) + self._step(peak)[0]

    def _step(self, peak: Tensor) -> tuple[Tensor, Tensor]:
        """How far the own peak lies above another, and exp of it, in the dtype of the sums."""
        unseen = self.peak.isneginf()
        # -inf - -inf would be nan: a state of no keys has nothing to shift
        step = torch.where(unseen, torch.zeros_like(peak), self.peak - peak)
        shrink = torch.where(unseen, torch.zeros_like(peak), step.exp())
        return step.to(self.mass.dtype), shrink.to(self.mass.dtype)

    def empty(self) -> Tensor:
        """Rows that saw no key."""
        return self.peak.isneginf()

    def log_mass(self) -> Tensor:
        """log sum exp(s - peak), 0 on an empty row; log Z without the peak's magnitude."""
        return filled(self.mass).log()

    def log_partition(self) -> Tensor:
        """log Z = peak + log mass; -inf on an empty row."""
        if self.known is not None:
            return self.known.log_partition
        return self.peak + self.log_mass()

    def entropy(self) -> Tensor:
        """H = log mass - first / mass. Centred at the peak: log Z - E[score] would lose the digits of a large score."""
        if self.known is not None:
            return self.known.entropy
        return self.log_mass() - divided(self.first, self.mass)

    def mean_score(self) -> Tensor:
        """E[score]; 0 on an empty row."""
        if self.known is not None:
            return self.known.mean_score
        return torch.where(self.empty(), torch.zeros_like(self.peak), self.peak + divided(self.first, self.mass))

    def score_variance(self) -> Tensor:
        """Var[score] = spread / mass; 0 on an empty row."""
        if self.known is not None:
            return self.known.score_variance
        return divided(self.spread, self.mass)

    def max_score(self) -> Tensor:
        """The largest score; no gradient (`Gibbs.top(1)` has one)."""
        return self.peak.detach()

    def visible(self) -> Tensor:
        """Number of keys seen."""
        return self.count.detach()

    def confidence(self) -> Tensor:
        """The largest probability, exp(peak - log Z) = 1 / mass; 0 on an empty row."""
        return torch.where(self.empty(), torch.zeros_like(self.mass), 1 / filled(self.mass))

    def expectation(self, *, consume: bool = False) -> Tensor:  # (..., Q, V)
        """E[value]; 0 on an empty row. `consume` may reuse the moment's memory, for a state that is read just once."""
        if self.moment is None:
            raise ShapeError("this state holds no value; make it with gibbs.state(value).")
        mass = filled(self.mass)[..., None]
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
        log_mass, mean = self.log_mass(), divided(self.first, self.mass)
        score = torch.where(self.empty(), torch.zeros_like(self.peak), self.peak + mean)
        return Stats(
            self.peak + log_mass, log_mass - mean, score, self.score_variance(), self.max_score(), self.visible()
        )


def filled(mass: Tensor) -> Tensor:
    """A mass one may divide by, or take the logarithm of: 1 on an empty row, which has none."""
    return torch.where(mass == 0, torch.ones_like(mass), mass)


def divided(total: Tensor, mass: Tensor) -> Tensor:
    """total / mass; on an empty row both are 0, and so is this."""
    return total / filled(mass)


class RawGradients(NamedTuple):
    """Gradients of the sums over keys themselves: of e, e c, e c^2 and e value; None is 0."""

    mass: Tensor  # (..., Q)
    first: Tensor | None
    second: Tensor | None
    moment: Tensor | None  # (..., Q, V)


def raw_gradients(
    mass: Tensor,
    first: Tensor | None = None,
    spread: Tensor | None = None,
    mean: Tensor | None = None,
    *,
    g_mass: Tensor | None = None,
    g_first: Tensor | None = None,
    g_spread: Tensor | None = None,
    g_mean: Tensor | None = None,
    g_log_partition: Tensor | None = None,
    g_entropy: Tensor | None = None,
    g_mean_score: Tensor | None = None,
    g_variance: Tensor | None = None,
) -> RawGradients:
    """What flows back to the raw sums from what was read off them, at constant peak; 0 on empty rows.

        spread = second - first^2 / mass        mean value = moment / mass
        log Z = peak + log mass                 H = log mass - first / mass
        E[s] = peak + first / mass              Var[s] = spread / mass

    `first` is needed for the gradients of spread, H, E[s] and Var[s], `spread` for that of Var[s], `mean` for its own.
    Differentiable in everything given.
    """
    seen = mass != 0
    inverse = torch.where(seen, 1 / filled(mass), torch.zeros_like(mass))

    def plus(total: Tensor | None, more: Tensor) -> Tensor:
        return more if total is None else total + more

    if g_log_partition is not None:
        g_mass = plus(g_mass, g_log_partition * inverse)
    if g_variance is not None:
        assert spread is not None
        g_spread = plus(g_spread, g_variance * inverse)
        g_mass = plus(g_mass, -(g_variance * inverse) * (spread * inverse))
    if g_entropy is not None or g_mean_score is not None or g_spread is not None:
        assert first is not None
        mean_c = first * inverse
        if g_entropy is not None:
            g_mass = plus(g_mass, g_entropy * inverse * (1 + mean_c))
            g_first = plus(g_first, -(g_entropy * inverse))
        if g_mean_score is not None:
            g_mass = plus(g_mass, -(g_mean_score * inverse) * mean_c)
            g_first = plus(g_first, g_mean_score * inverse)
        if g_spread is not None:
            g_mass = plus(g_mass, mean_c * mean_c * g_spread)
            g_first = plus(g_first, -2 * mean_c * g_spread)
    g_moment = None
    if g_mean is not None:
        assert mean is not None
        g_mass = plus(g_mass, -torch.linalg.vecdot(g_mean, mean) * inverse)
        g_moment = g_mean * inverse[..., None]
    # what came with the upstream gradient itself, a nan of -inf's perhaps, must not reach an empty row
    rows = (None if g is None else torch.where(seen, g, torch.zeros_like(g)) for g in (g_mass, g_first, g_spread))
    g_mass, g_first, g_second = rows
    return RawGradients(torch.zeros_like(mass) if g_mass is None else g_mass, g_first, g_second, g_moment)


def centre(scores: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """c = score - peak and e = exp(c); a masked score gives e = 0 and a finite c, so that e * c is 0 and not nan."""
    level = torch.where(peak.isneginf(), torch.zeros_like(peak), peak)
    centred = (scores - level[..., None]).clamp(min=LOWEST)
    return centred, centred.exp()


def levels(scores: Tensor) -> Tensor:  # (..., Q, K) to (..., Q)
    """log Z of explicit scores, with the bits of `State.of`, and 0 on an empty row: what makes them probabilities."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    peak = scores.detach().amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    mass = centre(scores, peak)[1].sum(-1)
    return torch.where(peak.isneginf(), torch.zeros_like(peak), peak + filled(mass).log())


def merge(*states: State) -> State:
    """The state of all keys together, for states of the same queries over disjoint sets of keys.

    Exact (M-GIB-9), differentiable, and the same for any order and grouping.

    >>> half = State.of(torch.zeros(1, 2))
    >>> merge(half, half).entropy()  # uniform over 4 keys: log 4
    tensor([1.3863])
    """
    if not states:
        raise ShapeError("merge needs at least one state.")
    total = states[0]
    for state in states[1:]:
        total = total.merge(state)
    return total
