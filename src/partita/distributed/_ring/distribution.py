"""The distribution of this rank's rows over the keys of all ranks: `Gibbs` across processes.

    p(j|i) = exp( softcap(scale_i * <query_i, key_j>) + bias_ij ) / Z_i        j among the keys of every rank

A pass gives the same row sums as one machine would (`partita.engine.sums.Sums`), so that whatever reads those off a
Gibbs reads them off this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from partita.distributed._ring.autograd import run
from partita.distributed._ring.forward import Outputs
from partita.distributed._ring.group import Group
from partita.distributed._ring.tiles import Piece, RingPass
from partita.engine import State
from partita.engine.axes import align, split_heads
from partita.engine.request import Request, build, extend
from partita.engine.sums import Sums
from partita.engine.terms import Term
from partita.engine.visibility import Visibility
from partita.processes import View

__all__ = ["Ring"]


class Ring:
    """Rows of this rank over keys of all ranks.

    view: which keys of a rank's block this rank's rows see; None shows all. A support there is about the block alone.
    bias: (..., n_query or 1, all keys or 1), of this rank's rows; it does not travel.

    Whether key, value (and for `both_ways` query) need a gradient must be the same on all ranks.
    """

    def __init__(
        self,
        query: Tensor,  # (..., n_query, dim), of this rank
        key: Tensor,  # (..., n_key, dim), of this rank
        *,
        group: Group,
        sizes: Sequence[int],  # keys of every rank
        scale: float | Tensor = 1.0,
        bias: Tensor | None = None,
        view: View | None = None,
        softcap: float | None = None,
        grouped: bool = False,
        batch: Sequence[int] = (),
    ):
        self.group, self.sizes, self.view = group, tuple(sizes), view
        lead = batch if bias is None else torch.broadcast_shapes(tuple(batch), bias.shape[:-2])
        self._bias = bias
        self._rows = build(query, key, scale=scale, softcap=softcap, grouped=grouped, batch=lead)
        self._batch = tuple(torch.broadcast_shapes(_rows_of(self._rows), tuple(lead)))

    def sums(
        self,
        value: Tensor | None = None,
        target: Tensor | None = None,  # (n_query,), a key of this rank's own block
        *,
        rank: bool = False,
        statistics: bool = True,
        level: Tensor | None = None,
    ) -> Sums:
        """One pass; with a value its mean, not the moment that it comes from.

        level: how many keys score above it, for a row whose own key is not among them.
        """
        request = extend(self._rows, value=value, target=target, rank=rank, statistics=statistics)
        assert request is not None
        one = self._pass(request, level)
        bias = None if self._bias is None else self._split(self._bias)
        (out,) = run([one], self._whole(request), request.key, request.value, request.scale, bias)
        return _read(one, out)

    def both_ways(self, target: Tensor) -> tuple[Sums, Sums]:
        """Rows over keys and keys over rows, for pairs: row i and key i belong together on every rank.

        No statistics, no batch; the gradients of both directions are added up in one place.
        """
        request = extend(self._rows, target=target, statistics=False)
        assert request is not None
        assert not self._batch
        assert self.view is None
        passes = [self._pass(request, None), self._pass(replace(request, query=request.key, key=request.query), None)]
        out = run(passes, request.query, request.key, None, request.scale, self._bias)
        rows, columns = (_read(one, found) for one, found in zip(passes, out, strict=True))
        return rows, columns

    def _whole(self, request: Request) -> Tensor:
        """The query with all batch dimensions of the rows."""
        return request.query.expand(*self._lead(), *request.query.shape[-2:])

    def _pass(self, request: Request, level: Tensor | None) -> RingPass:
        quiet = replace(
            request,
            query=self._whole(request).detach(),
            scale=request.scale.detach(),
            key=request.key.detach(),
            value=None if request.value is None else request.value.detach(),
        )
        grad = torch.is_grad_enabled()
        moves = (grad and request.key.requires_grad, grad and request.value is not None and request.value.requires_grad)
        return RingPass(self.group, self.sizes, self._pieces, quiet, level, moves)

    def _lead(self) -> tuple[int, ...]:
        """The batch dimensions of the rows in canonical form."""
        groups, batch = self._rows.groups, self._batch
        return batch if groups == 1 else (*batch[:-1], batch[-1] // groups, groups)

    def _split(self, bias: Tensor) -> Tensor:
        bias = align(bias, len(self._batch), 2)
        return bias if self._rows.groups == 1 else split_heads(bias, 2, self._rows.groups)

    def _pieces(self, source: int) -> Sequence[Piece]:
        n = self.sizes[source]
        if self.view is None:
            return (Piece(slice(0, n), sum(self.sizes[:source]), self._seen((), n)),)
        found = []
        for keys, first, support in self.view(source, n):
            if isinstance(support, Visibility):
                seen = support
            else:
                size, rows = keys.stop - keys.start, self._rows
                bound = () if support is None else support.bind(rows.n_query, size, self._batch, rows.query.device)
                seen = self._seen(bound, size)
            found.append(Piece(keys, first, seen.split_heads(self._rows.groups)))
        return found

    def _seen(self, terms: Sequence[Term], n_key: int) -> Visibility:
        return Visibility.of(terms, self._rows.n_query, n_key, self._batch, self._rows.query.device)


def _read(one: RingPass, out: Outputs) -> Sums:
    """What a pass gives, with the heads in one dimension again."""
    rows = one.rows
    peak, mass, first, spread, count, mean, score, ranks = out
    if not rows.statistics:
        first = spread = torch.zeros_like(mass)
    peak = peak.to(rows.dtype)
    peak, mass, first, spread, count = (rows.ungroup(x) for x in (peak, mass, first, spread, count))
    counted = rows.rank or one.level is not None
    return Sums.of(
        State(peak, mass, first, spread, count),
        None if rows.target is None else rows.ungroup(score),
        rows.ungroup(ranks) if counted else None,
        None if rows.value is None else rows.ungroup(mean, 1),
    )


def _rows_of(request: Request) -> tuple[int, ...]:
    batch = request.batch
    return batch if request.groups == 1 else (*batch[:-2], batch[-2] * batch[-1])
