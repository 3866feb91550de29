"""A request as the arguments of a torch operator: what torch.compile, torch.export, torch.func and profilers see.

    partita::reduce, reduce_backward    a pass and its gradients      in autograd
    partita::received                   sums of columns               in dispatch
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
from torch import Tensor, library

from partita.engine import backends
from partita.engine.axes import mapped_first
from partita.engine.request import Bare, Request

__all__ = ["applied", "arguments", "arguments_of", "define", "known_signature", "like_gradients", "named", "read"]

F = TypeVar("F", bound=Callable[..., Any])

_OPERANDS = "Tensor query, Tensor key, Tensor? value, Tensor scale, Tensor? bias, Tensor? target, Tensor[] support"
_FLAGS = "bool cap_bias, bool rank, bool statistics, bool variance, bool mean, bool argmax, str backend"
_REQUEST = f"{_OPERANDS}, int[] layout, float? softcap, {_FLAGS}".split(", ")


def named(request: Request, other: Request | None = None) -> str:
    """The backend that the user named, once it is known to serve; "": chosen when the pass runs."""
    if torch.compiler.is_compiling():
        return ""
    name = backends.current()
    if name != "auto":
        backends.choose(request, name, other)
    return "" if name == "auto" else name


def define(
    name: str,
    more: str,
    results: str,
    run: Callable[..., Any],
    like: Callable[..., Any],
    sides: Sequence[str] = ("",),
    *,
    vmap: bool = False,
) -> None:
    """The operator partita::name of a request for each of `sides`, and of what else it is given.

    run(*requests, backend, *more) computes it, and `like` gives a tracer results of the same shapes; `vmap`: all
    results have the batch dimensions first.
    """
    given = [f"{kind} {side}{word}" for side in sides for kind, word in (part.split(" ") for part in _REQUEST)]
    library.define(f"partita::{name}", f"({', '.join(given)}{more and ', '}{more}) -> {results}")

    def called(body: Callable[..., Any]) -> Callable[..., Any]:
        def call(*rest: Any) -> Any:
            requests = []
            for _ in sides:
                bare, tensors, backend, rest = read(rest)
                requests.append(bare.over(tensors))
            return body(*requests, backends.TABLE[backend] if backend else None, *rest)

        return call

    def mapped(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        found = getattr(torch.ops.partita, name)(*_mapped(info, in_dims, given))
        return found, 0 if isinstance(found, Tensor) else [0] * len(found)

    library.impl(f"partita::{name}", "CompositeExplicitAutograd", called(run))
    library.register_fake(f"partita::{name}", called(like))
    if vmap:
        library.register_vmap(f"partita::{name}", mapped)


def like_gradients(*given: Any) -> list[Tensor]:
    """What gives a tracer the gradients of requests: of the operands whose flags, the last argument, say so."""
    operands = [t for r in given if isinstance(r, Request) for t in r.operands().values()]
    return [t.new_empty(t.shape) for t, needed in zip(operands, given[-1], strict=True) if needed and t is not None]


def arguments(request: Request, backend: str) -> tuple[Any, ...]:
    """A request as an operator takes it."""
    return arguments_of(request.bare(), request.tensors(), backend)


def arguments_of(bare: Bare, tensors: Sequence[Tensor | None], backend: str) -> tuple[Any, ...]:
    """The same of a request in its parts."""
    b = bare
    flags = (b.softcap, b.cap_bias, b.rank, b.statistics, b.variance, b.mean, b.argmax, backend)
    return (*tensors[:6], list(tensors[6:]), list(b.layout), *flags)


def read(given: tuple[Any, ...]) -> tuple[Bare, tuple[Tensor | None, ...], str, tuple[Any, ...]]:
    """What `arguments` wrote: flags, tensors and the backend's name; and what follows them."""
    many = len(_REQUEST)
    *operands, support, layout, softcap, cap_bias, rank, statistics, variance, mean, argmax, backend = given[:many]
    bare = Bare(tuple(layout), softcap, cap_bias, 1, rank, statistics, variance, mean, argmax)
    return bare, (*operands, *support), backend, given[many:]


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


def _mapped(info: Any, in_dims: Sequence[Any], given: Sequence[Any]) -> list[Any]:
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
