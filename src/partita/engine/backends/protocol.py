"""What a backend is: a pass and its gradients, and kernels it may offer besides.

No pass gives the sums of columns or the divergences of two requests: there the tiled kernels are the definition, and
serve where a backend has none of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from partita.engine.backends.tiled import columns, pair
from partita.engine.divergences import Record
from partita.engine.request import Request
from partita.engine.state import Stats
from partita.engine.sums import Sums, Upstream

__all__ = ["Backend", "BothWays", "Divergences", "Gradients", "Needs"]

Needs = Sequence[bool]  # which of query, key, value, scale, bias want a gradient
Gradients = dict[str, Tensor]  # by their names


@dataclass(frozen=True)
class BothWays:
    """Rows and columns of one product; each may give None where a result is not finite."""

    forward: Callable[[Request], tuple[Sums, Sums] | None]
    # the request, peaks and masses of rows and columns, upstream of both nlls
    backward: Callable[[Request, Sequence[Tensor], Sequence[Tensor], Needs], Gradients | None]


@dataclass(frozen=True)
class Divergences:
    """Two distributions over the same keys, by a kind and a weight beta."""

    forward: Callable[[Request, Request, str, float], Record]
    # with the record, and upstream of the rows' divergences
    backward: Callable[[Request, Request, str, float, Record, Tensor, tuple[Needs, Needs]], tuple[Gradients, Gradients]]
    # the record, and the gradients of a weighted sum of the rows, made going forward; None where it has no kernel
    weighted: (
        Callable[
            [Request, Request, str, float, Tensor, tuple[Needs, Needs]], tuple[Record, Gradients, Gradients] | None
        ]
        | None
    ) = None


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
    # sum_i weight_i exp(s_ij - peak_i) of every key: request, peak, weight, whether groups of queries share the keys
    column_sums: Callable[[Request, Tensor, Tensor, bool], Tensor] = columns.column_sums
    divergences: Divergences = Divergences(pair.divergence, pair.divergence_backward)
    # the k best scores of every row and their keys, in falling order; None where it has no kernel
    top: Callable[[Request, int], tuple[Tensor, Tensor] | None] | None = None
    # how many keys score within each edge (1-D, any order) of their row's largest; None where it has no kernel
    gaps: Callable[[Request, Tensor], Tensor | None] | None = None
    # statistics of rows added to the totals of their heads, in one walk; False where it does not serve them
    accumulate: Callable[..., bool] | None = None
    # the same of plain attention, whose rows it describes first: totals, query, key, scale, causal, rows to keep
    accumulate_attention: Callable[[Sequence[Tensor], Tensor, Tensor, float, bool, Tensor | None], bool] | None = None
    # why `weighted_nll` and `both_ways` cannot serve, where they serve more than a pass does
    why_no_loss: Callable[[Request], str | None] | None = None
    pairs: bool = False  # whether it serves scores that are functions of tiles
    # why "auto" passes by a request that it could serve if it were named
    unasked: Callable[[Request], str | None] = lambda request: None

    def refuses(self, request: Request, *, loss: bool = False) -> str | None:
        """Why it cannot serve this request, or the kernels of a loss; None if it can."""
        if request.pairs is not None and not self.pairs:
            return "its kernels take inner products, and this score is a function of its own"
        return ((self.why_no_loss if loss else None) or self.why_not)(request)
