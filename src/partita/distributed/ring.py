"""The ring: the keys of all ranks pass by every rank's rows. A part of a block arrives, is reduced, is merged.

    p(j|i) = exp( softcap(scale_i * <query_i, key_j>) + bias_ij ) / Z_i        j among the keys of every rank

    sums             the row sums of one pass, as one machine would give them: what reads a Gibbs reads these
    both_ways        rows over keys and keys over rows, for pairs
    sum_over_keys    sums over pairs that need no partition function

In the backward pass the blocks go round once more, scores are recomputed, and the gradient of a part travels with it
(`partita.distributed.blocks`); no rank ever holds all keys. The sums are relative to the global peak, so that what is
read off them is plain autograd on this rank's own row vectors. First derivatives only.

Whether key, value (and for `both_ways` query) need a gradient must be the same on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from partita.collective import ACROSS_RANKS, IN_ONE_PROCESS, Collective, PassOptions, batch_of
from partita.distributed import tree
from partita.distributed.blocks import Cut, Part, row_pieces, walk
from partita.engine import State, dispatch
from partita.engine.axes import align, cut_entries, split_heads
from partita.engine.backends import tiled
from partita.engine.request import Request, build
from partita.engine.second import no_second
from partita.engine.state import SumGrads, raw_gradients
from partita.engine.sums import OPERANDS, Sums
from partita.engine.terms import Term, Visibility
from partita.exactness import as_forward, in_exact_rows
from partita.precision import no_autocast
from partita.rows import in_row_blocks
from partita.support import Support

__all__ = ["both_ways", "count_above", "sum_over_keys", "sums"]

T = TypeVar("T")

TRAVELLING = ("key", "value")
_TURNED = {"query": "key", "key": "query"}


def sums(
    collective: Collective,
    query: Tensor,
    key: Tensor,
    scale: float | Tensor,
    options: PassOptions,
    level: Tensor | None = None,
) -> Sums:
    """`Collective.sums` for a group: with a value its mean, not the moment that it comes from.

    level: how many keys score above it, for a row whose own key is not among them.
    """
    bias, lead = options.get("bias"), tuple(options.get("batch", ()))
    if bias is not None:
        lead = torch.broadcast_shapes(lead, bias.shape[:-2])
    request = build(
        query, key, options.get("value"), options.get("target"), scale=scale, softcap=options.get("softcap"),
        grouped=options.get("grouped", False), batch=lead, rank=options.get("rank", False),
        statistics=options.get("statistics", level is None),
    )  # fmt: skip
    groups, rows = request.groups, torch.broadcast_shapes(batch_of(request), lead)
    split = rows if groups == 1 else (*rows[:-1], rows[-1] // groups, groups)
    whole = request.query.expand(*split, *request.query.shape[-2:])
    if bias is not None:
        bias = align(bias, len(rows), 2)
        bias = bias if groups == 1 else split_heads(bias, 2, groups)
    one = _Pass.of(collective, replace(request, query=whole), rows, options, level)
    return _run((one,), whole, request.key, request.value, request.scale, bias)[0]


def both_ways(
    collective: Collective, query: Tensor, key: Tensor, scale: float | Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Sums, Sums]:
    """Rows over keys and keys over rows, for pairs: row i and key i belong together on every rank. No statistics."""
    request = build(query, key, target=target, scale=scale, statistics=False)
    one = _Pass.of(collective, request)
    other = replace(one, rows=replace(one.rows, query=one.rows.key, key=one.rows.query), turned=True, known={})
    rows, columns = _run((one, other), request.query, request.key, None, request.scale, bias)
    return rows, columns


# ---- one pass as the engine sees it: rows of this rank against one part of a block after the other -----------------


class _Tile(NamedTuple):
    """Some rows and some keys, as the engine takes them."""

    request: Request
    keys: slice  # within the part
    columns: slice  # in the whole
    here: Tensor | None  # rows whose target is among these keys


@dataclass(frozen=True, eq=False)
class _Pass:
    """What does not need a gradient: who takes part, which rows see what, and what is read."""

    collective: Collective
    rows: Request  # this rank's rows: what every request is made from; its tensors carry no graph
    batch: tuple[int, ...]  # of the rows, heads in one dimension
    options: PassOptions  # which keys they see
    level: Tensor | None  # count keys whose score is above; needs no target
    moves: tuple[bool, bool]  # whether key and value travel with their gradients
    leaves: bool  # in exact rows, of a sequence: whatever is summed over keys is summed along the tree
    turned: bool = False  # whether keys are the rows, and queries what they see
    known: dict[int, list[tuple[slice, int, Visibility]]] = field(default_factory=dict)

    @staticmethod
    def of(
        collective: Collective,
        request: Request,
        batch: tuple[int, ...] = (),
        options: PassOptions | None = None,
        level: Tensor | None = None,
    ) -> _Pass:
        """The pass of a request whose query has all batch dimensions of the rows."""
        r, grad = request, torch.is_grad_enabled()
        moves = grad and r.key.requires_grad, grad and r.value is not None and r.value.requires_grad
        quiet = {name: t.detach() for name in OPERANDS if (t := getattr(r, name)) is not None}
        leaves = in_exact_rows() and r.target is None and level is None
        return _Pass(collective, replace(r, **quiet), batch, options or {}, level, moves, leaves)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Keys of every rank."""
        return self.collective.sizes[self.options.get("kind", 0)]

    def over(self, operands: Sequence[Tensor | None], *, ranked: bool = True) -> tuple[_Pass, list[Tensor], Cut]:
        """The same for these operands, this rank's block, and how the blocks of all ranks are cut.

        A backward pass ranks no target, which more kernels serve.
        """
        query, key, value, scale, bias = operands
        assert query is not None
        assert key is not None
        assert scale is not None
        rows, own = (key, [query]) if self.turned else (query, [key] if value is None else [key, value])
        cut = Cut.of(own, max(self.sizes))
        request = replace(self.rows, query=rows, scale=scale, bias=bias, rank=self.rows.rank and ranked)
        return replace(self, rows=request), own, cut.whole_keys() if self.leaves else cut

    def runs(self, source: int) -> list[tuple[slice, int, Visibility]]:
        """What some row may see of a rank's block: where in it, its first position in the whole, which keys."""
        if source not in self.known:
            n, shown = self.sizes[source], self.options.get("view")
            own = self.options.get("support") if source == self.collective.rank else None
            runs = [(slice(0, n), sum(self.sizes[:source]), own)] if shown is None else shown(source, n)
            self.known[source] = [(keys, first, self._bound(seen, keys)) for keys, first, seen in runs]
        return self.known[source]

    def _bound(self, seen: Support | Visibility | None, keys: slice) -> Visibility:
        rows, n = self.rows, keys.stop - keys.start
        if not isinstance(seen, Visibility):
            terms = () if seen is None else seen.bind(rows.n_query, n, self.batch, rows.query.device)
            seen = Visibility.of(terms, rows.n_query, n, self.batch, rows.query.device)
        return seen.split_heads(rows.groups)

    def blocks(self, cut: Cut, part: Part, light: bool = False) -> list[_Rows]:
        """The rows that meet a part, a few at a time; all at once if `light`."""
        query = self.rows.query
        if not self.rows.n_query:
            return []
        pieces = [slice(0, query.shape[-2])] if light else row_pieces(query, cut)
        whole = len(pieces) == 1 and part.entries == slice(None)
        return [_Rows(cut.axis, part.entries, rows, whole) for rows in pieces]

    def tiles(self, part: Part, block: _Rows) -> list[_Tile]:
        """A block of rows against the part of a block of keys that has arrived; by leaves, if there are any."""
        rows, found = self.rows, []
        for run, first, seen in self.runs(part.source):
            start, stop = (first - run.start + x for x in (part.keys.start, part.keys.stop))
            start, stop = max(start, first), min(stop, first + run.stop - run.start)
            for begin, end in tree.pieces(start, stop) if self.leaves else [(start, stop)]:
                within = slice(begin - first, end - first)
                terms = block.terms(seen, within) if begin < end else None
                if terms is None:
                    continue
                low = run.start + within.start
                target = here = None
                if rows.target is not None and not part.step:  # targets are in the own block
                    at = block.vector(rows.target) - low
                    here = (at >= 0) & (at < end - begin)
                    target = torch.where(here, at, torch.zeros_like(at))
                keys, columns = slice(low - part.keys.start, low - part.keys.start + end - begin), slice(begin, end)
                request = replace(
                    rows,
                    query=block.matrix(rows.query),
                    key=part.tensors[0][..., keys, :],
                    value=None if rows.value is None else part.tensors[1][..., keys, :],
                    scale=block.vector(rows.scale),
                    bias=None if rows.bias is None else _columns(block.matrix(rows.bias), columns),
                    target=target,
                    terms=terms,
                    rank=target is not None and rows.rank,
                )
                found.append(_Tile(request, keys, columns, here))
        return found


