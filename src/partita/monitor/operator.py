"""The operator through which a compiled graph reports: `partita::report(ticket, tensors, sizes, numbers, site)`.

It gives nothing back and has an effect: whoever watches the call in progress looks at the tensors, with the code that
looks at an uncompiled model. The ticket, a counter that it advances, is what makes torch.compile keep it and keep its
order; what is measured stays outside the graph. Whether a step is looked at is asked when the operator runs, so that
`every=` is no new graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, library

__all__ = ["Listener", "Site", "listening", "report"]


@dataclass(eq=False)
class Site:
    """A call in a graph: what it is, and in which module, as it is named inside the module that was compiled."""

    kind: str
    path: str
    cross: bool = False
    about: Any = None  # what the graph says of itself
    call: tuple[Any, list[Any]] | None = None  # its arguments: their structure, and what is no tensor

    def __post_init__(self) -> None:
        SITES.append(self)
        self.number = len(SITES) - 1

    def arguments(self, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float]) -> Any:
        """The (args, kwargs) of the call that reported."""
        assert self.call is not None
        structure, leaves = self.call
        kinds = {Tensor: iter(tensors), int: iter(sizes), float: iter(numbers)}
        return pytree.tree_unflatten([next(kinds[x.kind]) if type(x) is _Slot else x for x in leaves], structure)


@dataclass(frozen=True)
class _Slot:
    kind: type


class Listener(Protocol):
    """Somebody who watches a call of a compiled module."""

    def reported(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...


SITES: list[Site] = []
_HERE = threading.local()
_TRACED: dict[type, Any] = {Tensor: Tensor, int: torch.SymInt, float: torch.SymFloat}  # what stands for each in a graph


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While a compiled module is called in this thread."""
    before = getattr(_HERE, "listeners", ())
    _HERE.listeners = (*before, listener) if listener not in before else before
    try:
        yield
    finally:
        _HERE.listeners = before


def report(ticket: Tensor, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put the operator into the graph that is being traced, with all tensors of the call; or run it."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    found = {kind: [x for x in leaves if isinstance(x, traced)] for kind, traced in _TRACED.items()}
    site.call = structure, [_slot(x) for x in leaves]
    tensors = [x.detach() for x in found[Tensor]]
    torch.ops.partita.report(ticket, tensors, found[int], found[float], site.number)


def _slot(leaf: Any) -> Any:
    return next((_Slot(kind) for kind, traced in _TRACED.items() if isinstance(leaf, traced)), leaf)


library.define(
    "partita::report",
    "(Tensor(a!) ticket, Tensor[] tensors, SymInt[] sizes, float[] numbers, int site) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else (),
)


@library.impl("partita::report", "CompositeExplicitAutograd")
def _(ticket: Tensor, tensors: list[Tensor], sizes: list[int], numbers: list[float], site: int) -> None:
    ticket.add_(1)
    if torch._C._current_graph_task_id() != -1:
        return  # a recomputation in the backward pass: the call was seen before
    for listener in getattr(_HERE, "listeners", ()):
        args, kwargs = SITES[site].arguments(tensors, sizes, numbers)
        listener.reported(SITES[site], args, kwargs)


@library.register_fake("partita::report")  # type: ignore[untyped-decorator]
def _(*_: Any) -> None:
    return None
