"""One pass over the keys of all ranks: the rank's own rows meet one block of keys after the other.

    forward    W - 1 hops of the key (and value) blocks, states merged as they come
    backward   the blocks go round once more, and with each goes the gradient collected for it so far: one hop more, so
               that it comes home. Scores are recomputed; no rank ever holds all keys.

The row sums that come out are those of one machine, relative to the global peak, so that everything read off them is
plain autograd on this rank's own row vectors. First derivatives only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from partita._terms import Term
from partita.distributed.count import count_above
from partita.distributed.team import Team
from partita.distributed.travel import GRADIENTS, KEYS, Block, pass_on, wait
from partita.engine import Request, State, registry
from partita.engine.tile import Upstream

__all__ = ["Job", "Piece", "run"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Some keys of a block that lie side by side in the whole, and which of them this rank's rows see."""

    keys: slice  # within the block
    first: int  # where they begin in the whole
    terms: tuple[Term, ...]  # () shows every key


@dataclass(frozen=True, eq=False)
class Job:
    """What does not need a gradient: who takes part, which rows see what, and what is asked for."""

    team: Team
    sizes: tuple[int, ...]  # keys of every rank
    pieces: Callable[[int], Sequence[Piece]]  # of the block of a rank; () if no row sees any of it
    rows: Request  # this rank's rows: what every block's request is made from; its tensors carry no graph
    level: Tensor | None = None  # count keys whose score lies above; needs no target
    moves: tuple[bool, bool] = (True, True)  # whether anybody wants the gradient of key, value

    def of(self, query: Tensor, scale: Tensor) -> Job:
        """The same for these rows."""
        return replace(self, rows=replace(self.rows, query=query, scale=scale))

    def request(self, piece: Piece, tensors: Sequence[Tensor], bias: Tensor | None, target: Tensor | None) -> Request:
        """This rank's rows against a piece of a block."""
        key, *value = (t[..., piece.keys, :] for t in tensors)
        if bias is not None and bias.shape[-1] != 1:
            bias = bias[..., piece.first : piece.first + key.shape[-2]]
        known = replace(self.rows, key=key, value=value[0] if value else None, bias=bias, terms=piece.terms)
        return replace(known, target=target, rank=target is not None and self.rows.rank)


def run(job: Job, query: Tensor, key: Tensor, value: Tensor | None, scale: Tensor, bias: Tensor | None) -> Any:
    """Peak, mass, first, spread, count, moment, target score, rank; an absent one is empty."""
    return _Ring.apply(job, query, key, value, scale, bias)  # type: ignore[no-untyped-call]


def _plainly(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, job: Job, query: Tensor, key: Tensor, value: Tensor | None, scale: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows = job.rows
        with _plainly(query):
            total, score, rank = _forward(job.of(query, scale), [key] if value is None else [key, value], bias)
        absent = total.mass.new_empty(0)
        out = (
            total.peak,
            total.mass,
            total.first if rows.statistics else absent.clone(),
            total.spread if rows.statistics else absent.clone(),
            total.count,
            absent.clone() if total.moment is None else total.moment,
            absent.clone() if score is None else score,
            absent.clone().long() if rank is None else rank,
        )
        ctx.job = job
        ctx.mark_non_differentiable(out[0], out[4], out[7])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, scale, bias, *out[:3])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, peak, total, linear = ctx.saved_tensors
        query, key, value, scale, bias = given
        job = ctx.job.of(query, scale)
        g = _upstream(job.rows, grads, total, linear, value)
        needs = tuple(ctx.needs_input_grad[1:])
        with _plainly(key):
            found = _backward(job, key, value, bias, peak, g, needs)
        return None, *(
            None if not need or x is None else found[name].to(x.dtype)
            for name, need, x in zip(_OPERANDS, needs, given, strict=True)
        )


_OPERANDS = ("query", "key", "value", "scale", "bias")
_TRAVEL = ("key", "value")


# ---- forward --------------------------------------------------------------------------------------------------------


