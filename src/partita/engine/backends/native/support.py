"""The support of a request as the library knows it: at most one term, with segment ids in int32."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from partita.engine.backends.one_term import one_term
from partita.engine.request import Request
from partita.engine.terms import Term

__all__ = ["terms"]


def terms(request: Request) -> tuple[Term, ...]:
    """That term, or none; large ids are relabelled by their rank."""
    term = one_term(request)
    if term is None:
        return ()
    query, key = term.query_segment, term.key_segment
    if query is not None and key is not None:
        if not (_small(query) and _small(key)):
            labels = torch.unique(torch.cat([query.reshape(-1), key.reshape(-1)]))
            query, key = torch.searchsorted(labels, query), torch.searchsorted(labels, key)
        term = replace(term, query_segment=query.to(torch.int32), key_segment=key.to(torch.int32))
    return (term,)


def _small(ids: Tensor) -> bool:
    limit = torch.iinfo(torch.int32)
    return not ids.numel() or (int(ids.min()) >= limit.min and int(ids.max()) <= limit.max)
