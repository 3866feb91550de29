"""The derivative of a pass: autograd records one node, which holds the request's tensors and the row sums.

`Pass` runs eagerly; what traces or transforms a pass sees the operator partita::reduce. Both have derivatives at
constant peak. An operator has no optional results: one that is not wanted is an empty tensor.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

from partita.engine import operators
from partita.engine.axes import mapped_first
from partita.engine.backends import Backend, choose, tiled
from partita.engine.callable_score import written_out
from partita.engine.request import Bare, Request, check_values
from partita.engine.state import SumGrads, raw_gradients
from partita.engine.sums import OPERANDS, Sums
from partita.errors import BackendError
from partita.exactness import as_forward, in_exact_rows
from partita.precision import no_autocast

__all__ = [
    "Context", "FastPath", "Gradients", "Pass", "TracedPass", "backward", "computed_ahead", "forward", "pulled_back",
    "recomputed", "reduce", "serving_alone", "traceable", "traced",
]  # fmt: skip

_ORDINARY = (Tensor, torch.nn.Parameter)
Tensors = Sequence["Tensor | None"]


class Context(NamedTuple):
    """What surrounds a pass."""

    needs_grad: bool  # autograd, a transform or forward mode
    traced: bool  # a tracer, a dispatch mode, a profiler or a tensor subclass sees operators

    @staticmethod
    def of(tensors: Tensors) -> Context:
        if torch.compiler.is_compiling():  # the operator brings its own derivative
            return Context(False, True)
        recorded, ordinary, grad = False, True, torch.is_grad_enabled()
        for t in tensors:  # a plain loop: most calls are short
            if t is not None:
                recorded = recorded or (grad and t.requires_grad)
                ordinary = ordinary and type(t) in _ORDINARY and not t.is_meta  # meta: shapes alone
        # forward mode too counts: the Function has no such derivative and raises, where a backend would lose it
        transforms = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        return Context(
            recorded or transforms,
            transforms
            or torch._C._len_torch_dispatch_stack() != 0
            or torch._C._get_tracing_state() is not None
            or torch._C._autograd._profiler_enabled()
            or not ordinary,
        )


def forward(request: Request, backend: Backend | None = None) -> Sums:
    """The pass by a backend, without a graph."""
    entry = choose(request) if backend is None else backend
    with no_autocast(request.query), torch.no_grad():
        sums = entry.forward(request)
        if sums is None:
            sums = tiled.forward(request)
        if request.argmax and sums.argmax is None:  # a backend may leave the best key to the tiles
            best = tiled.forward(replace(request, value=None, target=None, rank=False, statistics=False, mean=False))
            sums = sums._replace(argmax=best.argmax)
        if request.statistics and not request.variance:  # nan in its place
            if sums.statistics is not None:
                sums.statistics[3].fill_(torch.nan)
            sums = sums._replace(spread=None)
        return sums


def backward(
    request: Request,
    peak: Tensor,
    g: SumGrads,
    needs: Sequence[bool],
    backend: Backend | None = None,
    *,
    rounded: bool = False,  # they may come in the dtype of their operands, not in that of the sums
) -> dict[str, Tensor]:
    """Gradients of the operands that need one, by their names; without a graph."""
    entry = choose(request) if backend is None else backend
    with no_autocast(request.query), torch.no_grad():
        make = (entry.rounded_backward if rounded else None) or entry.backward
        grads = make(request, peak, g, needs)
        return tiled.backward(request, peak, g, needs) if grads is None else grads


def traceable(request: Request) -> Request:
    """Under tracing or functorch, scores given by a callable are materialised."""
    if request.pairs is None:
        return request
    compiling = torch.compiler.is_compiling()
    looked_at = compiling or (Context.of(request.tensors()).traced and not torch._C._autograd._profiler_enabled())
    return written_out(request) if looked_at else request


# ---- a pass that autograd records -----------------------------------------------------------------------------------


def reduce(request: Request, backend: Backend, tensors: Tensors | None = None) -> Sums:
    """The pass, recorded by autograd; `tensors` are the request's, where they are at hand."""
    found: list[Sums] = []
    out = Pass.apply(request, backend, found, *(request.tensors() if tensors is None else tensors))  # type: ignore[no-untyped-call]
    mass, first, spread, statistics, moment, mean, score = out
    s = found[0]
    return Sums(s.peak, mass, s.count, first, spread, statistics, moment, mean, score, s.rank, s.argmax, mass.grad_fn)