def _forward(job: Job, own: Sequence[Tensor], bias: Tensor | None) -> tuple[State, Tensor | None, Tensor | None]:
    team, rows = job.team, job.rows
    shape = (*rows.batch, rows.n_query)
    new = rows.scale
    moment = None if len(own) == 1 else new.new_zeros(*shape, own[1].shape[-1])
    mass, first, spread, count = (new.new_zeros(shape) for _ in range(4))
    total = State(new.new_full(shape, -torch.inf, dtype=torch.float64), mass, first, spread, count, moment)
    score = None if rows.target is None else new.new_full(shape, -torch.inf)
    counts = rows.rank or job.level is not None
    rank = torch.zeros(shape, dtype=torch.int64, device=new.device) if counts else None

    form, here = Block.of(own), _message(own)
    for step in range(team.size):
        source = (team.rank - step) % team.size
        arriving, moves = here, []
        if step < team.size - 1:
            arriving = form.empty(job.sizes[(source - 1) % team.size], here)
            moves = pass_on(team, here, arriving, KEYS)
        total, score, rank = _block_forward(job, step, form.unpack(here, job.sizes[source]), bias, total, score, rank)
        wait(moves)
        here = arriving
    return total, score, rank


def _block_forward(
    job: Job,
    step: int,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    total: State,
    score: Tensor | None,
    rank: Tensor | None,
) -> tuple[State, Tensor | None, Tensor | None]:
    """The sums with those of one block; targets are in the first, the rank's own."""
    rows, source = job.rows, (job.team.rank - step) % job.team.size
    for piece in job.pieces(source) if rows.n_query else ():
        request = job.request(piece, tensors, bias, rows.target if step == 0 else None)
        if not request.n_key:
            continue
        part = registry.choose(request, registry.current()).forward(request)
        total = _join(total, part.state)
        if part.target_score is not None:
            score, rank = part.target_score, part.rank if rank is not None else None
        elif rank is not None:
            level = score if job.level is None else job.level
            assert level is not None
            rank = rank + count_above(request, level)
    return total, score, rank


def _message(own: Sequence[Tensor]) -> Tensor:
    """The own block as a message."""
    return Block.of(own).pack(own, own[0].dtype)


def _join(a: State, b: State) -> State:
    """Two states, with the peak kept in float64 and every sum in its own dtype."""
    dtype = a.mass.dtype
    level = b.peak.double()
    peak = torch.maximum(a.peak, level)

    def seen(state: State, top: Tensor) -> State:
        unseen = top.isneginf()
        step = torch.where(unseen, torch.zeros_like(peak), top - peak)
        shrink = torch.where(unseen, torch.zeros_like(peak), step.exp()).to(dtype)
        first = shrink * (state.first + step.to(dtype) * state.mass)
        moment = None if state.moment is None else state.moment * shrink[..., None]
        return State(peak, shrink * state.mass, first, shrink * state.spread, state.count, moment)

    a, b = seen(a, a.peak), seen(b, level)
    moment = None if a.moment is None or b.moment is None else a.moment.add_(b.moment)
    mass = a.mass + b.mass
    share = a.mass * (b.mass / torch.where(mass == 0, torch.ones_like(mass), mass))
    gap = a._mean(a.first) - b._mean(b.first)
    return State(peak, mass, a.first + b.first, a.spread + b.spread + share * gap * gap, a.count + b.count, moment)


# ---- backward -------------------------------------------------------------------------------------------------------


def _upstream(
    rows: Request, grads: Sequence[Tensor | None], total: Tensor, linear: Tensor, value: Tensor | None
) -> Upstream:
    """Gradients of the raw sums, zeros for those nobody asked for: every rank takes part, asked or not."""
    _, mass, first, spread, _, moment, target, _ = grads
    zero = torch.zeros_like(total)
    mass, first, second = (zero if g is None else g for g in (mass, first, spread))
    if rows.statistics:
        # spread = sum e c^2 - first^2 / mass: its gradient is that of the three raw moments
        mean = linear / torch.where(total == 0, torch.ones_like(total), total)
        mass, first = mass + mean * mean * second, first - 2 * mean * second
    else:
        first = second = zero
    if value is None:
        moment = None
    elif moment is None:
        moment = zero[..., None].expand(*zero.shape, value.shape[-1])
    if rows.target is None:
        target = None
    elif target is None:
        target = zero
    return Upstream(mass, first, second, moment, target)


