"""Derivatives of a gradient that a kernel computed: those of a definition in torch, or an error.

torch's `once_differentiable` raises only if the upstream gradient needs one: of a penalty on gradients, whose upstream
is constant, it drops the derivative in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from partita.errors import BackendError

__all__ = ["differentiable", "gradient", "no_second"]

Tensors = Sequence["Tensor | None"]


def differentiable(
    first: Callable[..., Sequence[Tensor]],  # (g, *known, *tensors) -> gradients of the tensors that need one
    again: Callable[..., Tensor],  # (*tensors) -> the function itself, by torch
    needs: Sequence[bool],
    g: Tensor,
    known: Sequence[Tensor],  # what else `first` takes, a function of the tensors
    tensors: Tensors,
) -> Sequence[Tensor]:
    """first(g, *known, *tensors), with the derivatives that the gradient of again(*tensors) has."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return first(g, *known, *tensors)
    found: Sequence[Tensor] = _Gradient.apply(first, again, tuple(needs), len(known), g, *known, *tensors)  # type: ignore[no-untyped-call]
    return found


def gradient(function: Callable[..., Tensor], needs: Sequence[bool], g: Tensor, tensors: Tensors) -> list[Tensor]:
    """Gradients of function(*tensors) by the tensors that need one, without a graph of their own."""
    places = [i for i, needed in enumerate(needs) if needed]
    wanted = [t for i in places if (t := tensors[i]) is not None]
    if torch._C._are_functorch_transforms_active():  # which knows no leaves
        return list(_pulled(function, places, tensors, g, wanted))
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in wanted]
        given = [None if t is None else t.detach() for t in tensors]
        found = torch.autograd.grad(function(*_placed(given, places, leaves)), leaves, g, materialize_grads=True)
    return list(found)


def _pulled(
    function: Callable[..., Tensor], places: Sequence[int], tensors: Tensors, g: Tensor, wanted: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradient at these places, itself a function that torch.func transforms."""
    found: tuple[Tensor, ...] = torch.func.vjp(lambda *x: function(*_placed(tensors, places, x)), *wanted)[1](g)
    return found


def _placed(tensors: Tensors, places: Sequence[int], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    given = list(tensors)
    for i, t in zip(places, wanted, strict=True):
        given[i] = t
    return given


class _Gradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        first: Callable[..., Sequence[Tensor]], again: Any, needs: Any, known: int, g: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        return tuple(first(g, *tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.again, ctx.needs, ctx.known, g, *tensors = inputs
        ctx.save_for_backward(g, *tensors[ctx.known :])

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        g, *tensors = ctx.saved_tensors
        places = [i for i, needed in enumerate(ctx.needs) if needed]

        def first(g: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
            return _pulled(ctx.again, places, tensors, g, wanted)

        of_g, *found = torch.func.vjp(first, g, *(tensors[i] for i in places))[1](above)
        out: list[Tensor | None] = [None] * len(tensors)
        for i, x in zip(places, found, strict=True):
            out[i] = x
        return (None, None, None, None, of_g, *(None,) * ctx.known, *out)


def no_second(what: str, instead: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For `backward` of an autograd function: `what` has first derivatives alone; `instead` is the way out."""
    message = f"{what} has no second derivative; {instead}."

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                found = backward(ctx, *grads)
            sources = [x for x in (*ctx.saved_tensors, *grads) if isinstance(x, Tensor) and x.requires_grad]
            there = [i for i, x in enumerate(found) if x is not None]
            if not torch.is_grad_enabled() or not sources or not there:
                return found  # type: ignore[no-any-return]
            out = list(found)
            refused = _Refused.apply(message, len(there), *(out[i] for i in there), *sources)  # type: ignore[no-untyped-call]
            for i, x in zip(there, refused, strict=True):
                out[i] = x
            return tuple(out)

        return wrapper

    return decorated


class _Refused(torch.autograd.Function):
    """Gradients as they are, that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> NoReturn:
        raise BackendError(ctx.message)
