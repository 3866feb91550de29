"""The table of backends, and which of them serves.

A backend that the caller named and that cannot serve raises with its reason; "auto" takes the first of the table that
can serve and does not skip the request. Adding a backend is adding a folder here, and a row below.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from functools import partial
from types import TracebackType
from typing import overload

from partita.engine.backends import native, tiled, triton
from partita.engine.backends.protocol import Backend
from partita.engine.request import Request
from partita.errors import BackendError

__all__ = ["TABLE", "Backend", "backend", "backends", "candidates", "choose", "current", "explain"]


def always(request: Request) -> str | None:
    """It serves every request."""
    return None


_IN_ONE_TILE = partial(tiled.forward, whole=True), partial(tiled.backward, whole=True)  # they hold every score at once
TABLE = {
    entry.name: entry
    for entry in (
        native.BACKEND,
        triton.BACKEND,
        Backend("tiled", always, tiled.forward, tiled.backward, pairs=True),
        Backend("dense", always, *_IN_ONE_TILE, pairs=True, whole=True),
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
    """The backend that is chosen: by `partita.backend(...)`, else by PARTITA_BACKEND, else auto."""
    chosen = _choice.get()
    if chosen is not None:
        return chosen
    name = os.environ.get("PARTITA_BACKEND", "auto") or "auto"
    return name if name == "auto" else _known(name)


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
    """Choose the backend inside a `with` block; without an argument, the current choice.

    >>> with backend("tiled"):
    ...     print(backend())
    tiled
    """
    return current() if name is None else _Chosen(name)


def candidates() -> tuple[Backend, ...]:
    """The backend that was named, or all of them, best first."""
    name = current()
    return tuple(TABLE.values()) if name == "auto" else (TABLE[name],)


def choose(request: Request, name: str = "", other: Request | None = None, *, loss: bool = False) -> Backend:
    """The backend of that name ("": the current choice), or the first that can serve; `other` is served with it.

    loss: it is its kernels of a loss that must serve.
    """
    name = name or current()
    reason: str | None = None
    for entry in TABLE.values() if name == "auto" else (TABLE[_known(name)],):
        for r in (request,) if other is None else (request, other):
            reason = entry.refuses(r, loss=loss)
            if reason is None and name == "auto" and entry.skip_in_auto is not None:
                reason = entry.skip_in_auto(r)
            if reason is not None:
                break
        else:
            return entry
    raise BackendError(f"backend {name!r} cannot serve this request: {reason}. Use backend('auto').")


def explain(request: Request) -> str:
    """Which backend serves this request, and why each other does not."""
    asked = current()
    entry = choose(request, asked)
    serving, using = entry.name, entry.instructions
    lines = [f"{serving} serves" + (" (chosen)" if asked != "auto" else "") + (f", {using(request)}" if using else "")]
    for name, entry in TABLE.items():
        if name != serving:
            reason = entry.refuses(request) or (entry.skip_in_auto and entry.skip_in_auto(request))
            lines.append(f"{name}: {reason or 'could serve too'}")
    return "\n".join(lines)
