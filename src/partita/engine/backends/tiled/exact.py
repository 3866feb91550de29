"""Exact rows by tiles: every product of torch has one shape, whatever the request is.

torch picks the kernel of a matrix product, and with it the order of its sums, by the shape of the product. So the rows
of one batch entry that begin with the same key are cut into blocks of `ROWS`, their keys counted from that one, and
both filled up with zeros that nothing sees:

    (ROWS, D') @ (D', KEYS)      (ROWS, KEYS) @ (KEYS, V')        D', V': the next multiples of `WIDTH`

Where a row is in its block changes nothing: that a product of one shape treats its rows alike is torch's, and tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.engine.backends.tiled.grid import tile_shape
from partita.engine.backends.tiled.tile import zeros
from partita.engine.request import Request
from partita.engine.sums import SumGrads, Sums
from partita.engine.terms import TAIL, Term, window_mask

__all__ = ["backward", "count_above", "forward"]

ROWS, KEYS, WIDTH = 64, 512, 64


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of one batch entry, as a request of their own."""

    request: Request
    entry: tuple[int, ...]
    rows: slice
    origin: int  # the number of its first key

    @property
    def place(self) -> Any:
        """Its rows in a tensor of all."""
        return (*self.entry, self.rows)


def _entry(tensor: Tensor, tail: int, entry: tuple[int, ...]) -> Tensor:
    """The entry's part of a tensor; a dimension of size 1 serves all."""
    lead = tensor.shape[: tensor.dim() - tail]
    at = entry[len(entry) - len(lead) :]
    return tensor[tuple([i if n > 1 else 0 for i, n in zip(at, lead, strict=True)])]


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _filled(tensor: Tensor, *sizes: int) -> Tensor:
    """A matrix or vector with zeros up to these sizes."""
    missing = [(0, size - n) for size, n in zip(sizes, tensor.shape, strict=True)]
    return F.pad(tensor, list(itertools.chain(*reversed(missing))))


def _blocks(r: Request) -> Iterator[Block]:
    for entry in itertools.product(*[range(n) for n in r.batch]):
        terms = tuple(term.each(lambda slot, t: _entry(t, TAIL[slot], entry)) for term in r.terms)  # noqa: B023
        seen = window_mask(terms, slice(0, r.n_query), slice(0, r.n_key), r.query.device)
        shown = torch.ones(1, r.n_key, dtype=torch.bool, device=r.query.device) if seen is None else seen
        shown = shown.expand(r.n_query, r.n_key)
        origins = shown.byte().argmax(-1) if r.n_key else torch.zeros(r.n_query, dtype=torch.int64, device=shown.device)
        runs = torch.unique_consecutive(origins, return_counts=True)
        at = 0
        for origin, count in zip(*[x.tolist() for x in runs], strict=True):
            for first in range(at, at + count, ROWS):
                rows = slice(first, min(first + ROWS, at + count))
                yield Block(_request(r, entry, rows, origin, shown), entry, rows, origin)
            at += count


def _request(r: Request, entry: tuple[int, ...], rows: slice, origin: int, shown: Tensor) -> Request:
    # one hidden key at least: a target before the origin becomes it
    keys = _up(r.n_key - origin + 1, KEYS)

    def wide(tensor: Tensor, first: int, last: int, size: int) -> Tensor:
        part = _entry(tensor, 2, entry)[first:last]
        return _filled(part, size, _up(max(1, tensor.shape[-1]), WIDTH))

    scale, bias, target = _entry(r.scale, 1, entry).expand(r.n_query)[rows], None, None
    if r.bias is not None:
        bias = _entry(r.bias, 2, entry).expand(r.n_query, r.n_key)[rows, origin:]
        bias = _filled(bias, ROWS, keys)
    if r.target is not None:
        given = _entry(r.target, 1, entry)[rows]
        own = torch.where(given < origin, keys - 1, given - origin)
        own = torch.where((given < 0) | (given >= r.n_key), -1, own)
        target = _filled(own, ROWS)
    mask = _filled(shown[rows, origin:], ROWS, keys)
    return replace(
        r,
        query=wide(r.query, rows.start, rows.stop, ROWS),
        key=wide(r.key, origin, r.n_key, keys),
        value=None if r.value is None else wide(r.value, origin, r.n_key, keys),
        scale=_filled(scale, ROWS),
        bias=bias,
        target=target,
        terms=(Term(mask=mask),),
        groups=1,
        as_query=False,
    )