class Pass(torch.autograd.Function):
    """The sums of a pass that have a derivative; `found` gets all of them."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, backend: Backend, found: list[Sums], *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        sums = forward(request, backend)
        found.append(sums)
        ctx.bare, ctx.backend, ctx.exact = request.bare(), backend, in_exact_rows()
        ctx.set_materialize_grads(False)
        # in float64: a backend that works in other units must find the very peak again that its sums are relative to
        ctx.save_for_backward(*tensors, sums.peak.double(), sums.mass, sums.first, sums.spread, sums.mean)
        return sums.mass, sums.first, sums.spread, sums.statistics, sums.moment, sums.mean, sums.target_score

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, peak, mass, first, spread, mean = ctx.saved_tensors
        bare, needed = ctx.bare, ctx.needs_input_grad[3:]

        def again(*given: Tensor | None) -> tuple[Tensor | None, ...]:
            """The pass with all scores written out: a function of tiles has no second derivative of its own."""
            request = written_out(bare.over(given))
            s = reduce(request, choose(request))
            return s.mass, s.first, s.spread, s.statistics, s.moment, s.mean, s.target_score

        if bare.pairs is not None and torch.is_grad_enabled():
            return (None, None, None, *recomputed(again, tensors, needed, grads))
        sums = (peak, mass, first, spread, mean)
        with as_forward(ctx.exact):
            return (None, None, None, *pulled_back(bare, tensors, needed, sums, grads, ctx.backend))


_GRADS = ("g_mass", "g_first", "g_spread", "g_stats", "g_moment", "g_mean", "g_target")


def pulled_back(
    bare: Bare,
    tensors: Tensors,
    needed: Sequence[bool],
    sums: Tensors,  # peak, mass, first, spread and mean, as the pass gave them; None: not wanted
    grads: Tensors,  # of mass, first, spread, statistics, moment, mean and the target's score
    backend: Backend | str,  # its name where the pass is traced
) -> list[Tensor | None]:
    """Gradients of the tensors from those of a pass's results."""
    out: list[Tensor | None] = [None] * len(tensors)
    if not [1 for g in grads if g is not None]:
        return out
    peak, mass, first, spread, mean = sums
    assert peak is not None
    assert mass is not None
    g = raw_gradients(mass, first, spread, mean, **dict(zip(_GRADS, grads, strict=True)))
    places = bare.places(len(tensors))
    needs = [tensors[i] is not None and needed[i] for i in places]
    if isinstance(backend, str) or torch.is_grad_enabled():
        # a compiled graph has no second derivative
        make: Any = Gradients.forward if torch.compiler.is_compiling() else Gradients.apply
        made = make(bare, needs, backend, *tensors, peak, *g)
        for i, grad in zip([i for i, need in zip(places, needs, strict=True) if need], made, strict=True):
            out[i] = grad
        return out
    request = bare.over(tensors)
    total = backward(request, peak, g, needs, backend, rounded=True)
    for i, (name, tensor) in zip(places, request.operands().items(), strict=True):
        grad = total.get(name)
        if tensor is not None and grad is not None:
            out[i] = grad if grad.dtype == tensor.dtype else grad.to(tensor.dtype)
    return out


