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
    if len(request.terms) < 2 or parts(request) is not None:
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
