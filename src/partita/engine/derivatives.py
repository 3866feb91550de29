"""Derivatives of the pass: first and second, for autograd and torch.func alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita.engine import tiled
from partita.engine.ops import OPERANDS, Plan, reduce, reduce_backward, request_of, whole_upstream
from partita.engine.state import raw_gradients

__all__ = ["Forward"]

_ROWS = 6  # peak, then the gradients of mass, first, second, moment, target: what follows the operands in `_Backward`


class Forward(torch.autograd.Function):
    """The row sums of a request; derivatives at constant peak."""

    @staticmethod
    def forward(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        query, key, value, scale, bias, target, *support = tensors
        out: tuple[Tensor, ...] = reduce(query, key, value, scale, bias, target, support, *plan.options(), plan.mean)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plan, *tensors = inputs
        ctx.plan = plan
        ctx.mark_non_differentiable(output[0], output[4], output[7])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[:3], output[5] if plan.mean else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, peak, total, linear, average = ctx.saved_tensors
        _, mass, first, spread, _, moment, target, _ = grads
        plan = ctx.plan
        none: list[Tensor | None] = [None] * (len(tensors) + 1)
        if mass is None and first is None and spread is None and moment is None and target is None:
            return tuple(none)
        first, spread = (first, spread) if plan.statistics else (None, None)
        g_mean, moment = (moment, None) if plan.mean else (None, moment)
        raw = raw_gradients(
            total, linear, None, average, g_mass=mass, g_first=first, g_spread=spread, g_mean=g_mean
        )  # fmt: skip
        mass, first, second = raw.mass, raw.first, raw.second
        moment = None if tensors[2] is None else raw.moment if plan.mean else moment
        target = None if tensors[5] is None else target
        needs = [t is not None and ctx.needs_input_grad[1 + i] for i, t in enumerate(tensors[:5])]
        asked = plan.asking(needs)
        given = (*tensors, peak, mass, first, second, moment, target)
        # a compiled graph has no second derivative, so while tracing the operator itself will do
        found = _gradients(asked, *given) if torch.compiler.is_compiling() else _Backward.apply(asked, *given)  # type: ignore[no-untyped-call]
        rest = iter(found)
        for i, needed in enumerate(needs):
            none[1 + i] = next(rest) if needed else None
        return tuple(none)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], plan: Plan, *tensors: Tensor | None) -> tuple[Any, Any]:
        moved = [_batched(t, d) for t, d in zip(tensors, in_dims[1:], strict=True)]
        out = Forward.apply(plan, *moved)  # type: ignore[no-untyped-call]
        return out, tuple(None if t.dim() == 1 and t.shape[0] == 0 else 0 for t in out)


def _batched(tensor: Tensor | None, dim: int | None, size: int | None = None) -> Tensor | None:
    """The mapped dimension first; a tensor without one broadcasts, or is spread to `size`."""
    if tensor is None:
        return None
    if dim is not None:
        return tensor.movedim(dim, 0)
    return tensor.unsqueeze(0) if size is None else tensor.unsqueeze(0).expand(size, *tensor.shape)


def _gradients(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    query, key, value, scale, bias, target, *support = tensors[:-_ROWS]
    peak, mass, first, second, moment, g_target = tensors[-_ROWS:]
    out = reduce_backward(
        query, key, value, scale, bias, target, support, peak, mass, first, second, moment, g_target,
        *plan.options(), plan.needs,
    )  # fmt: skip
    return tuple(out)


class _Backward(torch.autograd.Function):
    """Gradients of the operands that need one; itself differentiable once."""

    @staticmethod
    def forward(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _gradients(plan, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        plan = ctx.plan
        request = request_of(tensors[:-_ROWS], plan.layout, plan.softcap, plan.cap_bias, False, plan.statistics)
        peak, *given = tensors[-_ROWS:]
        g = whole_upstream(request, given)
        names = [name for name, needed in zip(OPERANDS, plan.needs, strict=True) if needed]
        dtype = request.dtype
        wanted = {name: grad.to(dtype) for name, grad in zip(names, above, strict=True)}
        operands, rows = tiled.second_order(request, peak, g, wanted)
        out: list[Tensor | None] = [None] * len(tensors)
        for i, name in enumerate(OPERANDS):
            if name in operands and tensors[i] is not None:
                out[i] = operands[name].to(tensors[i].dtype)
        for i, name in enumerate(("mass", "first", "second", "moment", "target")):
            if given[i] is not None and name in rows:
                out[len(tensors) - _ROWS + 1 + i] = rows[name].sum_to_size(given[i].shape)
        return (None, *out)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], plan: Plan, *tensors: Tensor | None) -> tuple[Any, Any]:
        size = info.batch_size
        moved = [_batched(t, d, size) for t, d in zip(tensors, in_dims[1:], strict=True)]
        out = _Backward.apply(plan, *moved)  # type: ignore[no-untyped-call]
        return out, tuple(0 for _ in out)
