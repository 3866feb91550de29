"""Supports that are unions, for backends that take one term at a time.

disjoint terms    a pass over each:  sums = merge(sums of each), gradients = sum(gradients of each, at one peak)
others            written out as one mask, where that is small
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from partita._checks import broadcast
from partita.engine.request import Request
from partita.engine.state import State
from partita.engine.sums import Sums
from partita.engine.terms import Term, split_disjoint, window_mask

__all__ = ["added", "forward_each", "one_term", "split_request", "too_large"]

_LARGEST_MASK = 1 << 25  # bytes; a union of supports up to this size is written out


def split_request(request: Request) -> tuple[Request, ...] | None:
    """Requests for the same rows over keys that are disjoint; None where there is one term, or no such split."""
    if len(request.terms) < 2 or request.rank or request.argmax:  # of keys that another part may hold
        return None
    found = split_disjoint(request.terms, request.n_query, request.n_key, request.query.device)
    if found is None:
        return None
    shown = [t for t in found if t.start is None or t.stop is None or bool((t.start < t.stop).any())]
    return tuple(replace(request, terms=(term,), mean=False, as_query=False, last=False) for term in shown or found[:1])


def too_large(request: Request) -> str | None:
    """None, or why the support of this request is not made into one term."""
    if len(request.terms) < 2 or split_request(request) is not None:
        return None
    written_out = math.prod(broadcast(*(term.batch for term in request.terms))) * request.n_query * request.n_key
    if written_out > _LARGEST_MASK:
        return "the support is a large union (|): only the tiled backend serves it without writing the mask out"
    return None


def one_term(request: Request) -> Term | None:
    """The only term there is, or what several show together; None shows every key."""
    if len(request.terms) < 2:
        return request.terms[0] if request.terms else None
    whole = slice(0, request.n_query), slice(0, request.n_key)
    shown = window_mask(request.terms, *whole, request.query.device)
    return None if shown is None else Term(mask=shown).align(request.query.dim() - 2)


def forward_each(request: Request, forward: Callable[[Request], Sums | None]) -> Sums | None:
    """The sums of a request, or of its disjoint parts, merged; None if one gives none."""
    found = split_request(request)
    if found is None:
        return forward(request)
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


def added(parts: Iterable[dict[str, Tensor] | None]) -> dict[str, Tensor] | None:
    """The gradients of disjoint parts, added; None if one gives none."""
    total: dict[str, Tensor] = {}
    for grads in parts:
        if grads is None:
            return None
        total = {name: grad if name not in total else total[name] + grad for name, grad in grads.items()}
    return total
