"""Two distributions over the same keys, tile by tile: both score tiles at once, nothing of n_query * n_key held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partita._checks import broadcast
from partita.engine.backends.tiled.grid import Grid, choose_tile
from partita.engine.backends.tiled.tile import Clean, Operands, add, pulled_back, scores, zeros
from partita.engine.divergences import Record, both_sides
from partita.engine.request import Request
from partita.engine.state import State, centre

__all__ = ["divergence", "divergence_backward"]


class _Half(NamedTuple):
    """One distribution's part of a tile."""

    operands: Operands
    score: Tensor  # (*b, q, k), -inf where not visible
    slope: Tensor | None


class _Sweep:
    """The tiles of two requests, visited together wherever either of them sees something."""

    def __init__(self, p: Request, q: Request, whole: bool = False):
        self.requests = (p, q)
        self.batch = broadcast(p.batch, q.batch)
        shape = choose_tile(p if p.batch == self.batch else q, whole)
        self._clean = [Clean.of(r) for r in self.requests]
        self._grid = [Grid(r, shape) for r in self.requests]
        self.rows = self._grid[0].rows

    def tiles(self, index: int) -> Iterator[tuple[slice, _Half, _Half]]:
        """Columns, and both halves, of the tiles of one row tile."""
        seen = [{cols.start: mask for cols, mask in grid.visit(index)} for grid in self._grid]
        for cols in self._grid[0].cols:
            if cols.start in seen[0] or cols.start in seen[1]:
                first, second = (self._half(side, index, cols, seen[side]) for side in (0, 1))
                yield cols, first, second

    def _half(self, side: int, index: int, cols: slice, seen: dict[int, Tensor | None]) -> _Half:
        clean, rows = self._clean[side], self.rows[index]
        x = clean.operands(rows, cols)
        if cols.start in seen:
            s, _, slope = scores(clean, x, rows, cols, seen[cols.start])
            return _Half(x, s, slope)
        shape = (*clean.request.batch, rows.stop - rows.start, cols.stop - cols.start)
        return _Half(x, x["scale"].new_full(shape, -torch.inf), None)

    def sides(
        self, record: Record, kind: str, beta: float
    ) -> Iterator[tuple[slice, slice, list[_Half], list[Tensor], tuple[Tensor, Tensor]]]:
        """Rows, columns, both halves, both log-probabilities, and what both sides add, of every tile."""
        peaks, log_masses = (record.peak, record.other_peak), record.log_masses()
        for index, at in enumerate(self.rows):
            for cols, *halves in self.tiles(index):
                a, b = (  # finite where a key is not visible, and 0 after `exp`
                    centre(half.score, peak[..., at])[0] - log_mass[..., at, None]
                    for half, peak, log_mass in zip(halves, peaks, log_masses, strict=True)
                )
                yield at, cols, halves, [a, b], both_sides(kind, beta, a, b)

    def gradient(self, side: int, half: _Half, ds: Tensor) -> Operands:
        """Gradients of one distribution's operands from those of its scores."""
        hidden = half.score.isneginf()
        return pulled_back(self._clean[side], half.operands, torch.where(hidden, torch.zeros_like(ds), ds), half.slope)


@torch.no_grad()
def divergence(p: Request, q: Request, kind: str, beta: float, *, whole: bool = False) -> Record:
    """The record of every row: one sweep for the sums of both, one for the divergence."""
    sweep = _Sweep(p, q, whole)
    rows = (*sweep.batch, p.n_query)
    peak, mass, other_peak, other_mass = _masses(sweep, rows)
    first, second = torch.zeros_like(peak), torch.zeros_like(peak)
    record = Record(peak, mass, other_peak, other_mass, first, second)
    for at, _, halves, _, (own, their) in sweep.sides(record, kind, beta):
        first[..., at] += own.sum(-1)
        second[..., at] += their.sum(-1)
        if kind != "js" and kind != "hellinger":
            seen, unseen = reversed(halves) if kind == "reverse" else halves
            outside = (~seen.score.isneginf() & unseen.score.isneginf()).any(-1)
            # nan stays nan: it tells more than an infinity
            (second if kind == "reverse" else first)[..., at] += torch.where(outside, torch.inf, 0.0)
    return record


def _masses(sweep: _Sweep, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Peak and mass of both distributions, spread over the rows of both; merged as any tiles are."""
    new = sweep.requests[0].scale
    found = [new.new_full(rows, -torch.inf), new.new_zeros(rows), new.new_full(rows, -torch.inf), new.new_zeros(rows)]
    for index, at in enumerate(sweep.rows):
        states: list[State] = []
        # merged at once: small tensors kept from every tile would fragment the heap of large ones, which would grow
        for _, *halves in sweep.tiles(index):
            tiles = [State.of(half.score) for half in halves]
            states = [a.merge(b) for a, b in zip(states, tiles, strict=True)] if states else tiles
        for side, state in enumerate(states):
            found[2 * side][..., at], found[2 * side + 1][..., at] = state.peak, state.mass
    return tuple(found)


@torch.no_grad()
def divergence_backward(
    p: Request,
    q: Request,
    kind: str,
    beta: float,
    record: Record,
    g: Tensor,  # (*b, Q): upstream of the divergences
    needs: tuple[Sequence[bool], Sequence[bool]],
    *,
    whole: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of both distributions' operands, as far as needed, in the accumulation dtype."""
    sweep = _Sweep(p, q, whole)
    total = [zeros(r, wanted) for r, wanted in zip(sweep.requests, needs, strict=True)]
    g, sums = record.kept(kind, g), (record.first, record.second)
    for at, cols, halves, logs, sides in sweep.sides(record, kind, beta):
        up = g[..., at, None]
        for side, (half, x, log_p) in enumerate(zip(halves, sides, logs, strict=True)):
            if total[side]:
                # where g is 0 the sum may be infinite
                level = torch.where(up == 0, torch.zeros_like(up), sums[side][..., at, None])
                ds = up * (x - log_p.exp() * level)
                add(total[side], sweep.gradient(side, half, ds), at, cols)
    return total[0], total[1]