class Gradients(torch.autograd.Function):
    """Gradients of the operands that need one, by a backend or by the operator; differentiable once."""

    @staticmethod
    @operators.known_signature
    def forward(bare: Bare, needs: list[bool], backend: Backend | str, *given: Tensor | None) -> tuple[Tensor, ...]:
        tensors, rows = given[:-_ROWS], given[-_ROWS:]
        if not isinstance(backend, str):
            return tuple(_gradients(bare.over(tensors), backend, *rows, needs))
        return tuple(torch.ops.partita.reduce_backward(*operators.arguments_of(bare, tensors, backend), *rows, needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.bare, ctx.needs, _, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, peak, mass, first, second, moment, target = ctx.saved_tensors
        request = replace(ctx.bare.over(tensors), rank=False, mean=False)
        names = [name for name, needed in zip(OPERANDS, ctx.needs, strict=True) if needed]
        wanted = {name: grad.to(request.dtype) for name, grad in zip(names, above, strict=True)}
        g = SumGrads(mass, first, second, moment, target)
        back = tiled.second_order(request, peak, g.over((*request.batch, request.n_query)), wanted)
        found = {name: back[name].to(getattr(request, name).dtype) for name in OPERANDS if name in back}
        of_g = [back["g_" + name].sum_to_size(t.shape) if "g_" + name in back else None
                for name, t in g._asdict().items()]  # fmt: skip
        others = [None] * (len(tensors) - len(OPERANDS))
        return (None, None, None, *[found.get(name) for name in OPERANDS], *others, None, *of_g)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], bare: Bare, needs: list[bool], backend: str, *given: Tensor | None
    ) -> tuple[Any, Any]:
        moved = [mapped_first(t, d, info.batch_size) for t, d in zip(given, in_dims[3:], strict=True)]
        out = Gradients.apply(bare, needs, backend, *moved)  # type: ignore[no-untyped-call]
        return out, tuple(0 for _ in out)


_ROWS = 6  # peak, then the gradients of mass, first, second, moment, target: what follows the tensors in `Gradients`


def _gradients(request: Request, backend: Backend | None, peak: Any, *given: Any) -> list[Tensor]:
    """The gradients that are needed, each in the dtype of its operand."""
    *g, needs = given
    above = SumGrads(*g).over((*request.batch, request.n_query))
    total = backward(request, peak, above, needs, backend, rounded=True)
    return [total[name].to(getattr(request, name).dtype).contiguous() for name in OPERANDS if name in total]


def recomputed(
    function: Callable[..., Any], tensors: Tensors, needed: Sequence[bool], grads: Tensors
) -> list[Tensor | None]:
    """Gradients of the tensors through a function that is run again."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [
            t
            if t is None or not t.is_floating_point()
            else t.view_as(t)
            if create  # one tensor may be two operands, each with a gradient of its own
            else t.detach().requires_grad_(need)
            for t, need in zip(tensors, needed, strict=True)
        ]
        wanted = [t for t, need in zip(given, needed, strict=True) if t is not None and need]
        made = function(*given)
        pairs = [(x, g) for x, g in zip(made if isinstance(made, tuple) else (made,), grads, strict=True)
                 if x is not None and g is not None and x.requires_grad]  # fmt: skip
        results, above = [x for x, _ in pairs], [g for _, g in pairs]
        found = iter(torch.autograd.grad(results, wanted, above, create_graph=create, allow_unused=True))
    return [next(found) if t is not None and need else None for t, need in zip(given, needed, strict=True)]


# ---- the pass as an operator ----------------------------------------------------------------------------------------

_ABSENT = 0  # the size of a result that is not wanted
_RESULTS = Sums._fields[:-1]  # all but the node
_INDICES = ("rank", "argmax")


def _wanted(r: Request) -> tuple[bool, ...]:
    """Which results of a request there are, in the order of `_RESULTS`."""
    valued, aimed, some = r.value is not None, r.target is not None, r.statistics
    return (
        True, True, True, some, r.level > 1, some, valued and not r.mean, valued and r.mean, aimed, aimed and r.rank,
        r.argmax,
    )  # fmt: skip


def _reduce(request: Request, backend: Backend | None) -> tuple[Tensor, ...]:
    """All results, each in memory of its own, as large as its shape: an operator's results may not share one."""
    check_values(request)
    sums = forward(request, backend)
    sums = sums._replace(peak=sums.peak.double())
    found = []
    for name in _RESULTS:
        x: Tensor | None = getattr(sums, name)
        if x is None:
            x = sums.mass.new_empty(_ABSENT, dtype=torch.int64 if name in _INDICES else None)
        alone = x.untyped_storage().nbytes() == x.numel() * x.itemsize
        found.append(x.contiguous() if alone else x.clone(memory_format=torch.contiguous_format))
    return tuple(found)


