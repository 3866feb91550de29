"""Which backend serves, and why another does not.

A backend answers `why_not(request)` with None or a reason. One named by the caller that cannot serve raises with that
reason; "auto" takes the first of the list that can.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import overload

from torch import Tensor

from partita.engine import tiled
from partita.engine.backends import native as native_backend
from partita.engine.request import Request
from partita.engine.tile import Upstream
from partita.engine.tiled import Sums
from partita.errors import BackendError

__all__ = ["Backend", "backend", "backends", "choose", "current", "explain"]


@dataclass(frozen=True)
class Backend:
    name: str
    why_not: Callable[[Request], str | None]
    forward: Callable[[Request], Sums]
    backward: Callable[[Request, Tensor, Upstream, tuple[bool, ...]], dict[str, Tensor]]


def _always(request: Request) -> str | None:
    return None


def _whole(request: Request) -> tuple[int, int]:
    return max(1, request.n_query), max(1, request.n_key)


_BACKENDS = {
    entry.name: entry
    for entry in (
        Backend("native", native_backend.why_not, native_backend.forward, native_backend.backward),
        Backend("tiled", _always, tiled.forward, tiled.backward),
        Backend(
            "dense",
            _always,
            lambda request: tiled.forward(request, shape=_whole(request)),
            lambda request, peak, g, needs: tiled.backward(request, peak, g, needs, shape=_whole(request)),
        ),
    )
}
_choice: ContextVar[str | None] = ContextVar("partita_backend", default=None)


def backends() -> tuple[str, ...]:
    """The names of all backends, best first."""
    return tuple(_BACKENDS)


def _known(name: str) -> str:
    if name != "auto" and name not in _BACKENDS:
        raise BackendError(f"unknown backend {name!r}; known are auto, {', '.join(_BACKENDS)}.")
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


def explain(request: Request) -> str:
    """Which backend serves this request, and why each other does not."""
    asked = current()
    serving = choose(request, asked).name
    lines = [f"{serving} serves" + (" (asked for)" if asked != "auto" else "")]
    for name, entry in _BACKENDS.items():
        if name != serving:
            reason = entry.why_not(request)
            lines.append(f"{name}: {reason or 'could serve too, ' + _PLACE[name]}")
    return "\n".join(lines)


_PLACE = {
    "native": "but another was asked for",
    "tiled": "on any device, slower than native",
    "dense": "but holds every score at once",
}


def choose(request: Request, name: str) -> Backend:
    """The backend of that name, or the first that can serve."""
    if name != "auto":
        entry = _BACKENDS[_known(name)]
        reason = entry.why_not(request)
        if reason is not None:
            raise BackendError(f"backend {name!r} cannot serve this request: {reason}. Use backend('auto').")
        return entry
    return next(entry for entry in _BACKENDS.values() if entry.why_not(request) is None)
