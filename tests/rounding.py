"""What rounding may do to a result, measured on its definition in float64.

A sum of n products in arithmetic of unit u is the exact sum of products each off by at most n u of itself. So the
definition is computed again with every operand and every score moved at random by that much, and how far its results
move is what rounding can do, cancellation and bad conditioning included: a first derivative of a peaked softmax moves
little, a scale solved at a flat entropy much. To it come the roundings of the result itself.

A derivative is added up from parts, each rounded to the dtype of its operand first: autograd adds one for every read.
Where they cancel, their sizes say what rounding does, not that of their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWS = 2  # of moved operands; the farthest a result moves in any of them counts
MARGIN = 8.0  # the largest of a few random moves against the worst that rounding does
OWN = 16  # units in the last place for the sums after the scores: exponentials, moments, a division


@dataclass
class Noise(TorchFunctionMode):
    """Moves numbers by up to `unit` of a size; a unit of 0 leaves them as they are."""

    unit: float
    seed: int = 0
    solved: float = 0.0  # how near a search comes to its target, in units
    back: float = 0.0  # unit of what flows back from each score
    copies: list[dict[str, Tensor]] = field(default_factory=list)  # the operands of each part that was named
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, x: Tensor, size: Tensor | float) -> Tensor:
        if self.unit == 0:
            return x
        return torch.where(x.isfinite(), x + self._between_ones(x) * self.unit * size, x)

    def _between_ones(self, like: Tensor) -> Tensor:
        return 2 * torch.rand(like.shape, generator=self.generator, dtype=torch.float64) - 1

    def relative(self, x: Tensor, factor: float) -> Tensor:
        return self(x, x.detach().abs() * factor)

    def flowing_back(self, s: Tensor) -> Tensor:
        """The same scores, whose gradients are rounded one by one, at every derivative anew."""
        if not self.back or not s.requires_grad:
            return s
        s = s.view_as(s)
        s.register_hook(lambda g: g * (1 + self.back * self._between_ones(g)))
        return s

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Sums over keys are kept apart from the scores: what flows back through each of them is rounded too."""
        if function is torch.Tensor.sum:
            args = (self.flowing_back(args[0]), *args[1:])
        elif function is torch.logsumexp and args[0].numel():
            x, dim = args
            peak = x.detach().amax(dim, keepdim=True)
            return peak.squeeze(dim) + self.flowing_back((x - peak).exp()).sum(dim).log()
        return function(*args, **(kwargs or {}))

    def part(self, operands: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
        """The operands for a part of the problem whose gradients, all or those of these names, are its own."""
        self.copies.append({name: operands[name].view_as(operands[name]) for name in names or operands})
        return operands | self.copies[-1]


def allowed(truth: Tensor, moved: list[Tensor], unit: float, last: float, size: float) -> float:
    """How far from the truth a result may be: sums of this unit and size, and `last` for what is rounded at the end."""
    finite = truth.isfinite()
    if not finite.any():
        return 0.0
    response = max(float((x - truth)[finite].abs().nan_to_num(0.0).max()) for x in moved)
    return MARGIN * response + OWN * unit * max(1.0, size) + last