@dataclass(frozen=True)
class _Rows:
    """Some rows of some entries; tensors are narrowed to views of them."""

    axis: int
    entries: slice
    rows: slice
    whole: bool  # all of them

    def terms(self, seen: Visibility, keys: slice) -> tuple[Term, ...] | None:
        """Which of some keys these rows see; None if they see nothing."""
        if not self.whole:
            seen = seen.entries(self.axis, self.entries)
        if self.rows == slice(0, seen.n_query) and keys == slice(0, seen.n_key):
            return seen.terms_here()
        return seen.cut(self.rows, keys).shown()

    def state(self, of: State) -> State:
        """The state of these rows, in the memory of the whole."""
        if self.whole:
            return of
        at, moment = self.vector, None if of.moment is None else self.matrix(of.moment)
        return State(at(of.peak), at(of.mass), at(of.first), at(of.spread), at(of.count), moment)

    def vector(self, tensor: Tensor, tail: int = 1) -> Tensor:  # (*b, Q or 1)
        if self.whole:
            return tensor
        tensor = cut_entries(tensor, self.axis, self.entries)
        start, stop = self.rows.start, self.rows.stop
        return tensor if tensor.shape[-tail] == 1 else tensor.narrow(-tail, start, stop - start)

    def matrix(self, tensor: Tensor) -> Tensor:  # (*b, Q or 1, X)
        return self.vector(tensor, 2)