def _like_reduce(r: Request, _: Backend | None) -> tuple[Tensor, ...]:
    rows = (*r.batch, r.n_query)
    values = (*rows, 0 if r.value is None else r.value.shape[-1])
    shapes = {"statistics": (5, *rows), "moment": values, "mean": values}
    dtypes = {"peak": torch.float64, **dict.fromkeys(_INDICES, torch.int64)}
    return tuple(
        r.query.new_empty(shapes.get(name, rows) if there else (_ABSENT,), dtype=dtypes.get(name, r.dtype))
        for name, there in zip(_RESULTS, _wanted(r), strict=True)
    )


operators.define("reduce", "", f"({', '.join(['Tensor'] * len(_RESULTS))})", _reduce, _like_reduce)
operators.define(
    "reduce_backward",
    "Tensor peak, Tensor mass, Tensor? first, Tensor? second, Tensor? moment, Tensor? g_target, bool[] needs",
    "Tensor[]",
    _gradients,
    operators.like_gradients,
)


def traced(request: Request, backend: str) -> Sums:
    """The pass by the operator, with its derivative; a graph has no nodes."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        made: tuple[Tensor, ...] = TracedPass.apply(request.bare(), backend, *request.tensors())  # type: ignore[no-untyped-call]
    else:
        made = torch.ops.partita.reduce(*operators.arguments(request, backend))
    there = [x if wanted else None for x, wanted in zip(made, _wanted(request), strict=True)]
    return Sums._make([*there, None if torch.compiler.is_compiling() else made[1].grad_fn])


def _keep(ctx: Any, bare: Bare, backend: str, tensors: Tensors, out: Sequence[Tensor]) -> None:
    ctx.bare, ctx.backend, ctx.there = bare, backend, _wanted(bare.over(tensors))
    peak, mass, count, first, spread, _, _, mean, _, *indices = out
    ctx.mark_non_differentiable(peak, count, *indices)
    ctx.set_materialize_grads(False)
    some, varied, valued = ctx.there[3], ctx.there[4], ctx.there[7]
    sums = (peak, mass, first if some else None, spread if varied else None, mean if valued else None)
    ctx.save_for_backward(*tensors, *sums)


def _back(ctx: Any, needed: Sequence[bool], grads: Tensors) -> list[Tensor | None]:
    *tensors, peak, mass, first, spread, mean = ctx.saved_tensors
    _, g_mass, _, *above, _, _ = [g if wanted else None for g, wanted in zip(grads, ctx.there, strict=True)]
    needs = [*needed, *[False] * (len(tensors) - len(needed))]
    return pulled_back(ctx.bare, tensors, needs, (peak, mass, first, spread, mean), (g_mass, *above), ctx.backend)


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    bare, tensors, backend, _ = operators.read(inputs)
    _keep(ctx, bare, backend, tensors, output)


def _operator_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """In the shape of the operator's arguments: a list where they have one."""
    operands, rest = ctx.needs_input_grad[:5], ctx.needs_input_grad[5:]
    return (*_back(ctx, operands, grads)[:5], *[[None] * len(x) if isinstance(x, list) else None for x in rest])


library.register_autograd("partita::reduce", _operator_backward, setup_context=_setup_operator)


