"""One pass over the keys of all ranks: the rank's own rows meet one part of their blocks after the other.

    forward    W - 1 hops of the key (and value) blocks, states merged as they come
    backward   the blocks go round once more, and with each goes the gradient collected for it so far, until it is home.
               Scores are recomputed; no rank ever holds all keys.

The row sums that come out are those of one machine, relative to the global peak, so that everything read off them is
plain autograd on this rank's own row vectors. First derivatives only. Beyond what comes in and what comes out, a pass
holds a few parts of a block (`partita.distributed.parts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partita.distributed.count import count_above
from partita.distributed.parts import Parts, Place, places
from partita.distributed.team import Team
from partita.distributed.travel import Homeward, Visit, visits
from partita.engine import State, execute
from partita.engine.request import Request
from partita.engine.state import raw_gradients
from partita.engine.sums import Upstream
from partita.engine.visibility import Visibility

__all__ = ["Job", "Piece", "run"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Some keys of a block that lie side by side in the whole, and which of them this rank's rows see."""

    keys: slice  # within the block
    first: int  # where they begin in the whole
    seen: Visibility


@dataclass(frozen=True, eq=False)
class Job:
    """What does not need a gradient: who takes part, which rows see what, and what is asked for."""

    team: Team
    sizes: tuple[int, ...]  # keys of every rank
    pieces: Callable[[int], Sequence[Piece]]  # of the block of a rank; () if no row sees any of it
    rows: Request  # this rank's rows: what every request is made from; its tensors carry no graph
    level: Tensor | None = None  # count keys whose score lies above; needs no target
    moves: tuple[bool, bool] = (True, True)  # whether anybody wants the gradient of key, value: then it travels

    def of(self, query: Tensor, scale: Tensor, bias: Tensor | None) -> Job:
        """The same for these rows."""
        return replace(self, rows=replace(self.rows, query=query, scale=scale, bias=bias))

    def meetings(self, visit: Visit, place: Place, pieces: Sequence[Piece]) -> list[Meeting]:
        """The rows of a place against the part of a block that visits."""
        rows, found = self.rows, []
        for piece in pieces:
            low, high = max(piece.keys.start, visit.keys.start), min(piece.keys.stop, visit.keys.stop)
            if low >= high:
                continue
            seen = slice(low - piece.keys.start, high - piece.keys.start)
            terms = place.seen(piece.seen, seen)
            if terms is None:
                continue
            keys = slice(low - visit.keys.start, high - visit.keys.start)
            columns = slice(piece.first + seen.start, piece.first + seen.stop)
            key, *value = (t[..., keys, :] for t in visit.tensors)
            target = None
            if rows.target is not None and not visit.step:
                target = place.vector(rows.target)
            request = replace(
                rows,
                query=place.matrix(rows.query),
                key=key,
                value=value[0] if value else None,
                scale=place.vector(rows.scale),
                bias=None if rows.bias is None else _columns(place.matrix(rows.bias), columns),
                target=target,
                terms=terms,
                rank=target is not None and rows.rank,
            )
            found.append(Meeting(request, keys, columns, low))
        return found


@dataclass(frozen=True, eq=False)
class Meeting:
    """Some rows and some keys, as the engine takes them."""

    request: Request
    keys: slice  # within the part
    columns: slice  # in the whole
    first: int  # the key of the block it begins with


def _columns(bias: Tensor, columns: slice) -> Tensor:
    return bias if bias.shape[-1] == 1 else bias[..., columns]


def run(
    jobs: Sequence[Job], query: Tensor, key: Tensor, value: Tensor | None, scale: Tensor, bias: Tensor | None
) -> list[tuple[Tensor, ...]]:
    """Peak, mass, first, spread, count, mean value, target score, rank, of each job; an absent one is empty.

    Two jobs are both directions of one matrix, without value: in the second, rows and keys change places. As one
    function they add their gradients up in one place, where two would hold them twice.
    """
    out = _Ring.apply(tuple(jobs), query, key, value, scale, bias)  # type: ignore[no-untyped-call]
    return [out[_OUTPUTS * i : _OUTPUTS * (i + 1)] for i in range(len(jobs))]


class Known(NamedTuple):
    """What the backward pass needs of the outputs of a job."""

    peak: Tensor
    mass: Tensor
    first: Tensor
    mean: Tensor


