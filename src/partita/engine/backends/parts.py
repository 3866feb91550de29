"""A pass over terms that have no key in common, as one pass over each: for a backend that takes one term at a time.

sums of the union = merge(sums of each term)        gradients of the union = sum(gradients of each, at the common peak)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from partita.engine.disjoint import apart
from partita.engine.request import Request
from partita.engine.state import State
from partita.engine.sums import Sums

__all__ = ["backward_parts", "forward_parts", "parts"]


def parts(request: Request) -> tuple[Request, ...] | None:
    """Requests for the same rows over keys that are apart; None where the support cannot be taken apart."""
    if request.rank or request.extremes:  # of keys that another part may hold
        return None
    found = apart(request.terms, request.n_query, request.n_key, request.query.device)
    if found is None:
        return None
    shown = [t for t in found if t.start is None or t.stop is None or bool((t.start < t.stop).any())]
    return tuple(replace(request, terms=(term,), mean=False, as_query=False, last=False) for term in shown or found[:1])


def forward_parts(request: Request, found: Sequence[Request], forward: Callable[[Request], Sums | None]) -> Sums | None:
    """The sums of all parts, merged; None if a part gives none."""
    total: State | None = None
    score: Tensor | None = None
    for part in found:
        sums = forward(part)
        if sums is None:
            return None
        zero = torch.zeros_like(sums.mass)
        first, spread = (zero if x is None else x for x in (sums.first, sums.spread))
        # the peak with all its digits: a backend must find it again in its backward pass
        state = State(sums.peak, sums.mass, first, spread, sums.count, sums.moment)
        total = state if total is None else total.merge(state)
        if sums.target_score is not None:  # -inf in the parts that do not show the target
            score = sums.target_score if score is None else torch.maximum(score, sums.target_score)
    assert total is not None
    return Sums.of(total, score).answering(request)


def backward_parts(
    found: Sequence[Request], backward: Callable[[Request], dict[str, Tensor] | None]
) -> dict[str, Tensor] | None:
    """The gradients of all parts, added; None if a part gives none."""
    total: dict[str, Tensor] = {}
    for part in found:
        grads = backward(part)
        if grads is None:
            return None
        total = {name: grad if name not in total else total[name] + grad for name, grad in grads.items()}
    return total