def _backward(
    job: Job, key: Tensor, value: Tensor | None, bias: Tensor | None, peak: Tensor, g: Upstream, needs: tuple[bool, ...]
) -> dict[str, Tensor]:
    team, rows, sizes = job.team, job.rows, job.sizes
    own = [key] if value is None else [key, value]
    total: dict[str, Tensor] = {}
    wanted = [i for i, there in enumerate(job.moves) if there][: len(own)]  # of key, value
    form, homeward = Block.of(own), Block.of([own[i] for i in wanted])
    here = _message(own)
    sums = coming = key.new_zeros(0, dtype=rows.dtype)
    moves_back: list[dist.Work] = []
    for step in range(team.size):
        source = (team.rank - step) % team.size
        before = (source - 1) % team.size
        arriving, moves = here, []
        if step < team.size - 1:
            arriving = form.empty(sizes[before], here)
            moves = pass_on(team, here, arriving, KEYS)
        # in a function of its own: what it has made is free before the next block is worked on
        mine = _block_backward(job, step, form.unpack(here, sizes[source]), bias, peak, g, needs, total)
        wait(moves_back)
        if wanted:
            sums = homeward.pack([mine[_TRAVEL[i]] for i in wanted], rows.dtype)
            del mine
            if step:
                sums += coming
            coming = sums if team.size == 1 else homeward.empty(sizes[before], sums)
            moves_back = [] if team.size == 1 else pass_on(team, sums, coming, GRADIENTS)
        wait(moves)
        here = arriving
    wait(moves_back)
    for i, grad in zip(wanted, homeward.unpack(coming, sizes[team.rank]) if wanted else (), strict=True):
        total[_TRAVEL[i]] = grad
    for name, like in (("query", rows.query), ("scale", rows.scale), ("bias", bias)):
        if like is not None and needs[_OPERANDS.index(name)] and name not in total:
            total[name] = _zeros(like, rows.dtype)
    return total


def _block_backward(
    job: Job,
    step: int,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    peak: Tensor,
    g: Upstream,
    needs: tuple[bool, ...],
    total: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The gradient of one block that comes from this rank's rows; what belongs to the rows is added to `total`."""
    rows, source = job.rows, (job.team.rank - step) % job.team.size
    asked = (needs[0], job.moves[0], job.moves[1] and len(tensors) > 1, needs[3], needs[4])
    upstream = g if step == 0 else replace(g, target=None)
    mine: dict[str, Tensor] = {}
    for piece in job.pieces(source) if rows.n_query else ():
        request = replace(job.request(piece, tensors, bias, rows.target if step == 0 else None), rank=False)
        if not request.n_key:
            continue
        found = registry.choose(request, registry.current()).backward(request, peak, upstream, asked)
        local = {"query": rows.query, "scale": rows.scale, "bias": bias}
        for name, grad in found.items():
            like = tensors[_TRAVEL.index(name)] if name in _TRAVEL else local[name]
            assert like is not None
            _add(mine if name in _TRAVEL else total, name, grad, like, piece, rows.dtype)
    for name, like, moves in zip(_TRAVEL, tensors, job.moves, strict=False):
        if moves and name not in mine:
            mine[name] = _zeros(like, rows.dtype)
    return mine


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def _add(into: dict[str, Tensor], name: str, grad: Tensor, like: Tensor, piece: Piece, dtype: torch.dtype) -> None:
    """Add the gradient of a piece to that of its operand; the first that covers it all becomes the sum."""
    if name not in into and grad.shape == like.shape:
        into[name] = grad.to(dtype).contiguous()
        return
    whole = into[name] = into[name] if name in into else _zeros(like, dtype)
    if grad.shape == like.shape:
        whole += grad
    elif name == "bias":  # a column per key of the whole
        whole[..., piece.first : piece.first + grad.shape[-1]] += grad
    else:
        whole[..., piece.keys, :] += grad
