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
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from partita._checks import broadcast_batch, check_kind, concrete
from partita._repr import rows_text
from partita.errors import ShapeError
from partita.precision import product

__all__ = [
    "LOWEST", "State", "Stats", "SumGrads", "centre", "divided", "filled", "levels", "merge", "raw_gradients",
    "sink_share",
]  # fmt: skip

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
        scores, peak = _peaked(scores)
        centred, weight = centre(scores, peak)
        mass, first = weight.sum(-1), (weight * centred).sum(-1)
        mean = divided(first, mass)
        spread = (weight * (centred - mean[..., None]) ** 2).sum(-1)
        count = (~scores.isneginf()).sum(-1).to(scores.dtype)
        moment = None if value is None else product(weight, value.to(scores.dtype))
        return State(peak, mass, first, spread, count, moment)

    def merge(self, other: State) -> State:
        """The state of both sets of keys, which must not overlap."""
        if not isinstance(other, State):
            check_state("other", other)
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
        """How far the own peak is above another, and exp of it, in the dtype of the sums."""
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
        """The largest probability, 1 / mass, without a gradient like the peak; 0 on an empty row."""
        mass = self.mass.detach()  # its derivative is at constant peak, and would not be that of this
        return torch.where(self.empty(), torch.zeros_like(mass), 1 / filled(mass))

    def expectation(self, *, consume: bool = False) -> Tensor:  # (..., Q, V)
        """E[value]; 0 on an empty row. `consume` may reuse the moment's memory, for a state that is read just once."""
        if self.moment is None:
            raise ShapeError("this state holds no value; make it with gibbs.state(value).")
        mass = filled(self.mass)[..., None]
        if consume and not self.moment.requires_grad and concrete(self.moment):
            return self.moment.div_(mass)
        return self.moment / mass

    def sink_mass(self, sink: Tensor) -> Tensor:
        """The share of a sink, a key of score `sink` and value 0: exp(sink) / (exp(sink) + Z)."""
        return sink_share(sink, self.log_partition())

    def stats(self) -> Stats:
        """All row statistics; what they share is computed once."""
        if self.known is not None:
            return self.known
        log_mass, mean = self.log_mass(), divided(self.first, self.mass)
        score = torch.where(self.empty(), torch.zeros_like(self.peak), self.peak + mean)
        return Stats(
            self.peak + log_mass, log_mass - mean, score, self.score_variance(), self.max_score(), self.visible()
        )


def sink_share(sink: Tensor, log_partition: Tensor) -> Tensor:
    """exp(sink) / (exp(sink) + Z); 0 for a sink of -inf, on an empty row too, where it would be 0 / 0."""
    hidden = sink.isneginf() & log_partition.isneginf()
    return torch.sigmoid(sink - torch.where(hidden, torch.zeros_like(log_partition), log_partition))


def filled(mass: Tensor) -> Tensor:
    """A mass one may divide by, or take the logarithm of: 1 on an empty row, which has none."""
    return torch.where(mass == 0, torch.ones_like(mass), mass)


def divided(total: Tensor, mass: Tensor) -> Tensor:
    """total / mass; on an empty row both are 0, and so is this."""
    return total / filled(mass)


class SumGrads(NamedTuple):
    """Gradients of the raw sums over keys: of e, e c, e c^2 and e value, and of the target's score; None is 0."""

    mass: Tensor  # (..., Q)
    first: Tensor | None = None
    second: Tensor | None = None
    moment: Tensor | None = None  # (..., Q, V)
    target: Tensor | None = None

    @property
    def level(self) -> int:
        """How many moments of the score anything flows back from."""
        return 2 if self.second is not None else 1 if self.first is not None else 0

    def over(self, rows: Sequence[int]) -> SumGrads:
        """Spread over all rows."""
        row = [None if g is None else g.expand(rows) for g in (self.mass, self.first, self.second, self.target)]
        moment = None if self.moment is None else self.moment.expand(*rows, self.moment.shape[-1])
        return SumGrads(row[0], row[1], row[2], moment, row[3])  # type: ignore[arg-type]


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
    g_moment: Tensor | None = None,
    g_target: Tensor | None = None,
    g_stats: Tensor | None = None,  # (5, ..., Q): of log Z, entropy, mean, variance and maximum of the score
) -> SumGrads:
    """What flows back to the raw sums from what was read off them, at constant peak; 0 on empty rows.

        spread = second - first^2 / mass        mean value = moment / mass
        log Z = peak + log mass                 H = log mass - first / mass
        E[s] = peak + first / mass              Var[s] = spread / mass

    `first` is needed for the gradients of spread, H, E[s] and Var[s], `spread` for that of Var[s], `mean` for its own.
    Differentiable in everything given.
    """
    empty = mass == 0
    inverse = mass.masked_fill(empty, torch.inf).reciprocal()
    parts = [] if g_mass is None else [g_mass]
    if g_stats is not None:
        g_log_z, g_entropy, g_score, g_variance, _ = (g_stats * inverse).unbind()
        parts.append(g_log_z)
        if first is not None:
            mean_c = first * inverse
            parts.append(g_entropy + (g_entropy - g_score) * mean_c)
            g_first = g_score - g_entropy if g_first is None else g_first + (g_score - g_entropy)
            if spread is not None:
                parts.append(-g_variance * (spread * inverse))
                g_spread = g_variance if g_spread is None else g_spread + g_variance
    if g_spread is not None:
        assert first is not None
        mean_c = first * inverse
        parts.append(mean_c * mean_c * g_spread)
        back = -2 * mean_c * g_spread
        g_first = back if g_first is None else g_first + back
    if g_mean is not None:
        assert mean is not None
        parts.append(-torch.linalg.vecdot(g_mean, mean) * inverse)
        g_moment = g_mean * inverse[..., None]
    total = sum(parts[1:], parts[0]) if parts else torch.zeros_like(mass)
    # what came with the upstream gradient itself, a nan of -inf's perhaps, must not reach an empty row
    rows = [None if g is None else g.masked_fill(empty, 0.0) for g in (total, g_first, g_spread)]
    return SumGrads(rows[0], rows[1], rows[2], g_moment, g_target)  # type: ignore[arg-type]


def centre(scores: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """c = score - peak and e = exp(c); a masked score gives e = 0 and a finite c, so that e * c is 0 and not nan."""
    level = torch.where(peak.isneginf(), torch.zeros_like(peak), peak)
    centred = (scores - level[..., None]).clamp(min=LOWEST)
    return centred, centred.exp()


def _peaked(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in the dtype of sums, and the largest of each row."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return scores, scores.detach().amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)


def levels(scores: Tensor) -> Tensor:  # (..., Q, K) to (..., Q)
    """log Z of explicit scores, with the bits of `State.of`, and 0 on an empty row: what makes them probabilities."""
    scores, peak = _peaked(scores)
    mass = centre(scores, peak)[1].sum(-1)
    return torch.where(peak.isneginf(), torch.zeros_like(peak), peak + filled(mass).log())


def check_state(name: str, given: object) -> None:
    check_kind(name, given, State, "Make one with Gibbs(query, key).state().")


def merge(*states: State) -> State:
    """The state of all keys together, for states of the same queries over disjoint sets of keys.

    Exact (M-GIB-9), differentiable, and the same for any order and grouping.

    >>> half = State.of(torch.zeros(1, 2))
    >>> merge(half, half).entropy()  # uniform over 4 keys: log 4
    tensor([1.3863])
    """
    if not states:
        raise ShapeError("merge needs at least one state.")
    check_state("every argument of merge", states[0])
    total = states[0]
    for state in states[1:]:
        total = total.merge(state)
    return total
