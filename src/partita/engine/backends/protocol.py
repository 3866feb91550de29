"""What a backend is: a pass and its gradients, and kernels it may offer besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from partita.engine.request import Request
from partita.engine.state import Stats
from partita.engine.sums import Sums, Upstream

__all__ = ["Backend", "BothWays", "Gradients", "Needs"]

Needs = Sequence[bool]  # which of query, key, value, scale, bias want a gradient
Gradients = dict[str, Tensor]  # by their names


@dataclass(frozen=True)
class BothWays:
    """Rows and columns of one product; each may give None where a result is not finite."""

    forward: Callable[[Request], tuple[Sums, Sums] | None]
    # the request, peaks and masses of rows and columns, upstream of both nlls
    backward: Callable[[Request, Sequence[Tensor], Sequence[Tensor], Needs], Gradients | None]


@dataclass(frozen=True)
class Backend:
    """One way to compute a pass."""

    name: str
    place: str  # what is to be said of it where another serves
    why_not: Callable[[Request], str | None]
    forward: Callable[[Request], Sums]
    backward: Callable[[Request, Tensor, Upstream, Needs], Gradients]
    # E[value] and statistics of plain attention that nobody follows: query, key, value, scale, causal, statistics
    attention: Callable[[Tensor, Tensor, Tensor, float, bool, bool], tuple[Tensor, Stats | None] | None] | None = None
    # nll of every row, and the gradients of their weighted sum, made going forward
    weighted_nll: Callable[[Request, Tensor, Needs], tuple[Tensor, Gradients] | None] | None = None
    both_ways: BothWays | None = None
    # statistics of rows added to the totals of their heads, in one walk; False where it does not serve them
    accumulate: Callable[..., bool] | None = None
    # why `weighted_nll` and `both_ways` cannot serve, where they serve more than a pass does
    why_no_loss: Callable[[Request], str | None] | None = None
    # why "auto" passes by a request that it could serve if it were named
    unasked: Callable[[Request], str | None] = lambda request: None
