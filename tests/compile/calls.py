"""Public calls as functions of their tensors, and what torch.compile makes of each.

A call of `tests.surface` draws its tensors and makes its modules as it goes. Here it runs twice: the first time what it
draws is written down and computed on uncompiled, the second time the same tensors are the inputs of a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests import surface
from tests.surface import Given

# Sizes that change are unlike any other: of two that are equal torch.compile believes that they always are.
SIZES = {**surface.SIZES, "batch": 20, "n_query": 11, "n_key": 13, "rows": 9, "classes": 10}
OTHER = {**SIZES, "batch": 24, "n_query": 15, "n_key": 17, "rows": 14, "classes": 19}
# Two ways to the same number: a few dozen terms added in another order. Half dtypes are rounded once more, at the end.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class Written(Given):
    """What a call draws, written down."""

    def __init__(self, sizes: dict[str, int]):
        super().__init__(sizes, torch.float64)
        self.tensors: list[Tensor] = []
        self.modules: list[torch.nn.Module] = []

    def real(self, *names: str | int) -> Tensor:
        self.tensors.append(super().real(*names))
        return self.tensors[-1]

    def plain(self, *names: str | int) -> Tensor:
        self.tensors.append(super().real(*names).detach())
        self.leaves.pop()
        return self.tensors[-1]

    def index(self, below: str | int, *names: str | int) -> Tensor:
        self.tensors.append(super().index(below, *names))
        return self.tensors[-1]

    def module(self, kind: Callable[..., torch.nn.Module], *args: Any, **options: Any) -> Any:
        self.modules.append(_double(kind, *args, **options))
        return self.modules[-1]


@functools.cache
def _double(kind: Callable[..., torch.nn.Module], *args: Any, **options: Any) -> torch.nn.Module:
    """One of our own: those of `tests.surface` stay as they are."""
    torch.manual_seed(5)
    return kind(*args, **options).double()


class Again(Given):
    """The same tensors and modules, handed out in the same order."""

    def __init__(self, sizes: dict[str, int], tensors: Sequence[Tensor], modules: Sequence[torch.nn.Module]):
        self.sizes, self.dtype = sizes, torch.float64
        self.tensors, self.modules = list(tensors), list(modules)

    def real(self, *names: str | int) -> Tensor:
        return self.tensors.pop(0)

    def plain(self, *names: str | int) -> Tensor:
        return self.tensors.pop(0)

    def index(self, below: str | int, *names: str | int) -> Tensor:
        return self.tensors.pop(0)

    def module(self, kind: Callable[..., torch.nn.Module], *args: Any, **options: Any) -> Any:
        return self.modules.pop(0)

    def seed(self) -> None:
        return None

    def fix_chance(self) -> None:
        return None


def with_gradients(found: Any, given: Written) -> list[Tensor]:
    """The tensors of a result, and the gradients of what is finite in them."""
    out = list(surface.tensors(found))
    loud = [x for x in out if x.requires_grad]
    leaves = [x for x in given.leaves if x.requires_grad]
    leaves += [p for m in given.modules for p in m.parameters() if p.requires_grad]
    if loud and leaves:
        total = torch.stack([torch.where(x.isfinite(), x, 0.0).sum().double() for x in loud]).sum()
        out += [g for g in torch.autograd.grad(total, leaves, allow_unused=True) if g is not None]
    return [x.detach().clone() for x in out]


def compare(call: Callable[[Given], Any], backend: str, dynamic: bool, *, chance: bool = False) -> bool:
    """Compile a call whole; its results and gradients are those of the uncompiled call, at two sizes if dynamic.

    Gives whether there were gradients to compare.
    """
    torch._dynamo.reset()
    modules: list[torch.nn.Module] = []

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=backend)
    def compiled(sizes: dict[str, int], tensors: list[Tensor]) -> Any:
        return call(Again(sizes, tensors, modules))

    for sizes in (SIZES, OTHER) if dynamic else (SIZES,):
        given = Written(sizes)
        found = call(given)
        want = with_gradients(found, given)
        modules[:] = given.modules
        with torch._dynamo.config.patch(error_on_recompile=sizes is not SIZES):  # one compilation serves all sizes
            got = with_gradients(compiled(sizes, given.tensors), given)
        assert len(got) == len(want)
        coarsest = max((TOLERANCE.get(x.dtype, 0.0) for x in surface.tensors(found) if x.requires_grad), default=0.0)
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            if not chance:
                tolerance = TOLERANCE.get(a.dtype, 0.0)
                if k >= len(list(surface.tensors(found))):  # a gradient is as coarse as the results it was taken of
                    tolerance = max(tolerance, coarsest)
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    return len(want) > len(list(surface.tensors(found)))
