"""A process group as one of its ranks sees it, or this process alone: what losses and attention need of the others.

    collective = collective_of(group)                   this process alone without a group
    with collective.validate(): ...                     what raises on one rank raises on all
    collective = collective.check_same(call, ...)       same arguments on every rank, else all raise; sizes are known
    collective.sums(query, key, ...)                    one pass over the keys of all ranks
    collective.reduce(rows, "mean")                     torch's reduction over the rows of all ranks

Think of the global value as a function of every rank's own tensors; the gradient on a rank is the derivative with
respect to the tensors of that rank. What follows a `total` is the same computation on every rank, done once on each:
each already has the whole derivative, and adding those up would count it `size` times.

The ring (`partita.distributed.ring`) is loaded with the first group: a single process needs none of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from partita._checks import Reduction, has_values
from partita.engine.dispatch import both_ways, execute
from partita.engine.request import Request, build
from partita.engine.second import no_second
from partita.engine.state import State
from partita.engine.sums import Sums
from partita.engine.terms import Visibility
from partita.errors import BackendError, ShapeError
from partita.exactness import as_forward, in_exact_rows
from partita.gibbs import Gibbs
from partita.rows import in_row_blocks, reduce_rows
from partita.score import Score
from partita.support import Support

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "ACROSS_RANKS", "ALONE", "IN_ONE_PROCESS", "Collective", "Fact", "PassOptions", "View", "batch_of", "bytes_of",
    "collective_of", "even_sizes", "per_row",
]  # fmt: skip

ACROSS_RANKS = "a sum over ranks (group=)"
IN_ONE_PROCESS = "take it on one process, of the gathered tensors without group="

Fact = bool | int | float | str | Sequence[int] | Sequence[float] | torch.dtype | Tensor | None
# For the block of a rank with n keys: (where in the block, first position in the whole, which keys count).
View = Callable[[int, int], Iterable[tuple[slice, int, "Support | Visibility | None"]]]

_T = TypeVar("_T")
_LENGTH = 4096  # bytes of a message of `check_same`, whatever the call: ranks in different calls can read each other
_TOLERANCE = 1e-6  # relative; a learned temperature may differ by rounding from rank to rank
_ONE_PER_ROW = "one per row"


class PassOptions(TypedDict, total=False):
    """What is read in one pass, and over what."""

    bias: Tensor | None  # (..., n_query or 1, all keys or 1), of this rank's rows
    score: Score | None  # instead of the inner product; for a process alone
    support: Support | None  # of the rank's own block; every other block is seen whole
    view: View | None  # of every block, instead of a support
    kind: int  # whose sizes the keys have
    softcap: float | None
    grouped: bool
    batch: Sequence[int]  # one more to broadcast to
    value: Tensor | None
    target: Tensor | None  # keys of the rank's own block
    rank: bool
    statistics: bool


@dataclass(frozen=True, eq=False)
class Collective:
    """The ranks that make a call together, and which of them this is."""

    process_group: dist.ProcessGroup | None = None  # None: this process alone
    rank: int = 0
    size: int = 1
    zigzag: bool = False  # whether a sequence is spread in zigzag order
    sizes: tuple[tuple[int, ...], ...] = ()  # after `check_same`: of each kind of rows, how many every rank holds

    @staticmethod
    def of(group: object) -> Collective:
        """The group, checked: a process group of torch.distributed, a DeviceMesh of one dimension, or one of these."""
        given = group
        if torch.compiler.is_compiling():
            raise BackendError(
                "group= cannot be traced by torch.compile: a torch.distributed group meets outside of graphs. "
                "Mark the function that makes this call with torch.compiler.disable."
            )
        if not dist.is_available() or not dist.is_initialized():
            raise BackendError(
                "group= needs torch.distributed to be initialised; call torch.distributed.init_process_group, "
                "or start the program with torchrun. Leave group None for one process."
            )
        if isinstance(given, Collective):
            return given
        from torch.distributed.device_mesh import DeviceMesh  # torch may be built without it

        if isinstance(given, DeviceMesh):
            if given.ndim != 1:
                raise BackendError(
                    f"group= takes a DeviceMesh of torch.distributed with one dimension; this one has {given.ndim}. "
                    f"Choose one of its dimensions by name: mesh['cp']."
                )
            given = given.get_group()
        if not isinstance(given, dist.ProcessGroup):
            raise BackendError(
                f"group= takes a process group of torch.distributed or a DeviceMesh; got {type(given).__name__}. "
                f"This process may not be in the group; torch.distributed.group.WORLD is that of all processes."
            )
        rank = dist.get_rank(given)
        if rank < 0:
            raise BackendError("this process is not in the torch.distributed group it was given.")
        return Collective(given, rank, dist.get_world_size(given))

    @property
    def alone(self) -> bool:
        return self.process_group is None

    @property
    def device(self) -> torch.device:
        """Where small messages live: NCCL moves nothing else than GPU memory."""
        if "gloo" in dist.get_backend(self.process_group):
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None else accelerator

    def peer(self, distance: int) -> int:
        """The global number of the rank this far after our own, round the ring."""
        assert self.process_group is not None
        return dist.get_global_rank(self.process_group, (self.rank + distance) % self.size)

    # ---- all ranks raise, or none ----------------------------------------------------------------------------------

    def validate(self, last: str = "") -> contextlib.AbstractContextManager[None]:
        """Checks of this rank's own arguments: what raises here, on this rank alone perhaps, raises on every rank.

        The others learn of it at their next `check_same`; or, where no more follows, at the end of this block: `last`
        then names the call.
        """
        return contextlib.nullcontext() if self.size == 1 else self._validated(last)

    @contextlib.contextmanager
    def _validated(self, last: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._messages({"refused": f"{type(error).__name__}: {error}"[:400]})
            raise
        if last:
            self._exchange({"call": f"{last}, validated"})

    def check_same(self, call: str, sizes: Sequence[int], given: Mapping[str, Fact]) -> Collective:
        """The same ranks with the sizes of all; raises on every rank if they were given different arguments.

        Sizes may differ from rank to rank. Both travel in one small message, so that the check costs no more than the
        sizes; every rank sees all messages and comes to the same conclusion.
        """
        if self.size == 1:
            return replace(self, sizes=tuple([(n,) for n in sizes]))
        own = {"call": call, "sizes": list(sizes), "given": {name: _plain(fact) for name, fact in given.items()}}
        ranks = self._exchange(own)
        for name in own["given"]:
            found = _classes([rank["given"][name] for rank in ranks])
            if len(found) > 1:
                raise BackendError(
                    f"{name} must be the same on every rank of the group: {_held(found, 'has', 'have')}. "
                    f"Pass the same on all of them."
                )
        return replace(self, sizes=tuple(zip(*[rank["sizes"] for rank in ranks], strict=True)))

    def _messages(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """The message of every rank."""
        text = json.dumps(own).encode()
        assert len(text) <= _LENGTH, "a message of check_same is too long"
        padded = torch.frombuffer(bytearray(text.ljust(_LENGTH)), dtype=torch.uint8).to(self.device)
        return [json.loads(bytes_of(row)) for row in self.all_gather(padded)]

    def _exchange(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """The same; raises if a rank has refused its arguments or makes another call."""
        ranks = self._messages(own)
        for rank, other in enumerate(ranks):
            if "refused" in other:
                raise BackendError(
                    f"rank {rank} of the group refused its own arguments and computes nothing. Mend them there; its "
                    f"error was {other['refused']}"
                )
        found = _classes([other["call"] for other in ranks])
        if len(found) > 1:
            raise BackendError(
                f"the ranks of the group call different functions, or the same with different options: "
                f"{_held(found, 'calls', 'call')}. All ranks must make the same calls in the same order."
            )
        return ranks

    def check_pass(
        self, query: Tensor, key: Tensor, scale: float | Tensor = 1.0, **options: Unpack[PassOptions]
    ) -> tuple[int, ...]:
        """Inside `validate`: raise what a pass over these would raise after the other ranks have started it.

        Gives the batch dimensions of its rows.
        """
        return () if self.alone else batch_of(build(query, key, scale=scale, **options))  # type: ignore[misc]

    # ---- sums over ranks -------------------------------------------------------------------------------------------

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of what every rank then uses alike; its gradient passes as it is."""
        return tensor if self.alone else _through(tensor, self.added, _same)

    def pooled(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of what each then uses in its own way; its gradient is summed too."""
        return tensor if self.alone else _through(tensor, self.added, self.added)

    def sum_gradient(self, tensor: Tensor) -> Tensor:
        """A tensor that is the same on every rank; its gradient is summed over ranks."""
        return _through(tensor, _same, self.added)

    def scale_gradient(self, tensor: Tensor, factor: float) -> Tensor:
        """The tensor as it is; its gradient times a number."""
        return _through(tensor, _same, lambda grad: grad * factor)

    def share(self, tensor: Tensor) -> Tensor:
        """A replicated tensor used alike on every rank: each gets an equal part of its gradient."""
        return tensor if self.alone else self.scale_gradient(tensor, 1.0 / self.size)

    def added(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, without a gradient."""
        if self.size > 1 and in_exact_rows() and tensor.is_floating_point():
            total: Tensor = _loaded("tree").added(tensor, self)
            return total
        return self.all_reduce(tensor, dist.ReduceOp.SUM) if not self.alone else tensor.detach()

    def all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        """Any reduction over ranks, without a gradient."""
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op=op, group=self.process_group)
        return out

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of one shape, of all ranks."""
        tensor = tensor.contiguous()
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(out, tensor, group=self.process_group)
        return out

    def gather_rows(self, own: Tensor, kind: int = 0) -> list[Tensor]:
        """The rows of all ranks, of which there are `sizes[kind]`; without a gradient."""
        sizes = (len(own),) if self.alone else self.sizes[kind]
        if self.alone or not max(sizes):
            return [own] * self.size
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        return [part[:n] for part, n in zip(self.all_gather(padded), sizes, strict=True)]

    def reduce(self, rows: Tensor, reduction: Reduction, total: Tensor | None = None) -> Tensor:
        """torch's reduction over the rows of all ranks; "none" gives this rank's own."""
        if self.alone or reduction == "none":
            return reduce_rows(rows, reduction, total)
        if reduction == "mean" and total is None:
            total = rows.new_full((), float(rows.numel()))
        count = None if total is None else self.added(total)
        loss: Tensor = reduce_rows(self.total(rows.sum()), reduction, count)
        return _loaded("gradients").checked(loss, self, "for_ddp")  # type: ignore[no-any-return]

    def replicated(self, loss: Tensor) -> Tensor:
        """A loss of rows that every rank holds: it is the same on all of them."""
        return loss if self.alone else _loaded("gradients").checked(loss, self, "replicate")

    # ---- passes over the keys of all ranks -------------------------------------------------------------------------

    def runs(self, kind: int) -> list[list[tuple[int, int]]]:
        """Of every rank, the runs (first position in the whole, length) that its rows of a kind are.

        In rank order each rank holds the positions after those of the rank before: one run. In zigzag order there are
        2 W pieces and rank r holds pieces r and 2 W - 1 - r: two runs, and every rank has the same causal work.
        """
        sizes, world = self.sizes[kind], self.size
        pieces = _even(sum(sizes), 2 * world) if self.zigzag else sizes
        firsts = [sum(pieces[:i]) for i in range(len(pieces))]
        found = [[(first, n)] for first, n in zip(firsts[:world], pieces, strict=False)]
        if not self.zigzag:
            return found
        expected = even_sizes(sum(sizes), world, True)
        if list(sizes) != expected:
            raise ShapeError(
                f"in zigzag order the ranks hold {expected} of {sum(sizes)} positions; got {list(sizes)}. "
                f"Cut the sequence with partita.distributed.shard(tensor, zigzag(group))."
            )
        return [[*one, (firsts[-1 - r], pieces[-1 - r])] for r, one in enumerate(found)]

    def positions(self, rank: int, kind: int = 0, device: torch.device | None = None) -> Tensor:
        """The positions in the whole of a rank's rows, in the order it holds them."""
        return torch.cat([torch.arange(first, first + n, device=device) for first, n in self.runs(kind)[rank]])

    def sums(self, query: Tensor, key: Tensor, scale: float | Tensor, **options: Unpack[PassOptions]) -> Sums:
        """The sums of these rows over the keys of all ranks; with a value its mean."""
        if not self.alone:
            found: Sums = _loaded("ring").sums(self, query, key, scale, options)
            return found
        own: dict[str, Any] = {name: x for name, x in options.items() if name not in ("view", "kind", "batch", "score")}
        own["support"], score, mean = _own(options, key), options.get("score"), options.get("value") is not None
        if score is None:
            return execute(build(query, key, scale=scale, mean=mean, **own))
        reads = {name: own.pop(name) for name in ("value", "target", "rank", "statistics") if name in own}
        return Gibbs(query, key, scale=scale, score=score, **own).reduce(mean=mean, **reads)

    def leaves(
        self, rows: Sequence[Any], key: Tensor, bias: Tensor | None
    ) -> list[tuple[Sequence[Any], Tensor, Tensor | None]]:
        """What belongs to rows, to keys and to both; of exact rows over a group, for every leaf of a fixed tree.

        rows: tensors whose gradients are added up along the tree; numbers and None stay as they are.
        """
        if self.alone or not in_exact_rows():
            return [(rows, key, bias)]
        found: list[Any] = _loaded("tree").leaves(rows, key, bias)
        return found

    def joined(self, found: Sequence[_T], join: Callable[[_T, _T], _T]) -> _T:
        """What was found for each of `leaves`, joined along the tree."""
        if len(found) == 1:
            return found[0]
        tree = _loaded("tree")
        whole: _T = tree.fold(self.sizes[0][self.rank], found, join, tree.CLASSES)
        return whole

    def slices(
        self,
        makes: Sequence[Callable[..., Request]],
        target: Tensor,
        here: Tensor | None,
        *,
        rank: bool,
        statistics: bool,
        variance: bool = False,
    ) -> Sums:
        """The sums of rows that every rank holds, where each holds a slice of the keys; states are merged.

        makes: give the request of this rank's slice, or of the leaves it was cut into, once a target and reads are.
        target: a key of this rank's slice; where `here` is False the row's target is elsewhere.
        rank: with the ranks come the best key of every row, named as in the whole, and the variance.
        variance: without ranks too.
        """
        if self.alone:
            variance = variance or rank
            return execute(makes[0](target=target, rank=rank, statistics=statistics, variance=variance, argmax=rank))
        found: Sums = _loaded("states").slices(self, makes, target, here, rank=rank, statistics=statistics)
        return found

    def state(self, parts: Sequence[Gibbs], statistics: bool = True) -> State:
        """The state of the keys of all ranks, for rows that every rank holds; the parts are one, or `leaves`."""
        return self.merged(self.joined([p.state(statistics=statistics) for p in parts], State.merge), statistics)

    def merged(self, state: State, statistics: bool = True) -> State:
        """The same from this rank's own state."""
        whole: State = state if self.alone else _loaded("states").merged(state, self, statistics)
        return whole

    def both_ways_nll(
        self, query: Tensor, key: Tensor, scale: float | Tensor, bias: Tensor | None, own: Tensor
    ) -> tuple[Tensor, Tensor]:  # (n,), (n,)
        """-log p of key i for query i, and of query i for key i, by rows and columns of one score matrix."""
        if not self.alone:
            rows, columns = _loaded("ring").both_ways(self, query, key, scale, bias, own)
            return rows.nll(), columns.nll()
        return both_ways(build(query, key, scale=scale, bias=bias))

    def count_above(self, query: Tensor, key: Tensor, level: Tensor, **options: Unpack[PassOptions]) -> Tensor:  # (n,)
        """How many of the keys a row may see are more similar to it than its level, which need not be a key's.

        In one process the level becomes the score of one more key, in one more dimension: the pass that ranks a target
        serves.
        """
        with torch.no_grad():  # not as a decorator: dynamo knows no decorated method of an object it made
            if not self.alone:
                counted: Tensor = _loaded("ring").sums(self, query, key, 1.0, options, level).rank
                return counted
            longer = torch.nn.functional.pad(key.to(query.dtype), (0, 1, 0, 1))
            longer[-1, -1] = 1.0
            rows = torch.cat([query, level[:, None].to(query.dtype)], -1)
            target = torch.full((len(rows),), key.shape[0], dtype=torch.int64, device=rows.device)
            return Gibbs(rows, longer, support=_own(options, key)).target_rank(target)

    def sum_over_keys(
        self, function: Callable[..., Tensor], rows: Tensor, key: Tensor, shared: Sequence[Tensor]
    ) -> Tensor:  # (n,)
        """The sum over the keys of all ranks of function(rows, their numbers, keys, their numbers, *shared).

        The partner of a row is the key of its rank with its number. Rows and keys come in the dtype of `shared`:
        gradients of half-precision vectors are added up, then rounded once.
        """
        if not self.alone:
            out: Tensor = _loaded("ring").sum_over_keys(function, self, rows, key, shared)
            return out
        own, numbers = (torch.arange(len(x), device=x.device) for x in (rows, key))
        rows, key = (x.to(shared[0].dtype) for x in (rows, key))
        return in_row_blocks(function, [rows, own], [key, numbers, *shared], len(key))


