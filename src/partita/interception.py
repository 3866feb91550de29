"""Foreign code on partita: inside `with replace_sdpa():` torch's attention is partita's.

Every attribute of torch that partita replaces, here and in `partita.monitor`, is replaced by a `Patch`: owners are
counted, and the attribute is restored when the last one leaves, in any order and from any thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from partita.attn import attention
from partita.scale import Policy

__all__ = ["SDPA", "SOFTMAX", "Patch", "Wrapper", "named", "replace_sdpa"]

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of attention, torch's or partita's, by their names."""
    return dict(zip(_SDPA, args, strict=False)) | kwargs


@dataclass(eq=False)
class Wrapper:
    """One owner's function around a patched one: function(inner, *args, **kwargs)."""

    function: Callable[..., Any]
    everywhere: bool  # for every thread, not only the one that made it
    traced: bool  # also for code that torch.compile traces
    thread: int = field(default_factory=threading.get_ident)


class _Installed:
    """The function in the patched place, from the first owner to the last; afterwards it only calls the one found."""

    def __init__(self, found: Callable[..., Any]) -> None:
        self.found = found
        self.wrappers: tuple[Wrapper, ...] = ()  # oldest first; replaced as a whole, so that a call sees one state
        self.traced: tuple[Callable[..., Any], ...] = ()  # those for graphs: all that a graph depends on

        @functools.wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            inner = found
            if torch.compiler.is_compiling():  # no threads in a graph
                for function in self.traced:
                    inner = functools.partial(function, inner)
                return inner(*args, **kwargs)
            here = threading.get_ident()
            for own in (False, True):  # plain loops: torch.compile may trace this frame, and refuses generators
                for wrapper in self.wrappers:
                    if wrapper.thread == here if own else wrapper.everywhere and wrapper.thread != here:
                        inner = functools.partial(wrapper.function, inner)
            return inner(*args, **kwargs)

        self.call = call


class Patch:
    """An attribute of a module or class that several owners may wrap at a time.

    The newest wrapper is called first, those of the calling thread before those of others, and the function that was
    found last. A wrapper is for its own thread, or for every one. When the last is removed the attribute is what it
    was; should another library have replaced it meanwhile, its function stays and calls ours, which only passes on.

    >>> import types
    >>> place = types.SimpleNamespace(double=lambda x: 2 * x)
    >>> patch = Patch(place, "double")
    >>> one = patch.add(lambda inner, x: inner(x) + 1)
    >>> two = patch.add(lambda inner, x: -inner(x))
    >>> place.double(3)
    -7
    >>> patch.remove(one); place.double(3)
    -6
    >>> patch.remove(two); place.double(3)
    6
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self._lock = threading.RLock()
        self._installed: _Installed | None = None  # kept without owners too: a graph traced through it stays valid

    def add(self, function: Callable[..., Any], *, everywhere: bool = False, traced: bool = False) -> Wrapper:
        wrapper = Wrapper(function, everywhere, traced)
        with self._lock:
            now = self._installed
            if now is None or not now.wrappers:
                found = getattr(self.owner, self.name)
                if now is None or now.found is not found:
                    now = self._installed = _Installed(found)
                setattr(self.owner, self.name, now.call)
            now.wrappers = (*now.wrappers, wrapper)
            if traced:
                now.traced = (*now.traced, function)
        return wrapper

    def remove(self, wrapper: Wrapper) -> None:
        with self._lock:
            now = self._installed
            if now is None or wrapper not in now.wrappers:
                return
            now.wrappers = tuple(w for w in now.wrappers if w is not wrapper)
            if wrapper.traced:
                now.traced = tuple(w.function for w in now.wrappers if w.traced)
            if not now.wrappers and getattr(self.owner, self.name) is now.call:
                setattr(self.owner, self.name, now.found)

    @contextmanager
    def around(self, function: Callable[..., Any], *, traced: bool = False) -> Iterator[None]:
        """For a moment this thread's calls go through the function."""
        wrapper = self.add(function, traced=traced)
        try:
            yield
        finally:
            self.remove(wrapper)

    @property
    def installed(self) -> Callable[..., Any] | None:
        """The function in the patched place, while there are owners."""
        with self._lock:
            now = self._installed
            return now.call if now is not None and now.wrappers else None

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For a moment the attribute is what was found."""
        with self._lock:
            now = self._installed
            if now is None or getattr(self.owner, self.name) is not now.call:
                yield
                return
            setattr(self.owner, self.name, now.found)
            try:
                yield
            finally:
                setattr(self.owner, self.name, now.call)


SDPA = Patch(F, "scaled_dot_product_attention")
SOFTMAX = Patch(F, "softmax")


class replace_sdpa(ContextDecorator):
    """A context manager (or decorator) in which F.scaled_dot_product_attention is `partita.attention`.

    The name in torch.nn.functional is exchanged, for all threads (the newest block of the calling thread counts, else
    the newest of any), and put back when the last block is left, also by an exception. Code that took the function out
    of the module before (from ... import scaled_dot_product_attention) keeps torch's.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> with replace_sdpa() as block:
    ...     out = F.scaled_dot_product_attention(x, x, x)
    >>> block.calls, torch.allclose(out, F.scaled_dot_product_attention(x, x, x), atol=1e-6)
    (1, True)

    scale: a policy that replaces the scale of every call; None keeps each call's own.
    """

    def __init__(self, *, scale: Policy | None = None):
        self.scale = scale
        self.calls = 0  # how many were served
        self._wrappers: list[Wrapper] = []

    def __enter__(self) -> replace_sdpa:
        self._wrappers.append(SDPA.add(self._serve, everywhere=True, traced=True))
        return self

    def __exit__(self, *error: object) -> None:
        here = threading.get_ident()
        mine = [w for w in self._wrappers if w.thread == here] or self._wrappers  # one object in several threads
        self._wrappers.remove(mine[-1])
        SDPA.remove(mine[-1])

    def _serve(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.scale is not None:
            kwargs["scale"] = self.scale
        return attention(*args, **kwargs)
