"""What a row has learned, what it could still learn, and what to expect before training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.theory._domain import Number, above_zero, number, require
from partita.theory.information.floor import entropy_floor_of_width
from partita.theory.law import gibbs_law

__all__ = [
    "Budget",
    "entropy_penalty_gradient",
    "expected_init_entropy",
    "information_budget",
    "selectivity",
    "sharpness_of_cosine",
]


class Budget(NamedTuple):
    """Where a row's entropy stands between the least and the most it can be."""

    entropy: Tensor
    floor: Tensor
    ceiling: Tensor
    used: Tensor
    remaining: Tensor


def information_budget(gibbs: Gibbs, width: Number | None = None) -> Budget:  # fields (..., n_query)
    """Entropy of every row with its floor and ceiling, streaming.

        ceiling = log n,    used = log n - H,    remaining = H - floor(n, width)

    `width` is the length of an interval that holds the logits (cosine: 2 / temperature; see `logit_width`);
    None means unbounded logits, with floor 0. At initialisation `remaining` is the learnable information.
    Empty rows are 0 throughout. Spec: M-INF-1, M-INF-2.

    >>> from partita import Gibbs
    >>> b = information_budget(Gibbs(torch.zeros(1, 2), torch.zeros(256, 2)), width=2.0)
    >>> round(b.remaining.item(), 4)  # uniform rows of cosine scores at temperature 1 can still lose 0.4745 nats
    0.4745
    """
    n = gibbs.visible()
    entropy = gibbs.entropy()
    ceiling = n.clamp(min=1).log()
    if width is None:
        floor = torch.zeros_like(entropy)
    else:
        floor = entropy_floor_of_width(n.clamp(min=1), width).to(entropy.dtype)
    return Budget(entropy, floor, ceiling, ceiling - entropy, entropy - floor)


def expected_init_entropy(n: Number, sharpness: Number) -> Tensor:
    """Entropy to expect from independent Gaussian scores, as at initialisation.

        H = log n - sharpness^2 / 2,      sharpness = scale * (sd of the scores over a row's keys)

    Good to a few per cent of the gap while sharpness < 0.6 sqrt(2 log n); refused at sqrt(2 log n) and above, where
    the row has condensed on a few keys and gradients are dead. Spec: M-INF-3, M-SCL-12.

    >>> round(expected_init_entropy(1024, 1.0).item(), 4)  # 6.9315 - 0.5
    6.4315
    """
    n, x = number(n), number(sharpness)
    require(n >= 1, f"n counts visible keys, so n >= 1; got {n}.")
    limit = (2 * n.log()).sqrt()
    require(
        (x < limit) | (x == 0),
        f"sharpness {x} is at or beyond sqrt(2 log n) = {limit}: the row has condensed; "
        "see sharpness.condensed_entropy.",
    )
    return n.log() - x**2 / 2


def sharpness_of_cosine(dim: int, temperature: Number) -> Tensor:
    """Sharpness of cosines between random directions: they have standard deviation 1 / sqrt(dim).

        sharpness = 1 / (temperature * sqrt(dim)),     log n - H = 1 / (2 temperature^2 dim)

    Spec: M-INF-3.

    >>> round((sharpness_of_cosine(128, 0.07) ** 2 / 2).item(), 3)  # gap to log n
    0.797
    """
    t = above_zero("temperature", temperature)
    require(dim >= 1, f"dim must be at least 1; got {dim}.")
    return 1.0 / (t * number(dim).sqrt())


def entropy_penalty_gradient(
    logits: Tensor,  # (..., n_key)
    weight: Number,
    target: Number | None = None,
) -> Tensor:  # (..., n_key)
    """Gradient on the logits of an entropy term that is added to a loss, with its sign made explicit.

        -weight * H              (target None)   ->   + weight * p (log p + H)
        weight * (H - target)^2                  ->   - 2 weight (H - target) p (log p + H)

    Descending the first spreads rows for weight > 0 and sharpens them for weight < 0; adding +weight * H does the
    opposite. Spec: M-INF-5.

    >>> entropy_penalty_gradient(torch.tensor([1.0, 3.0]).log(), 1.0)  # descent raises the lighter key
    tensor([-0.2060,  0.2060])
    """
    law = gibbs_law(logits)
    log_p = torch.where(law.probs > 0, law.log_probs, 0.0)
    entropy = -(law.probs * log_p).sum(-1, keepdim=True)
    direction = law.probs * (log_p + entropy)
    if target is None:
        return number(weight).to(logits.dtype) * direction
    return -2.0 * number(weight).to(logits.dtype) * (entropy - target) * direction


def selectivity(
    entropy: Tensor,  # (...)
    visible: Tensor,  # (...)
    *,
    flat: float = 0.99,
    sharp: float = 0.01,
) -> Tensor:  # (...) int
    """Which rows choose nothing (+1), which have stopped choosing (-1), which are in between (0).

        +1 if H / log n > flat,    -1 if H / log n < sharp,    0 otherwise and for n <= 1

    Spec: M-INF-8.

    >>> selectivity(torch.tensor([1.386, 0.7, 0.001]), torch.tensor([4, 4, 4]))
    tensor([ 1,  0, -1])
    """
    n = visible.to(entropy.dtype)
    fraction = entropy / n.clamp(min=2).log()
    flags = (fraction > flat).to(torch.int64) - (fraction < sharp).to(torch.int64)
    return torch.where(n > 1, flags, 0)