_OPERANDS = ("query", "key", "value", "scale", "bias")
_TRAVEL = ("key", "value")
_OUTPUTS, _SAVED = 8, len(Known._fields)  # of a job
_TURNED = {"query": "key", "key": "query"}


def _plainly(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        jobs: tuple[Job, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        scale: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        saved: list[Tensor] = []
        for turned, job in enumerate(jobs):
            rows, own = (key, query) if turned else (query, key)
            with _plainly(query):
                out = _sums(job.of(rows, scale, bias), [own] if value is None else [own, value])
            results += out
            saved += [*out[:3], out[5]]
        ctx.jobs = jobs
        ctx.mark_non_differentiable(*(results[_OUTPUTS * i + k] for i in range(len(jobs)) for k in (0, 4, 7)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, scale, bias, *saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given, saved = ctx.saved_tensors[: len(_OPERANDS)], ctx.saved_tensors[len(_OPERANDS) :]
        query, key, value, scale, bias = given
        needs, dtype = dict(zip(_OPERANDS, ctx.needs_input_grad[1:], strict=True)), ctx.jobs[0].rows.dtype
        wanted = {name for name, need in needs.items() if need}
        for turned, job in enumerate(ctx.jobs):
            wanted |= {"query" if turned else name for name, moves in zip(_TRAVEL, job.moves, strict=True) if moves}
        total = {
            name: torch.zeros(x.shape, dtype=dtype, device=x.device)
            for name, x in zip(_OPERANDS, given, strict=True)
            if x is not None and name in wanted
        }
        for turned, job in enumerate(ctx.jobs):
            rows, own = (key, query) if turned else (query, key)
            asked = grads[_OUTPUTS * turned : _OUTPUTS * (turned + 1)]
            known = Known(*saved[_SAVED * turned : _SAVED * (turned + 1)])
            there = job.of(rows, scale, bias)
            into = {_TURNED.get(name, name): grad for name, grad in total.items()} if turned else total
            with _plainly(key):
                _backward(there, [own] if value is None else [own, value], known, asked, into)
        return None, *(
            total[name].to(x.dtype) if needs[name] and name in total else None
            for name, x in zip(_OPERANDS, given, strict=True)
        )


# ---- forward --------------------------------------------------------------------------------------------------------


def _sums(job: Job, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a job."""
    total, score, rank = _forward(job, own)
    absent, statistics = total.mass.new_empty(0), job.rows.statistics
    return (
        total.peak,
        total.mass,
        total.first if statistics else absent.clone(),
        total.spread if statistics else absent.clone(),
        total.count,
        absent.clone() if total.moment is None else total.expectation(consume=True),
        absent.clone() if score is None else score,
        absent.clone().long() if rank is None else rank,
    )


def _forward(job: Job, own: Sequence[Tensor]) -> tuple[State, Tensor | None, Tensor | None]:
    rows = job.rows
    shape = (*rows.batch, rows.n_query)
    new = rows.scale
    moment = None if len(own) == 1 else new.new_zeros(*shape, own[1].shape[-1])
    mass, first, spread, count = (new.new_zeros(shape) for _ in range(4))
    total = State(new.new_full(shape, -torch.inf, dtype=torch.float64), mass, first, spread, count, moment)
    score = None if rows.target is None else new.new_full(shape, -torch.inf)
    counts = rows.rank or job.level is not None
    rank = torch.zeros(shape, dtype=torch.int64, device=new.device) if counts else None

    parts = Parts.of(own, max(job.sizes))
    # the rank of a target is counted from its score: those of the own block, where all targets are, come at once
    at_home = parts if rows.target is None else parts.whole_keys()
    for visit in visits(job.team, own, job.sizes, parts, at_home):
        _visit_forward(job, parts, visit, total, score, rank)
    return total, score, rank


def _visit_forward(
    job: Job, parts: Parts, visit: Visit, total: State, score: Tensor | None, rank: Tensor | None
) -> None:
    """Add the sums of one part; targets are in the own block."""
    rows = job.rows
    pieces = job.pieces(visit.source) if rows.n_query else ()
    for place in places(rows.query, parts, visit.entries, alone=total.moment is None and rank is None):
        for meeting in job.meetings(visit, place, pieces):
            request = meeting.request
            found = execute.forward(request)
            place.state(total).add_(found.state)
            if found.target_score is not None:
                assert score is not None
                place.vector(score).copy_(found.target_score)
            if rank is None:
                continue
            if found.rank is not None:
                place.vector(rank).copy_(found.rank)
            else:
                level = score if job.level is None else job.level
                assert level is not None
                place.vector(rank).add_(count_above(request, place.vector(level)))


# ---- backward -------------------------------------------------------------------------------------------------------


def _backward(
    job: Job, own: Sequence[Tensor], known: Known, grads: Sequence[Tensor | None], total: dict[str, Tensor]
) -> None:
    """Add the gradients of a job to `total`, which holds zeros, or those of other jobs."""
    parts = Parts.of(own, max(job.sizes))
    travelling = [name for name in _TRAVEL if name in total]
    home = Homeward(job.team, [total[name] for name in travelling], job.sizes, parts)
    for visit in visits(job.team, own, job.sizes, parts, parts):
        into = dict(zip(travelling, home.begin(visit), strict=True))
        # in a function of its own: what it has made is free before the next part is worked on
        _visit_backward(job, parts, visit, known, grads, total, into)
        home.end(visit)
    home.finish()


def _visit_backward(
    job: Job,
    parts: Parts,
    visit: Visit,
    known: Known,
    grads: Sequence[Tensor | None],
    total: dict[str, Tensor],
    into: dict[str, Tensor],
) -> None:
    """Add the gradients that come from one part: its own to `into`, what belongs to the rows to `total`."""
    rows = job.rows
    asked = ("query" in total, "key" in into, "value" in into, "scale" in total, "bias" in total)
    pieces = job.pieces(visit.source) if rows.n_query and any(asked) else ()
    for place in places(rows.query, parts, visit.entries) if pieces else ():
        upstream = _upstream(job, known, grads, place)
        for meeting in job.meetings(visit, place, pieces):
            request, above = _within(meeting, upstream)
            for name, grad in execute.backward(request, place.vector(known.peak), above, asked).items():
                if name in _TRAVEL:
                    into[name][..., meeting.keys, :].add_(grad)
                elif name == "query":
                    place.matrix(total[name]).add_(grad)
                elif name == "scale":
                    place.vector(total[name]).add_(grad)
                else:
                    _columns(place.matrix(total[name]), meeting.columns).add_(grad)


def _upstream(job: Job, known: Known, grads: Sequence[Tensor | None], place: Place) -> Upstream:
    """Gradients of the raw sums of a place, zeros for those nobody asked for: every rank takes part, asked or not."""
    rows = job.rows
    at, over = place.vector, place.matrix
    _, mass, first, spread, _, mean, target, _ = grads

    def row(tensor: Tensor | None, wanted: bool = True) -> Tensor | None:
        return None if tensor is None or not wanted else at(tensor)

    total = at(known.mass)
    raw = raw_gradients(
        total,
        row(known.first, rows.statistics),
        mean=None if rows.value is None else over(known.mean),
        g_mass=row(mass),
        g_first=row(first, rows.statistics),
        g_spread=row(spread, rows.statistics),
        g_mean=None if rows.value is None or mean is None else over(mean),
    )
    zero = torch.zeros_like(total)
    moment = raw.moment
    if rows.value is not None and moment is None:
        moment = zero[..., None].expand(*zero.shape, known.mean.shape[-1])
    asked = None if rows.target is None else zero if target is None else at(target)
    return Upstream(
        raw.mass,
        zero if raw.first is None else raw.first,
        zero if raw.second is None else raw.second,
        moment,
        asked,
    )


def _within(meeting: Meeting, g: Upstream) -> tuple[Request, Upstream]:
    """Targets as keys of this meeting; those that are elsewhere pass nothing back."""
    request = replace(meeting.request, rank=False)
    if request.target is None:
        return request, replace(g, target=None)
    at = request.target - meeting.first
    here = (at >= 0) & (at < request.n_key)
    assert g.target is not None
    target = torch.where(here, g.target, torch.zeros_like(g.target))
    return replace(request, target=torch.where(here, at, torch.zeros_like(at))), replace(g, target=target)
