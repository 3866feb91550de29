"""A union of terms as terms that have no key in common, so that passes over them add up.

    a | b  =  a | (b & not a),        and where a is an interval of each row, not a is the two intervals around it

Sums over keys that two terms show would count them twice; sums over terms that are apart merge exactly, by the rule of
`State`. Any number of intervals can be taken apart, and one term of another kind (ids, a mask, a hole) besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from partita.engine.terms import Term
from partita.engine.terms import visible as _visible

__all__ = ["apart", "visible"]


def visible(terms: Sequence[Term], n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> Tensor:
    """Number of keys each row may see, (*batch, n_query) int64: terms that are apart add up."""
    found = apart(terms, n_query, n_key, device) if not [1 for term in terms if term.mask is not None] else None
    if not found or len(found) == 1:
        return _visible(terms, n_query, n_key, batch, device)
    return torch.stack([_visible((term,), n_query, n_key, batch, device) for term in found]).sum(0)


def apart(terms: Sequence[Term], n_query: int, n_key: int, device: torch.device) -> tuple[Term, ...] | None:
    """Terms that show the same keys, each to a row at most once; None if two of them are no plain intervals."""
    if len(terms) < 2:
        return tuple(terms)
    plain = [term for term in terms if term.is_interval]
    others = [term for term in terms if not term.is_interval]
    if len(others) > 1:
        return None
    zero = torch.zeros(n_query, dtype=torch.int32, device=device)
    end = zero + n_key
    starts = [zero if term.start is None else term.start.clamp(0, n_key).to(torch.int32) for term in plain]
    stops = [end if term.stop is None else term.stop.clamp(0, n_key).to(torch.int32) for term in plain]
    both = torch.stack(torch.broadcast_tensors(*starts, *stops), -1)  # (*b, Q, 2 * intervals)
    start, order = both[..., : len(plain)].sort(dim=-1)
    stop = both[..., len(plain) :].gather(-1, order)
    reached = torch.cummax(stop, -1).values  # where the intervals up to this one end
    before = torch.cat([torch.zeros_like(start[..., :1]), reached[..., :-1]], -1)
    found = [_interval(*ends) for ends in _columns(torch.maximum(start, before), stop)]
    if others:  # what lies before each interval, and after the last
        last = reached[..., -1]
        gaps = [*_columns(before, start), (last, end.expand_as(last))]
        found += [others[0] & _interval(*ends) for ends in gaps]
    return tuple(found)


def _columns(start: Tensor, stop: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(start.unbind(-1), stop.unbind(-1), strict=True)


def _interval(start: Tensor, stop: Tensor) -> Term:
    return Term(start=start.contiguous(), stop=stop.contiguous())
