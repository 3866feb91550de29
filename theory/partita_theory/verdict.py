"""Verdicts: an expectation cut into claims, each of which the rows confirm, contradict or leave open.

    a number above a bound     confirmed if its 95 % interval lies above, contradicted if below, open if it holds both
    two numbers alike          confirmed if the interval of their difference lies inside a margin, contradicted if
                               outside, else open

An expectation does not hold as soon as one of its claims is contradicted, or if none is confirmed; it holds if all are
confirmed; else it holds within those that are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from partita.errors import ValueRangeError
from partita_theory.results import Interval

__all__ = ["Claim", "Verdict", "above", "alike", "below", "fact", "settle", "weigh"]


@dataclass(frozen=True)
class Verdict:
    """What the rows say of the expected answer, and the numbers that say it."""

    answer: Literal["holds", "holds within", "does not hold"]
    evidence: str  # one or two sentences with the measured numbers
    within: str = ""  # the range, where the answer is "holds within"

    def __post_init__(self) -> None:
        if (self.answer == "holds within") != bool(self.within):
            raise ValueRangeError("a verdict states a range exactly when its answer is 'holds within'.")

    def __str__(self) -> str:
        return f"{self.answer}{' ' + self.within if self.within else ''}: {self.evidence}"


class Claim(NamedTuple):
    """One statement, in words, and what the rows say of it."""

    says: str
    state: Literal["confirmed", "open", "contradicted"]


def above(says: str, found: Interval, bound: float = 0.0) -> Claim:
    """The number is larger than the bound.

    >>> above("it grows", Interval(1.0, 0.5, 3)).state, above("it grows", Interval(0.1, 0.5, 3)).state
    ('confirmed', 'open')
    """
    if found.low > bound:
        return Claim(says, "confirmed")
    return Claim(says, "contradicted" if found.high < bound else "open")


def below(says: str, found: Interval, bound: float = 0.0) -> Claim:
    """The number is smaller than the bound."""
    return above(says, Interval(-found.mean, found.half, found.count), -bound)


def alike(says: str, difference: Interval, margin: float) -> Claim:
    """The difference is smaller than the margin, either way; not to have seen one is not enough.

    >>> alike("the same", Interval(0.0, 0.5, 3), 0.01).state
    'open'
    """
    if -margin < difference.low and difference.high < margin:
        return Claim(says, "confirmed")
    outside = difference.low > margin or difference.high < -margin
    return Claim(says, "contradicted" if outside else "open")


def fact(says: str, true: bool) -> Claim:
    """What needs no interval: a count, a bound that no row may pass."""
    return Claim(says, "confirmed" if true else "contradicted")


def weigh(claims: Sequence[Claim], evidence: str) -> Verdict:
    """The verdict, which names what is open and what is contradicted.

    >>> weigh([fact("one is one", True), fact("one is two", False)], "counted.").answer
    'does not hold'
    """
    by = {state: [c.says for c in claims if c.state == state] for state in ("confirmed", "open", "contradicted")}
    for state in ("contradicted", "open"):
        if by[state]:
            evidence += f" {state.capitalize()}: {'; '.join(by[state])}."
    if by["contradicted"] or not by["confirmed"]:
        return Verdict("does not hold", evidence)
    return settle(evidence, whole=not by["open"], within="; ".join(by["confirmed"]))


def settle(evidence: str, *, holds: bool = True, whole: bool, within: str = "") -> Verdict:
    """The verdict of conditions: does not hold unless `holds`, holds if `whole` too, else within a range, if any.

    >>> str(settle("measured.", whole=False, within="n >= 64"))
    'holds within n >= 64: measured.'
    """
    if holds and whole:
        return Verdict("holds", evidence)
    return Verdict("holds within", evidence, within) if holds and within else Verdict("does not hold", evidence)
