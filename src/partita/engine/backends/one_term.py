"""For kernels that know one term: a union that cannot be taken apart is written out as a mask, if that is small."""

from __future__ import annotations

import math

from partita._checks import broadcast
from partita.engine.backends.parts import parts
from partita.engine.request import Request
from partita.engine.terms import Term, window_mask

__all__ = ["one_term", "too_large"]

_LARGEST_MASK = 1 << 25  # bytes; a union of supports up to this size is written out


def too_large(request: Request) -> str | None:
    """None, or why the support of this request is not made into one term."""
    if len(request.terms) > 1 and parts(request) is None and _union_bytes(request) > _LARGEST_MASK:
        return "the support is a large union (|): only the tiled backend serves it without writing the mask out"
    return None


def _union_bytes(request: Request) -> int:
    """The size of the mask that says what any of the terms shows."""
    rows = [t for term in request.terms for t in (term.start, term.stop, term.query_segment, term.key_segment)]
    shapes = [t.shape[:-1] for t in rows if t is not None]
    shapes += [term.mask.shape[:-2] for term in request.terms if term.mask is not None]
    return math.prod(broadcast(*shapes)) * request.n_query * request.n_key


def one_term(request: Request) -> Term | None:
    """The only term there is, or what several show together; None shows every key."""
    if len(request.terms) < 2:
        return request.terms[0] if request.terms else None
    whole = slice(0, request.n_query), slice(0, request.n_key)
    shown = window_mask(request.terms, *whole, request.query.device)
    if shown is None:
        return None
    lead = [1] * (request.query.dim() - shown.dim())
    return Term(mask=shown.view(*lead, *shown.shape))