class TracedPass(torch.autograd.Function):
    """The operator under torch.func, which takes no operator's own derivative."""

    @staticmethod
    @operators.known_signature
    def forward(bare: Bare, backend: str, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = torch.ops.partita.reduce(*operators.arguments_of(bare, tensors, backend))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        bare, backend, *tensors = inputs
        _keep(ctx, bare, backend, tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *_back(ctx, ctx.needs_input_grad[2:], grads))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], bare: Bare, backend: str, *tensors: Tensor | None) -> tuple[Any, Any]:
        moved = [mapped_first(t, d) for t, d in zip(tensors, in_dims[2:], strict=True)]
        out = list(TracedPass.apply(bare, backend, *moved))  # type: ignore[no-untyped-call]
        out[5] = out[5].movedim(0, 1) if out[5].dim() > 1 else out[5]  # statistics: the mapped dimension first here too
        return tuple(out), tuple(None if t.dim() == 1 and t.shape[0] == 0 else 0 for t in out)


# ---- kernels that need fewer products than a pass and its backward ------------------------------------------------

# from the tensors, which of them need a gradient, and the upstream gradients; None where a kernel gives up
Back = Callable[[Tensors, Sequence[bool], Tensors], "Tensors | None"]


class FastPath(torch.autograd.Function):
    """A result with a way of its own back; `again`, the ordinary pass, where that gives up or is differentiated.

    make(needs) gives the results and a `Back`, or None.
    """

    @staticmethod
    def forward(
        ctx: Any, make: Callable[[Sequence[bool]], Any], again: Callable[..., Any], *tensors: Tensor | None
    ) -> Any:
        found = make(ctx.needs_input_grad[2:])
        ctx.save_for_backward(*tensors)
        ctx.again, ctx.exact = again, in_exact_rows()
        out, ctx.back = (again(*tensors), None) if found is None else found
        return out

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        with as_forward(ctx.exact):
            found = None if ctx.back is None or torch.is_grad_enabled() else ctx.back(tensors, needs, g)
            return (None, None, *(recomputed(ctx.again, tensors, needs, g) if found is None else found))


def computed_ahead(
    requests: Sequence[Request],
    weight: Tensor,
    kernel: Callable[..., Any],  # the operands that need a gradient, of each request: rows and gradients, or None
    ordinary: Callable[..., Tensor],  # the requests: rows, by a pass
) -> Tensor:  # ()
    """sum_i weight_i x_i of the rows of requests, its gradients computed in the forward pass."""
    tensors, bares = [], []
    for r in requests:
        tensors.append(r.tensors())
        bares.append(r.bare())
    places = [slice(end - len(t), end) for t, end in zip(tensors, itertools.accumulate(map(len, tensors)), strict=True)]
    kept: list[list[Tensor | None]] = []

    def back(_: Tensors, needs: Sequence[bool], above: Tensors) -> Tensors | None:
        # given away, not copied: the gradient of a vocabulary is the largest tensor here. A second backward through a
        # retained graph recomputes. A scalar that is differentiated itself has g = 1, which saves a pass over memory.
        (g,) = above
        assert g is not None
        if not kept:
            return None
        one = g.is_cpu and float(g) == 1.0
        return [x if x is None or one else x.mul_(g) for x in kept.pop()]

    def make(needs: Sequence[bool]) -> tuple[Tensor, Back] | None:
        found = kernel(*[needs[1:][at][: len(OPERANDS)] for at in places])
        if found is None:
            return None
        rows, *grads = found
        kept.append([None])
        for each, of in zip(tensors, grads, strict=True):
            kept[0] += [*[of.get(name) for name in OPERANDS], *[None] * (len(each) - len(OPERANDS))]
        return (weight * rows).sum(), back

    def again(weight: Tensor, *given: Tensor | None) -> Tensor:
        return (weight * ordinary(*[bare.over(given[at]) for bare, at in zip(bares, places, strict=True)])).sum()

    total: Tensor = FastPath.apply(make, again, weight, *itertools.chain(*tensors))  # type: ignore[no-untyped-call]
    return total


def serving_alone(operands: Tensors, request: Request, other: Request | None = None) -> Backend | None:
    """The backend whose kernels of losses serve, where a gradient and nothing else is wanted."""
    context = Context.of(operands)
    if context.traced or not context.needs_grad:
        return None
    with contextlib.suppress(BackendError):
        return choose(request, "", other, loss=True)
    return None
