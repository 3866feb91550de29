"""The ring as one differentiable function: the rank's own rows meet the blocks of all ranks, one part after the other.

The row sums that come out are those of one machine, relative to the global peak, so that everything read off them is
plain autograd on this rank's own row vectors. First derivatives only. Beyond what comes in and what comes out, a pass
holds a few parts of a block (`partita.distributed._ring.blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partita.distributed._ring.backward import TRAVELLING, Known, backward
from partita.distributed._ring.forward import Outputs, forward
from partita.distributed._ring.tiles import RingPass
from partita.engine.sums import OPERANDS
from partita.precision import no_autocast

__all__ = ["run"]

_OUTPUTS, _KNOWN = len(Outputs._fields), len(Known._fields)  # of a pass
_TURNED = {"query": "key", "key": "query"}


def run(
    passes: Sequence[RingPass], query: Tensor, key: Tensor, value: Tensor | None, scale: Tensor, bias: Tensor | None
) -> list[Outputs]:
    """The outputs of each pass.

    Two passes are both directions of one matrix, without value: in the second, rows and keys change places. As one
    function they add their gradients up in one place, where two would hold them twice.
    """
    out = _Ring.apply(tuple(passes), query, key, value, scale, bias)  # type: ignore[no-untyped-call]
    return [Outputs(*out[_OUTPUTS * i : _OUTPUTS * (i + 1)]) for i in range(len(passes))]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        passes: tuple[RingPass, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        scale: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        saved: list[Tensor] = []
        constant: list[Tensor] = []
        for turned, one in enumerate(passes):
            rows, own = (key, query) if turned else (query, key)
            with no_autocast(query):
                out = forward(one.of(rows, scale, bias), [own] if value is None else [own, value])
            results += out
            saved += Known.of(out)
            constant += [out.peak, out.visible, out.rank]
        ctx.passes = passes
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, scale, bias, *saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given, saved = ctx.saved_tensors[: len(OPERANDS)], ctx.saved_tensors[len(OPERANDS) :]
        query, key, value, scale, bias = given
        needs, dtype = dict(zip(OPERANDS, ctx.needs_input_grad[1:], strict=True)), ctx.passes[0].rows.dtype
        wanted = {name for name, need in needs.items() if need}
        for turned, one in enumerate(ctx.passes):
            wanted |= {"query" if turned else name for name, moves in zip(TRAVELLING, one.moves, strict=True) if moves}
        total = {
            name: torch.zeros(x.shape, dtype=dtype, device=x.device)
            for name, x in zip(OPERANDS, given, strict=True)
            if x is not None and name in wanted
        }
        for turned, one in enumerate(ctx.passes):
            rows, own = (key, query) if turned else (query, key)
            known = Known(*saved[_KNOWN * turned : _KNOWN * (turned + 1)])
            asked = grads[_OUTPUTS * turned : _OUTPUTS * (turned + 1)]
            into = {_TURNED.get(name, name): grad for name, grad in total.items()} if turned else total
            with no_autocast(key):
                backward(one.of(rows, scale, bias), [own] if value is None else [own, value], known, asked, into)
        return None, *(
            total[name].to(x.dtype) if needs[name] and name in total else None
            for name, x in zip(OPERANDS, given, strict=True)
        )