def _columns(bias: Tensor, columns: slice) -> Tensor:
    """Some columns of a bias; one that has a single column serves all."""
    return bias if bias.shape[-1] == 1 else bias[..., columns]


# ---- forward and backward -------------------------------------------------------------------------------------------


def _run(
    passes: tuple[_Pass, ...], query: Tensor, key: Tensor, value: Tensor | None, scale: Tensor, bias: Tensor | None
) -> list[Sums]:
    """The sums of each pass, with the heads in one dimension.

    Two passes are both directions of one matrix, without value: in the second, rows and keys change places. As one
    function they add their gradients up in one place, where two would hold them twice.
    """
    found: list[Sums] = []
    out = _Ring.apply(passes, found, query, key, value, scale, bias)  # type: ignore[no-untyped-call]
    for i, (one, plain) in enumerate(zip(passes, found, strict=True)):
        mass, first, spread, mean, score = out[5 * i : 5 * i + 5]
        peak = plain.peak.to(one.rows.dtype)
        found[i] = plain._replace(peak=peak, mass=mass, first=first, spread=spread, mean=mean, target_score=score)
    return [dispatch.ungrouped(sums, one.rows) for sums, one in zip(found, passes, strict=True)]


class _Ring(torch.autograd.Function):
    """The sums of some passes that have a derivative; `found` gets all of them."""

    @staticmethod
    def forward(
        ctx: Any, passes: tuple[_Pass, ...], found: list[Sums], *operands: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = []
        saved: list[Tensor | None] = []
        for one in passes:
            with no_autocast(one.rows.query):
                s = _forward(*one.over(operands))
            found.append(s)
            results += [s.mass, s.first, s.spread, s.mean, s.target_score]
            saved += [s.peak, s.mass, s.first, s.mean]
        ctx.passes, ctx.exact = passes, in_exact_rows()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *saved)
        return tuple(results)

    @staticmethod
    @no_second(ACROSS_RANKS, IN_ONE_PROCESS)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given, saved = ctx.saved_tensors[: len(OPERANDS)], ctx.saved_tensors[len(OPERANDS) :]
        needs = dict(zip(OPERANDS, ctx.needs_input_grad[2:], strict=True))
        wanted = {name for name, need in needs.items() if need}
        for one in ctx.passes:
            moving = {name for name, moves in zip(TRAVELLING, one.moves, strict=True) if moves}
            wanted |= {_TURNED[name] for name in moving} if one.turned else moving
        operands = {name: x for name, x in zip(OPERANDS, given, strict=True) if x is not None}
        total = {
            name: torch.zeros_like(x, dtype=ctx.passes[0].rows.dtype, memory_format=torch.contiguous_format)
            for name, x in operands.items()
            if name in wanted
        }
        for i, one in enumerate(ctx.passes):
            into = {_TURNED.get(name, name): grad for name, grad in total.items()} if one.turned else total
            (one, own, cut), by_leaf = one.over(given, ranked=False), _ByLeaf(one, _added)
            known, upstream = saved[4 * i : 4 * i + 4], grads[5 * i : 5 * i + 5]
            names = [name for name in TRAVELLING if name in into]
            with no_autocast(one.rows.key), as_forward(ctx.exact):
                for part in walk(one.collective, own, one.sizes, cut, [into[name] for name in names]):
                    travelling = dict(zip(names, part.grads, strict=True))
                    # in a function of its own: what it has made is free before the next part is worked on
                    _pull_back(one, cut, part, known, upstream, into | travelling, by_leaf)
            for block, found in by_leaf.results():
                _add_rows(block, found, into)
        kept = {name: total[name].to(x.dtype) for name, x in operands.items() if needs[name]}
        return None, None, *[kept.get(name) for name in OPERANDS]