ALONE = Collective()


def collective_of(group: object | None) -> Collective:
    """This process alone, or the ranks of a group: of torch.distributed, or a DeviceMesh of one dimension."""
    return ALONE if group is None else Collective.of(group)


def batch_of(request: Request) -> tuple[int, ...]:
    """The batch dimensions of the rows of a request, with the heads of grouped queries in one dimension."""
    batch = request.batch
    return batch if request.groups == 1 else (*batch[:-2], batch[-2] * batch[-1])


def _own(options: PassOptions, key: Tensor) -> Support | None:
    """Which keys of the only block count."""
    view = options.get("view")
    if view is None:
        return options.get("support")
    ((_, _, seen),) = view(0, len(key))
    assert not isinstance(seen, Visibility)
    return seen


def _loaded(name: str) -> Any:
    """A module of the package for groups, with its types left behind."""
    return importlib.import_module(f"partita.distributed.{name}")


def even_sizes(n: int, world: int, zigzag: bool) -> list[int]:
    """How many of n positions each rank holds, as evenly as can be."""
    pieces = _even(n, 2 * world if zigzag else world)
    return [pieces[r] + pieces[-1 - r] for r in range(world)] if zigzag else pieces


def _even(n: int, count: int) -> list[int]:
    return [n // count + (i < n % count) for i in range(count)]


# ---- what ranks compare ---------------------------------------------------------------------------------------------


def per_row(value: float | Tensor, rows: int) -> Fact:
    """One number, the same on every rank, or a tensor with one for each of these rows; of a single row it is either."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return _ONE_PER_ROW
    return [float(value.detach())] if isinstance(value, Tensor) and value.dim() and rows == 1 else value


def _plain(fact: Fact) -> object:
    """What ranks were given as JSON has it; a list is a number of a single row."""
    if isinstance(fact, Tensor):
        fact = fact.detach()
        return float(fact) if fact.numel() == 1 and has_values(fact) else f"a tensor of {fact.dim()} dimensions"
    return fact if fact is None or isinstance(fact, (bool, int, float, str, list)) else str(fact)


def _classes(values: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """The values that differ and the ranks that have them; what may be either of two comes last."""
    found: list[tuple[Any, list[int]]] = []
    for rank in sorted(range(len(values)), key=lambda r: isinstance(values[r], list)):
        for value, ranks in found:
            if _alike(value, values[rank]):
                ranks.append(rank)
                break
        else:
            found.append((values[rank], [rank]))
    return found


def _alike(a: Any, b: Any) -> bool:
    if isinstance(b, list):
        return isinstance(a, list) or a == _ONE_PER_ROW or _alike(a, b[0])
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_TOLERANCE) or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and bool(a == b)


def _held(found: Sequence[tuple[Any, list[int]]], one: str, many: str) -> str:
    """Which ranks have what."""
    parts = []
    for value, ranks in found:
        who = f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))} {many}"
        parts.append(f"{who} {value[0] if isinstance(value, list) else value}")
    return ", ".join(parts)


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor of bytes."""
    tensor = tensor.cpu()
    return ctypes.string_at(tensor.data_ptr(), len(tensor)) if len(tensor) else b""


# ---- gradients of sums ----------------------------------------------------------------------------------------------


class _Through(torch.autograd.Function):
    """One function of the tensor, another of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back, ctx.exact = back, in_exact_rows()
        return forth(tensor)

    @staticmethod
    @no_second(ACROSS_RANKS, IN_ONE_PROCESS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with as_forward(ctx.exact):
            return ctx.back(grad), None, None


def _through(tensor: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    out: Tensor = _Through.apply(tensor, forth, back)  # type: ignore[no-untyped-call]
    return out


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)
