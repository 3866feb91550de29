"""A request as the arguments of a torch operator: what torch.compile, torch.export, torch.func and profilers see.

    partita::reduce, reduce_backward    a pass and its gradients      in autograd
    partita::received                   sums of columns               in received
    partita::divergence, ..._backward   of two requests               in divergence
    partita::top, sample, gaps          scans of the scores           in scans

An operator takes the tensors of a request and its flags, and hides the backend: a compiler sees one node, a profiler
one name. Checks of values, which a tracer cannot make, are made when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from partita.engine import backends
from partita.engine.axes import mapped_first
from partita.engine.request import Bare, Request

__all__ = [
    "FLAGS", "OPERANDS", "applied", "arguments", "arguments_of", "entry", "known_signature", "mapped", "named", "read",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

OPERANDS = "Tensor query, Tensor key, Tensor? value, Tensor scale, Tensor? bias, Tensor? target, Tensor[] support"
FLAGS = (
    "int[] layout, float? softcap, bool cap_bias, bool rank, bool statistics, bool variance, bool mean, bool argmax, "
    "str backend"
)
_MANY = 16  # arguments that make a request


def named(request: Request, other: Request | None = None) -> str:
    """The backend that the user named, once it is known to serve; "": chosen when the pass runs."""
    if torch.compiler.is_compiling():
        return ""
    name = backends.current()
    if name != "auto":
        backends.choose(request, name, other)
    return "" if name == "auto" else name


def entry(name: str) -> backends.Backend | None:
    """The backend that an operator was given."""
    return backends.TABLE[name] if name else None


def arguments(request: Request, backend: str) -> tuple[Any, ...]:
    """A request as an operator takes it."""
    return arguments_of(request.bare(), request.tensors(), backend)


def arguments_of(bare: Bare, tensors: Sequence[Tensor | None], backend: str) -> tuple[Any, ...]:
    """The same of a request in its parts."""
    b = bare
    flags = (b.softcap, b.cap_bias, b.rank, b.statistics, b.variance, b.mean, b.argmax, backend)
    return (*tensors[:6], list(tensors[6:]), list(b.layout), *flags)


def read(given: Sequence[Any]) -> tuple[Bare, tuple[Tensor | None, ...], str, Sequence[Any]]:
    """What `arguments` wrote: flags, tensors and the backend's name; and what follows them."""
    operands, support, layout, (softcap, cap_bias, *flags), backend = (
        given[:6], given[6], given[7], given[8:_MANY - 1], given[_MANY - 1]
    )  # fmt: skip
    bare = Bare(tuple(layout), softcap, cap_bias, 1, *flags)
    return bare, (*operands, *support), backend, given[_MANY:]


def applied(function: type[torch.autograd.Function], given: Sequence[Any], tensors: Sequence[Tensor | None]) -> Any:
    """function.apply(*given, *tensors), as a graph takes it too.

    There a function that needs no derivative is called without, since torch takes it for another; and every tensor is a
    view, since no function may be given one tensor twice.
    """
    run: Any = function
    if not torch.compiler.is_compiling():
        return run.apply(*given, *tensors)
    needs = torch.is_grad_enabled() and [1 for t in (*given, *tensors) if isinstance(t, Tensor) and t.requires_grad]
    views = [None if t is None else t.view_as(t) for t in tensors]
    return (run.apply if needs else run.forward)(*given, *views)


def mapped(info: Any, in_dims: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """An operator's arguments under vmap: one more batch dimension of every tensor, in front."""
    moved = list(given)
    for i, (x, dims) in enumerate(zip(given, in_dims, strict=True)):
        if isinstance(x, Tensor):
            moved[i] = mapped_first(x, dims, info.batch_size)
        elif isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor):  # of a support
            moved[i] = [mapped_first(t, d) for t, d in zip(x, dims, strict=True)]
    return moved


def known_signature(function: F) -> F:
    """For a Function with `setup_context`: torch reads the signature at every call, longer than a short pass takes.

    Written down once, it is found and not made.
    """
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function