def _forward(one: _Pass, own: Sequence[Tensor], cut: Cut) -> Sums:
    """A pass over the blocks of all ranks; `own` are the key and value of this one."""
    rows, new, shape = one.rows, one.rows.scale, one.rows.query.shape[:-1]
    moment = None if len(own) == 1 else new.new_zeros(*shape, own[1].shape[-1])
    mass, first, spread, count = (new.new_zeros(shape) for _ in range(4))
    total = State(new.new_full(shape, -torch.inf, dtype=torch.float64), mass, first, spread, count, moment)
    score = None if rows.target is None else new.new_full(shape, -torch.inf)
    counts = rows.rank or one.level is not None
    rank = torch.zeros(shape, dtype=torch.int64, device=new.device) if counts else None
    by_leaf = _ByLeaf(one, State.merge)

    def reduce(part: Part) -> None:  # in a function of its own, as in the backward pass
        for block in one.blocks(cut, part, light=moment is None and rank is None):
            for tile in one.tiles(part, block):
                found = dispatch.forward(tile.request)
                if one.leaves:
                    by_leaf.add(block, tile.columns, found.state)
                else:
                    block.state(total).add_(found.state)
                if score is not None and found.target_score is not None:
                    block.vector(score).copy_(found.target_score)
                if rank is not None and found.rank is not None:
                    block.vector(rank).copy_(found.rank)
                elif rank is not None:
                    level = score if one.level is None else one.level
                    assert level is not None
                    block.vector(rank).add_(count_above(tile.request, block.vector(level)))

    # the rank of a target is counted from its score: those of the own block, where all targets are, come at once
    at_home = cut if rows.target is None else cut.whole_keys()
    for part in walk(one.collective, own, one.sizes, cut, at_home=at_home):
        reduce(part)
    for block, state in by_leaf.results():
        block.state(total).add_(state)
    mean = None if moment is None else total.expectation(consume=True)
    found = Sums(total.peak, mass, count, mean=mean, target_score=score, rank=rank)
    return found._replace(first=first, spread=spread) if rows.statistics else found