def forward(r: Request, run: Callable[[Request], Sums]) -> Sums:
    """The sums of every row, by `run` on one block after the other."""
    found: dict[str, Tensor] = {}
    tails = {"moment": 1, "mean": 1}
    for block in _blocks(r):
        with tile_shape(ROWS, KEYS):
            sums = run(block.request)
        n, at = block.rows.stop - block.rows.start, block.place
        for name, x in sums._asdict().items():
            if x is None:
                continue
            if name not in found:
                width = (r.value.shape[-1],) if name in tails and r.value is not None else ()
                lead = (5,) if name == "statistics" else ()
                found[name] = x.new_empty((*lead, *r.batch, r.n_query, *width))
            if name == "argmax":
                x = torch.where(x < 0, x, x + block.origin)
            if name in tails:
                found[name][at] = x[:n, : found[name].shape[-1]]
            else:
                last: Any = (..., *at)
                found[name][last] = x[..., :n]
    return Sums(**found) if found else run(r)  # type: ignore[arg-type]


def count_above(
    r: Request, level: Tensor, score_tiles: Callable[[Request], Iterable[tuple[slice, Iterable[tuple[slice, Tensor]]]]]
) -> Tensor:  # (*b, Q) int64
    """Visible keys of every row whose score is above its level: the score that `forward` gives a target."""
    total = torch.zeros((*r.batch, r.n_query), dtype=torch.int64, device=level.device)
    for block in _blocks(replace(r, value=None, target=None)):
        n, at = block.rows.stop - block.rows.start, block.place
        own = _filled(level.expand(total.shape)[at], ROWS)
        with tile_shape(ROWS, KEYS):
            for _, tiles in score_tiles(block.request):
                for _, s in tiles:
                    total[at] += (s > own[:, None]).sum(-1)[:n]
    return total


def backward(
    r: Request,
    peak: Tensor,
    g: SumGrads,
    needs: Sequence[bool],
    run: Callable[[Request, Tensor, SumGrads, Sequence[bool]], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Gradients of the operands, added block after block."""
    total = zeros(r, needs)
    rows = {
        name: t.expand((*r.batch, *t.shape[-1 - (name == "moment") :]))
        for name, t in g._asdict().items()
        if t is not None
    }
    for block in _blocks(r):
        n, at = block.rows.stop - block.rows.start, block.place
        own = {}
        for name, t in rows.items():
            part = t[at]
            own[name] = _filled(part, ROWS, *[_up(max(1, part.shape[-1]), WIDTH)] * (part.dim() - 1))
        level = _filled(peak.expand(*r.batch, r.n_query)[at], ROWS)
        with tile_shape(ROWS, KEYS):
            made = run(block.request, level, SumGrads(**own), needs)
        for name, to in total.items():
            _add(to, name, made[name], block, n)
    return total


def _add(total: Tensor, name: str, made: Tensor, block: Block, n: int) -> None:
    to = _entry(total, 1 if name == "scale" else 2, block.entry)
    if name in ("key", "value"):
        to[block.origin :] += made[: len(to) - block.origin, : to.shape[-1]]
        return
    part = made[:n]
    if name == "bias" and to.shape[-1] == 1:
        part = part.sum(-1, keepdim=True)
    elif name == "bias":
        to = to[:, block.origin :]
    part = part if name == "scale" else part[:, : to.shape[-1]]
    to[block.rows if len(to) > 1 else slice(None)] += part if len(to) > 1 else part.sum(0, keepdim=True)
