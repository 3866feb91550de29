"""A request's pass and its gradients by kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partita.engine.backends import tiled
from partita.engine.backends.one_term import one_term
from partita.engine.backends.triton.launch import Launch, Operands, target_of
from partita.engine.backends.triton.tiles import tile
from partita.engine.request import Request
from partita.engine.sums import Sums, Upstream

__all__ = ["backward", "forward"]


def _nothing(request: Request) -> bool:
    """A size of zero: no program would run."""
    sizes = (*request.batch, request.n_query, request.n_key, request.query.shape[-1])
    return 0 in sizes or (request.value is not None and request.value.shape[-1] == 0)


def _empty_as(request: Request, shape: tuple[int, ...]) -> Tensor:
    """An empty tensor; where it can, with the query's order of dimensions in memory."""
    query, dtype = request.query, request.dtype
    if request.as_query and query.dtype == dtype and tuple(query.shape) == shape:
        return torch.empty_like(query)
    return torch.empty(shape, dtype=dtype, device=query.device)


def forward(request: Request) -> Sums:
    r = request
    if _nothing(r):
        return tiled.forward(r)
    rows, device = (*r.batch, r.n_query), r.query.device

    def empty(there: bool, *lead: int, dtype: torch.dtype = r.dtype) -> Tensor | None:
        return torch.empty((*lead, *rows), dtype=dtype, device=device) if there else None

    aimed = r.target is not None
    peak, mass, count = empty(True, dtype=torch.float64), empty(True), empty(True)
    assert peak is not None
    assert mass is not None
    assert count is not None
    first, spread, statistics = empty(r.statistics), empty(r.statistics), empty(r.statistics, 5)
    score, rank = empty(aimed), empty(aimed and r.rank, dtype=torch.int64)
    moment = None if r.value is None else _empty_as(r, (*rows, r.value.shape[-1]))
    given = Operands.of(r, one_term(r), moment)
    switches = given.switches()
    level = 2 if r.statistics else 0
    shape = tile("forward", max(switches["BLOCK_D"], switches["BLOCK_V"]), r.query.dtype, level, target_of(device))
    programs = math.ceil(r.n_query / shape.rows) * given.n_batch
    arguments = {
        **given.arguments(),
        "peak_out": peak,
        "mass_out": mass,
        "count_out": count,
        "first_out": first,
        "spread_out": spread,
        "statistics_out": statistics,
        "moment_out": moment,
        "score_out": score,
        "rank_out": rank,
        "flags": None if moment is None else torch.empty(programs, dtype=torch.int32, device=device),
        "moment_row": 0 if moment is None else moment.stride(-2),
        "moment_col": 0 if moment is None else moment.stride(-1),
        "split_keys": r.n_key,
    }
    switches |= {
        "BLOCK_M": shape.rows,
        "BLOCK_N": shape.keys,
        "LEVEL": level,
        "MEAN": r.mean,
        "TARGET": aimed,
        "RANK": rank is not None,
        "SPLIT": False,
    }
    for careful in (False, True) if moment is not None else (False,):
        Launch("forward.forward", programs, arguments, {**switches, "CAREFUL": careful}, shape).run(device)
    moment, mean = (None, moment) if r.mean else (moment, None)
    return Sums(peak, mass, count, first, spread, statistics, moment, mean, score, rank)


def backward(request: Request, peak: Tensor, g: Upstream, needs: Sequence[bool]) -> dict[str, Tensor]:
    return tiled.backward(request, peak, g, needs)