def _pull_back(
    one: _Pass,
    cut: Cut,
    part: Part,
    known: Sequence[Tensor | None],  # peak, mass, first and mean of the pass
    grads: Sequence[Tensor | None],  # of mass, first, spread, mean and the target's score
    into: dict[str, Tensor],  # zeros, or gradients of other passes
    by_leaf: _ByLeaf[dict[str, Tensor]],
) -> None:
    """Add the gradients that come from one part."""
    needs, peak = [name in into for name in OPERANDS], known[0]
    assert peak is not None
    for block in one.blocks(cut, part) if any(needs) else ():
        tiles = one.tiles(part, block)
        upstream = _upstream(one.rows, known, grads, block) if tiles else None
        for tile in tiles:
            assert upstream is not None
            g = None if tile.here is None or upstream.target is None else upstream.target.where(tile.here, 0.0)
            above = upstream._replace(target=g)
            over_keys: dict[str, Tensor] = {}
            # not kept in a variable: they would be held while the next ones are made
            for name, grad in dispatch.backward(tile.request, block.vector(peak), above, needs).items():
                if name in TRAVELLING:
                    into[name][..., tile.keys, :].add_(grad)
                elif name == "bias" and into[name].shape[-1] > 1:
                    _columns(block.matrix(into[name]), tile.columns).add_(grad)
                else:
                    over_keys[name] = grad
            if one.leaves:
                by_leaf.add(block, tile.columns, over_keys)
            else:
                _add_rows(block, over_keys, into)


def _add_rows(block: _Rows, found: dict[str, Tensor], into: dict[str, Tensor]) -> None:
    """Add gradients that are sums over keys."""
    for name, grad in found.items():
        (block.vector if name == "scale" else block.matrix)(into[name]).add_(grad)


def _added(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: grad + other[name] for name, grad in one.items()}


class _ByLeaf(Generic[T]):
    """What every block of rows has found for the leaves of the whole sequence."""

    def __init__(self, one: _Pass, join: Callable[[T, T], T]):
        self._n, self._join = sum(one.sizes), join
        self._known: dict[tuple[int | None, int], tuple[_Rows, tree.Joining[T]]] = {}

    def add(self, block: _Rows, columns: slice, found: T) -> None:
        place = block.entries.start, block.rows.start
        if place not in self._known:
            self._known[place] = block, tree.Joining(self._n, self._join)
        self._known[place][1].add(columns.start, columns.stop, found)

    def results(self) -> Iterator[tuple[_Rows, T]]:
        for block, joining in self._known.values():
            found = joining.result()
            if found is not None:
                yield block, found


def _upstream(rows: Request, known: Sequence[Tensor | None], grads: Sequence[Tensor | None], block: _Rows) -> SumGrads:
    """Gradients of the raw sums of some rows, zeros where none arrived: every rank takes part in the ring."""
    vectors = [None if x is None else block.vector(x) for x in (*known[1:3], *grads[:3], grads[4])]
    mass, first, g_mass, g_first, g_spread, g_target = vectors
    mean, g_mean = [None if x is None else block.matrix(x) for x in (known[3], grads[3])]
    assert mass is not None
    raw = raw_gradients(mass, first, mean=mean, g_mass=g_mass, g_first=g_first, g_spread=g_spread, g_mean=g_mean)
    zero = torch.zeros_like(mass)
    if mean is not None and raw.moment is None:
        raw = raw._replace(moment=zero[..., None].expand(mean.shape))
    if rows.target is None:
        return raw
    return raw._replace(target=zero if g_target is None else g_target)


