"""What a backend is: `why_not`, `forward`, `backward`, and a table of fast paths, all of them optional.

Whatever gives None is done by the tiled backend in its place: a result is not finite, and a nan in a masked place may
have leaked there (0 * nan), or there is no kernel for this request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from partita.engine.divergences import Record
from partita.engine.request import Request
from partita.engine.state import Stats
from partita.engine.sums import SumGrads, Sums

__all__ = ["Backend", "BothWays", "Gradients", "Needs"]

Needs = Sequence[bool]  # which of query, key, value, scale, bias want a gradient
Gradients = dict[str, Tensor]  # by their names


@dataclass(frozen=True)
class BothWays:
    """Rows and columns of one product."""

    forward: Callable[[Request], tuple[Sums, Sums] | None]
    # the request, peaks and masses of rows and columns, upstream of both nlls
    backward: Callable[[Request, Sequence[Tensor], Sequence[Tensor], Needs], Gradients | None]


@dataclass(frozen=True)
class Backend:
    """One way to compute a pass."""

    name: str
    why_not: Callable[[Request], str | None]
    forward: Callable[[Request], Sums | None]
    backward: Callable[[Request, Tensor, SumGrads, Needs], Gradients | None]
    # ---- fast paths
    # `backward`, but that gradients may come in the dtype of their operands: less memory, and no sums of them
    rounded_backward: Callable[[Request, Tensor, SumGrads, Needs], Gradients | None] | None = None
    # E[value] and statistics of plain attention without a graph: query, key, value, scale, causal, statistics
    attention: Callable[[Tensor, Tensor, Tensor, float, bool, bool], tuple[Tensor, Stats | None] | None] | None = None
    # nll of every row, and the gradients of their weighted sum, made going forward
    weighted_nll: Callable[[Request, Tensor, Needs], tuple[Tensor, Gradients] | None] | None = None
    both_ways: BothWays | None = None
    # sum_i weight_i exp(s_ij - peak_i) of every key: request, peak, weight, whether groups of queries share the keys
    column_sums: Callable[[Request, Tensor, Tensor, bool], Tensor | None] | None = None
    # of two requests by a kind and a weight beta: the record of every row, and the gradients of a weighted sum of the
    # rows, made going forward; without weights none
    divergences: (
        Callable[
            [Request, Request, str, float, Tensor | None, tuple[Needs, Needs]],
            tuple[Record, Gradients, Gradients] | None,
        ]
        | None
    ) = None
    # the k best scores of every row and their keys, in falling order
    top: Callable[[Request, int], tuple[Tensor, Tensor] | None] | None = None
    # how many keys score within each edge (1-D, any order) of their row's largest
    gaps: Callable[[Request, Tensor], Tensor | None] | None = None
    # statistics of plain attention and the score of key 0, (7, ..., Q): query, key, scale, causal
    row_statistics: Callable[[Tensor, Tensor, float, bool], Tensor | None] | None = None
    # query @ key.T into the third, all matrices of one precision; False where it has no kernel
    product: Callable[[Tensor, Tensor, Tensor], bool] | None = None
    # why `weighted_nll` and `both_ways` cannot serve, where they serve more than a pass does
    why_no_loss: Callable[[Request], str | None] | None = None
    pairs: bool = False  # whether it serves scores that are callables
    whole: bool = False  # the tiled backend works in one tile in its place
    # what of the processor serves a request, for `explain`
    instructions: Callable[[Request], str] | None = None
    # why "auto" skips a request that it serves when it is named
    skip_in_auto: Callable[[Request], str | None] | None = None

    def refuses(self, request: Request, *, loss: bool = False) -> str | None:
        """Why it cannot serve this request, or the kernels of a loss; None if it can."""
        if request.pairs is not None and not self.pairs:
            return "its kernels take inner products, and this score is a callable"
        return ((self.why_no_loss if loss else None) or self.why_not)(request)
