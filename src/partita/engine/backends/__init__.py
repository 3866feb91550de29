"""The table of backends, and which of them serves.

A backend answers `why_not(request)` with None or a reason, and offers `forward` and `backward` of a request. It may
offer kernels for reads that need less than a pass and its backward; their definition is the ordinary pass.
One named by the caller that cannot serve raises with its reason; "auto" takes the first of the table that can and may
be taken unasked. Adding a backend is adding a folder here, and a row below.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from functools import partial
from types import TracebackType
from typing import overload

from partita.engine.backends import native, tiled, triton
from partita.engine.backends.protocol import Backend, Divergences
from partita.engine.backends.tiled import columns, pair
from partita.engine.request import Request
from partita.errors import BackendError

__all__ = ["TABLE", "Backend", "asked", "backend", "backends", "choose", "current", "explain"]

TABLE = {
    entry.name: entry
    for entry in (
        native.BACKEND,
        triton.BACKEND,
        Backend(
            "tiled",
            "on any device, slower than native",
            tiled.always,
            tiled.forward,
            tiled.backward,
            pairs=True,
        ),
        Backend(
            "dense",
            "but holds every score at once",
            tiled.always,
            partial(tiled.forward, whole=True),
            partial(tiled.backward, whole=True),
            column_sums=partial(columns.column_sums, whole=True),
            divergences=Divergences(
                partial(pair.divergence, whole=True), partial(pair.divergence_backward, whole=True)
            ),
            pairs=True,
        ),
    )
}
_choice: ContextVar[str | None] = ContextVar("partita_backend", default=None)


def backends() -> tuple[str, ...]:
    """The names of all backends, best first."""
    return tuple(TABLE)


def _known(name: str) -> str:
    if name != "auto" and name not in TABLE:
        raise BackendError(f"unknown backend {name!r}; known are auto, {', '.join(TABLE)}.")
    return name


def current() -> str:
    """The backend asked for: by `partita.backend(...)`, else by PARTITA_BACKEND, else auto."""
    chosen = _choice.get()
    return _known(os.environ.get("PARTITA_BACKEND", "auto") or "auto") if chosen is None else chosen


class _Chosen:
    """A context manager that may be entered more than once."""

    def __init__(self, name: str):
        self.name = _known(name)
        self._tokens: list[Token[str | None]] = []

    def __enter__(self) -> str:
        self._tokens.append(_choice.set(self.name))
        return self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _choice.reset(self._tokens.pop())


@overload
def backend(name: None = None) -> str: ...
@overload
def backend(name: str) -> _Chosen: ...
def backend(name: str | None = None) -> str | _Chosen:
    """Choose the backend inside a `with` block; without an argument, tell the current choice.

    >>> with backend("tiled"):
    ...     print(backend())
    tiled
    """
    return current() if name is None else _Chosen(name)


def asked() -> tuple[Backend, ...]:
    """The backend that was named, or all of them, best first."""
    name = current()
    return tuple(TABLE.values()) if name == "auto" else (TABLE[name],)


def choose(request: Request, name: str = "", other: Request | None = None) -> Backend:
    """The backend of that name ("": what is asked for now), or the first that can serve; `other` is served with it."""
    name = name or current()
    asked = (request,) if other is None else (request, other)
    if name != "auto":
        entry = TABLE[_known(name)]
        for each in asked:
            reason = entry.refuses(each)
            if reason is not None:
                raise BackendError(f"backend {name!r} cannot serve this request: {reason}. Use backend('auto').")
        return entry
    return next(e for e in TABLE.values() if all((e.refuses(each) or e.unasked(each)) is None for each in asked))


def explain(request: Request) -> str:
    """Which backend serves this request, and why each other does not."""
    asked = current()
    serving = choose(request, asked).name
    lines = [f"{serving} serves" + (" (asked for)" if asked != "auto" else "")]
    for name, entry in TABLE.items():
        if name != serving:
            reason = entry.refuses(request) or entry.unasked(request)
            lines.append(f"{name}: {reason or 'could serve too, ' + entry.place}")
    return "\n".join(lines)
