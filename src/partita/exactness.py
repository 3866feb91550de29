"""Exact rows: the bits of a row do not depend on what is computed with it.

PARTITA_EXACT_ROWS=1 is the same as `exact_rows()` for a whole process.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType

__all__ = ["as_forward", "exact_rows", "in_exact_rows"]

# The environment is read once: every call of a microsecond looks here.
_chosen: ContextVar[bool] = ContextVar("partita_exact_rows", default=os.environ.get("PARTITA_EXACT_ROWS", "") == "1")
in_exact_rows = _chosen.get


class exact_rows:
    """Inside, the bits of a row depend on the row and the keys it sees alone, in the backward pass too.

    Not on other rows, batch entries or heads, its place among them, hidden keys before and behind its own, the number
    of threads, chunks of rows, or whether it is one query over a cache. docs/explain/same-bits.md says what it covers.

    >>> with exact_rows():
    ...     print(in_exact_rows())
    True
    """

    def __init__(self) -> None:
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(_chosen.set(True))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _chosen.reset(self._tokens.pop())


_AS_IT_IS = nullcontext()


def as_forward(exact: bool) -> AbstractContextManager[None]:
    """Exact where the forward pass was: a backward pass may run outside of the context."""
    return exact_rows() if exact else _AS_IT_IS