@torch.no_grad()
def count_above(request: Request, level: Tensor) -> Tensor:  # (*b, Q) int64
    """Visible keys of the request whose score is above its row's level; nan counts none, -inf all.

    A copy of the target's key on another rank ties with it and must not count. Its score may differ in the last digits,
    since every rank adds up in tiles of its own; so the level is raised by what rounding can do.
    """
    dtype = request.dtype
    size = torch.linalg.vector_norm(request.query, dim=-1, dtype=dtype) * request.scale.abs()
    longest = torch.linalg.vector_norm(request.key, dim=-1, dtype=dtype).amax(-1, keepdim=True)
    slack = 4 * torch.finfo(dtype).eps * (size * longest + level.abs().nan_to_num(0.0, 0.0, 0.0))
    level = (level + slack.nan_to_num(0.0, 0.0, 0.0)).expand(*request.batch, request.n_query)
    total = torch.zeros(level.shape, dtype=torch.int64, device=level.device)
    n, bias = request.n_key, request.bias
    seen = Visibility(request.terms, request.n_query, n, request.batch, level.device)
    pieces = Cut.of([request.key], n).n_keys  # a few keys at a time: tiles hold copies of them
    for keys in [Cut(n_keys=pieces).keys(i, n) for i in range(pieces)]:
        terms = seen.cut(keys=keys).shown() if pieces > 1 else request.terms
        if terms is None:
            continue
        some = None if bias is None else _columns(bias, keys)
        few = replace(request, key=request.key[..., keys, :], value=None, bias=some, terms=terms, statistics=False)
        for rows, tiles in tiled.score_tiles(few):
            for _, scores in tiles:
                total[..., rows] += (scores > level[..., rows, None]).sum(-1)
    return total


# ---- sums over pairs ------------------------------------------------------------------------------------------------


def sum_over_keys(
    function: Callable[..., Tensor], collective: Collective, rows: Tensor, key: Tensor, shared: Sequence[Tensor]
) -> Tensor:  # (n,)
    """`Collective.sum_over_keys` for a group: out_i = sum over parts of function(row_i, keys of a part, their numbers).

    A key's number is its place among the keys of its rank where that is the rows' own, and -1 elsewhere: a row knows
    its partner by it.
    """
    out: Tensor = _Pairs.apply(function, collective, rows, key, *shared)  # type: ignore[no-untyped-call]
    return out


class _Pairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], collective: Collective, rows: Tensor, key: Tensor, *shared: Tensor
    ) -> Tensor:
        ctx.function, ctx.collective = function, collective
        ctx.save_for_backward(rows, key, *shared)
        dtype, sizes = shared[0].dtype, collective.sizes[1]
        out, wide = shared[0].new_zeros(len(rows)), rows.to(dtype)
        with no_autocast(rows):
            for part in walk(collective, [key], sizes, Cut.of([key], max(sizes))):
                out += _of_part(function, part, [wide, part.tensors[0].to(dtype), *shared])
        return out

    @staticmethod
    @no_second(ACROSS_RANKS, IN_ONE_PROCESS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, needs, sizes = ctx.saved_tensors, ctx.needs_input_grad[2:], ctx.collective.sizes[1]
        rows, key, *shared = given
        total = [torch.zeros(x.shape, dtype=grad.dtype, device=x.device) for x in given]
        with no_autocast(rows):
            for part in walk(ctx.collective, [key], sizes, Cut.of([key], max(sizes)), total[1:2] if needs[1] else []):
                places = [total[0], *(part.grads or total[1:2]), *total[2:]]
                found = _gradients(ctx.function, part, [rows, part.tensors[0], *shared], needs, grad)
                for place, more in zip(itertools.compress(places, needs), found, strict=True):
                    place.add_(more)
        kept = zip(total, given, needs, strict=True)
        return None, None, *(g.to(x.dtype) if need else None for g, x, need in kept)


def _gradients(
    function: Callable[..., Tensor], part: Part, given: Sequence[Tensor], needs: Sequence[bool], grad: Tensor
) -> Sequence[Tensor]:
    """The gradients that are needed, of one part."""
    leaves = [x.detach().to(grad.dtype).requires_grad_(need) for x, need in zip(given, needs, strict=True)]
    with torch.enable_grad():
        out = _of_part(function, part, leaves)
    return torch.autograd.grad(out, list(itertools.compress(leaves, needs)), grad)


def _of_part(function: Callable[..., Tensor], part: Part, given: Sequence[Tensor]) -> Tensor:
    rows, key, *shared = given
    numbers = torch.arange(part.keys.start, part.keys.stop, device=key.device)
    numbers = torch.full_like(numbers, -1) if part.step else numbers
    own = torch.arange(len(rows), device=rows.device)
    return in_row_blocks(function, [rows, own], [key, numbers, *shared], len(key))
