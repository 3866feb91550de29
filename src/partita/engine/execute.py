"""The only door: it decides who follows a pass, and takes the shortest way that nobody can tell from the long one.

    execute(request)        the row sums; differentiable
    attention(...)          plain attention that nobody follows, straight to a backend's own kernel
    weighted_nll(request)   a scalar, its gradients made going forward where a backend can
    both_ways(request)      nll of the diagonal by rows and by columns of one product, where a backend can
    received(request)       what each key gets from all rows: the other margin; differentiable
    divergence(p, q)        of two distributions over the same keys, per row; differentiable
    weighted_divergence     a scalar of those, its gradients made going forward where a backend can
    accumulate(totals)      statistics of rows added up by heads, where a backend can
    accumulate_attention    those of plain attention that nobody follows, likewise
    forward, backward       one pass and its gradients without autograd, for those who bring their own (the ring)
    top, sample             keys chosen by their scores, tile by tile
    gaps                    keys counted by how near they score to the best
    scores                  the scores themselves, all at once

Who may follow: autograd, a transform of torch.func or forward mode (they *differentiate*); a tracer, a dispatch mode, a
profiler, a tensor subclass (they *look* at operators). If nobody does, a backend is called as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from partita.engine import autograd, backends, selection
from partita.engine.autograd import backward, forward
from partita.engine.backends import tiled
from partita.engine.fused import BothWaysNll, WeightedDivergence, WeightedNll
from partita.engine.gaps import gaps as count_gaps
from partita.engine.pair import Divergence, Question
from partita.engine.pairs import written_out
from partita.engine.received import Received, columns
from partita.engine.request import Request
from partita.engine.scored import ScoredDivergence, ScoredPass, ScoredReceived, own_operands, with_operands
from partita.engine.state import Stats, divided
from partita.engine.sums import Sums
from partita.precision import autocasts

__all__ = [
    "accumulate",
    "accumulate_attention",
    "attention",
    "backward",
    "both_ways",
    "divergence",
    "execute",
    "forward",
    "received",
    "sample",
    "scores",
    "gaps",
    "top",
    "weighted_divergence",
    "weighted_nll",
]

_ORDINARY = (Tensor, torch.nn.Parameter)


class _Audience(NamedTuple):
    """Who follows a pass."""

    differentiates: bool  # autograd, a transform or forward mode
    looks: bool  # at operators


def _audience(tensors: Sequence[Tensor | None]) -> _Audience:
    """The one place where it is asked whether anybody differentiates, traces or looks."""
    if torch.compiler.is_compiling():  # the operator brings its own derivative
        return _Audience(False, True)
    recorded, ordinary, grad = False, True, torch.is_grad_enabled()
    for t in tensors:  # a plain loop: this is asked of every call, and most calls are short
        if t is not None:
            recorded = recorded or (grad and t.requires_grad)
            ordinary = ordinary and type(t) in _ORDINARY and not t.is_meta  # meta: shapes alone
    # in forward mode too the Function is asked: it has no such derivative and says so, where a backend would lose it
    transforms = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    looks = (
        transforms
        or torch._C._len_torch_dispatch_stack() != 0
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or not ordinary
    )
    return _Audience(recorded or transforms, looks)


def execute(request: Request) -> Sums:
    """One differentiable pass over a request."""
    r = _traceable(request)
    if r.pairs is not None:
        return _scored(r)
    audience = _audience((r.query, r.key, r.value, r.scale, r.bias))
    if not audience.differentiates and not audience.looks:
        return _ungrouped(forward(replace(r, last=True)), r)
    plan, tensors = autograd.Plan.of(r, _named(r))
    if not audience.differentiates:
        return _ungrouped(autograd.assemble(autograd.reduce(plan, tensors), r), r)
    out = autograd.Pass.apply(plan, None if audience.looks else r, *tensors)  # type: ignore[no-untyped-call]
    return _ungrouped(autograd.assemble(out, r, out[1].grad_fn), r)


def _traceable(request: Request) -> Request:
    """Whoever transforms or traces cannot be told of a function of tiles: its scores are written out."""
    if request.pairs is None:
        return request
    tensors = own_operands(request)
    inside = torch.compiler.is_compiling() or (_audience(tensors).looks and not torch._C._autograd._profiler_enabled())
    return written_out(request) if inside else request


def _scored(request: Request) -> Sums:
    """A pass whose score is a function of tiles."""
    r, operands = request, own_operands(request)
    if not _audience(operands).differentiates:
        return _ungrouped(forward(replace(r, last=True)), r)

    def again(*given: Tensor | None) -> tuple[Tensor | None, ...]:
        asked = replace(with_operands(r, given), groups=1)
        return autograd.results(execute(written_out(asked)))

    out = ScoredPass.apply(r, again, *operands)  # type: ignore[no-untyped-call]
    return _ungrouped(autograd.assemble(out, r, out[1].grad_fn), r)


def _named(request: Request, other: Request | None = None) -> str:
    """The backend the user named; one that cannot serve says so now. "": chosen when the pass runs."""
    if torch.compiler.is_compiling():
        return ""
    name = backends.current()
    if name != "auto":
        backends.choose(request, name, other)
    return name


def received(request: Request, peak: Tensor, mass: Tensor, weight: Tensor) -> Tensor:  # (*b, K)
    """sum_i weight_i p(j|i), for the peak and mass of the rows that a pass gave; groups of queries add up."""
    r, shared = _traceable(request), request.groups > 1
    if r.pairs is not None:
        out = _scored_received(r, peak, mass, weight, shared)
        return out.squeeze(-2) if shared else out
    audience = _audience((r.query, r.key, r.scale, r.bias, weight))
    if not audience.differentiates and not audience.looks:
        out = columns(r, "", peak, divided(weight, mass), shared)
    else:
        plan, tensors = autograd.Plan.of(r, _named(r))
        asked = None if audience.looks else r
        given = _apart(tensors)
        function = _applied(Received, (*tensors, weight))
        out = function(plan, asked, shared, peak, mass, weight, *given)
    return out.squeeze(-2) if shared else out


def _scored_received(request: Request, peak: Tensor, mass: Tensor, weight: Tensor, shared: bool) -> Tensor:
    r, operands = request, own_operands(request)
    if not _audience((*operands, weight)).differentiates:
        return columns(r, "", peak, divided(weight, mass), shared)

    def mean(g: Tensor, weight: Tensor, *given: Tensor | None) -> Tensor:
        value = g[..., None].to(r.query.dtype)
        asked = replace(with_operands(r, given), value=value, statistics=False, mean=True, groups=1)
        seen = execute(asked).mean
        assert seen is not None
        return (weight * seen[..., 0]).sum()

    out: Tensor = ScoredReceived.apply(r, mean, shared, peak, mass, weight, *operands)  # type: ignore[no-untyped-call]
    return out


def _applied(function: type[torch.autograd.Function], tensors: Sequence[Tensor | None]) -> Any:
    """The function with its derivative; in a graph that needs none without, since there torch takes it for another."""
    quiet = not torch.is_grad_enabled() or not [1 for t in tensors if t is not None and t.requires_grad]
    return function.forward if torch.compiler.is_compiling() and quiet else function.apply


def _apart(tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """While tracing a view of each: a graph takes no autograd function that is given one tensor twice."""
    if not torch.compiler.is_compiling():
        return tensors
    return [None if t is None else t.view_as(t) for t in tensors]


def divergence(p: Request, q: Request, kind: str, beta: float) -> Tensor:  # (*b, Q)
    """The divergence of every row of two requests with the same number of batch dimensions, rows and keys."""
    p, q = _traceable(p), _traceable(q)
    if p.pairs is not None or q.pairs is not None:
        one, other = own_operands(p), own_operands(q)
        call = (p, q, kind, beta, len(one))
        rows: Tensor = ScoredDivergence.apply(*call, *one, *other)  # type: ignore[no-untyped-call]
        return p.ungroup(rows)
    audience = _audience((p.query, p.key, p.scale, p.bias, q.query, q.key, q.scale, q.bias))
    ask, tensors = Question.of(p, q, kind, beta, _named(p, q))
    requests = None if audience.looks else (p, q)
    seen = audience.differentiates or audience.looks
    function = _applied(Divergence, tensors) if seen else Divergence.forward
    out: Tensor = function(ask, requests, *_apart(tensors))[0]
    return p.ungroup(out)


def weighted_divergence(p: Request, q: Request, kind: str, beta: float, weight: Tensor) -> Tensor:  # ()
    """sum_i weight_i divergence_i; the weights have no gradient."""
    operands = (p.query, p.key, p.scale, p.bias, q.query, q.key, q.scale, q.bias)
    backend = _kernel("divergences", p, operands, q)
    if backend is not None and backend.divergences.weighted is not None:

        def again(*given: Tensor | None) -> Tensor:
            one, other = (replace(r, **_named_operands(x)) for r, x in ((p, given[:4]), (q, given[4:])))
            return (weight * divergence(one, other, kind, beta)).sum()

        call = (backend.divergences, again, p, q, kind, beta, weight)
        out: Tensor = WeightedDivergence.apply(*call, *operands)  # type: ignore[no-untyped-call]
        return out
    return (weight * divergence(p, q, kind, beta)).sum()


def _named_operands(given: Sequence[Tensor | None]) -> dict[str, Any]:
    return dict(zip(("query", "key", "scale", "bias"), given, strict=True))


def _ungrouped(sums: Sums, request: Request) -> Sums:
    """The rows of grouped queries with their heads in one dimension again."""
    if request.groups == 1:
        return sums

    def flat(rows: Tensor | None, tail: int = 0) -> Any:
        return None if rows is None else request.ungroup(rows, tail)

    by_value = ("moment", "mean")
    made = {name: flat(x, name in by_value) for name, x in sums._asdict().items() if name != "node"}
    return Sums(**made, node=sums.node)


# ---- kernels of a backend's own -------------------------------------------------------------------------------------


def attention(
    query: Tensor,  # (*b, heads, Q, D)
    key: Tensor,  # (*b, heads or fewer, K, D)
    value: Tensor,  # (*b, as key, K, V)
    scale: float | Callable[[int, int], float | None] | None,  # None: 1/sqrt(D); or what makes it of K and D
    causal: bool,
    grouped: bool,
    statistics: bool,
) -> tuple[Tensor, Stats | None] | None:
    """E[value_j] of each row, lying in memory as the query does, and the rows' statistics; None for the long way.

    For a short sequence a request and its checks cost as much as the pass. Here only what is usual is looked for;
    whatever else is given goes the long way, which serves it or says what is wrong with it.
    """
    if torch.compiler.is_compiling() or not (type(query) is type(key) is type(value) is Tensor) or query.dim() < 3:
        return None
    audience = _audience((query, key, value))
    if audience.differentiates or audience.looks or autocasts(query.device.type):
        return None
    if key.dim() < 3 or (not grouped and query.shape[-3] != key.shape[-3]):
        return None
    if callable(scale):
        sharp = scale(key.shape[-2], query.shape[-1]) if query.shape[-1] else None
    else:
        sharp = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    if sharp is None:
        return None
    for entry in backends.asked():
        if entry.attention is not None:
            found = entry.attention(query, key, value, sharp, causal, statistics)
            if found is not None:
                return found
    return None


def weighted_nll(request: Request, weight: Tensor) -> Tensor:  # ()
    """sum_i weight_i nll_i of a request with a target."""
    r = request
    operands = (r.query, r.key, r.scale, r.bias)
    flat = r.query.dim() == 2 and not weight.requires_grad
    backend = _kernel("weighted_nll", r, operands) if flat else None
    if backend is not None:
        out: Tensor = WeightedNll.apply(backend, _again(r), r, weight, *operands)  # type: ignore[no-untyped-call]
        return out
    return (weight * execute(r).nll()).sum()


def _again(request: Request) -> Any:
    softcap, cap_bias, terms = request.softcap, request.cap_bias, request.terms
    assert request.pairs is None  # no backend has a kernel for it

    def ordinary(
        query: Tensor, key: Tensor, scale: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor
    ) -> Tensor:
        asked = Request(query, key, None, scale, bias, target, terms, softcap, cap_bias, statistics=False)
        return (weight * execute(asked).nll()).sum()

    return ordinary


def both_ways(request: Request) -> tuple[Tensor, Tensor]:  # (n,), (n,)
    """-log p(i|i) of key i among the keys for query i, and of query i among the queries for key i."""
    r = request
    operands = (r.query, r.key, r.scale)
    if r.pairs is not None:
        asked = replace(r, target=_own(r.query), statistics=False)
        turned = replace(asked, query=r.key, key=r.query, bias=None if r.bias is None else r.bias.mT)
        turned = replace(turned, target=_own(r.key), pairs=r.pairs.turned())
        return execute(asked).nll(), execute(turned).nll()
    plain = r.query.dim() == 2 and r.n_query == r.n_key > 0 and r.scale.numel() == 1 and r.bias is None
    backend = _kernel("both_ways", r, operands) if plain and not r.terms and r.softcap is None else None
    if backend is not None:
        quiet = replace(r, query=r.query.detach(), key=r.key.detach(), scale=r.scale.detach(), target=_own(r.query))
        rows, columns = BothWaysNll.apply(backend, _diagonal, quiet, *operands)  # type: ignore[no-untyped-call]
        return rows, columns
    return _diagonal(*operands, r.bias)


def _own(rows: Tensor) -> Tensor:  # (*b, n)
    return torch.arange(rows.shape[-2], device=rows.device).expand(rows.shape[:-1])


def _diagonal(query: Tensor, key: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Two ordinary passes."""
    asked = Request(query, key, None, scale, bias, _own(query), (), None, statistics=False)
    turned = replace(asked, query=key, key=query, bias=None if bias is None else bias.mT, target=_own(key))
    return execute(asked).nll(), execute(turned).nll()


def _kernel(
    name: str, request: Request, operands: Sequence[Tensor | None], other: Request | None = None
) -> backends.Backend | None:
    """The backend whose own kernel of this name is asked, for somebody who wants a gradient and nothing else."""
    audience = _audience(operands)
    if audience.looks or not audience.differentiates:
        return None
    named, requests = backends.current() != "auto", (request,) if other is None else (request, other)
    for entry in backends.asked():
        if all((entry.refuses(r, loss=True) or (None if named else entry.unasked(r))) is None for r in requests):
            return entry if getattr(entry, name) is not None else None
    return None


def accumulate(totals: Sequence[Tensor], *rows: Any) -> bool:
    """Add statistics of rows to the totals of their heads; False, and nothing done, where no backend has a kernel."""
    kernels = (entry.accumulate for entry in backends.TABLE.values() if entry.accumulate is not None)
    return any(kernel(totals, *rows) for kernel in kernels)


def accumulate_attention(
    totals: Sequence[Tensor],
    query: Tensor,  # (batch, heads, Q, D)
    key: Tensor,  # (batch, heads or a divisor, K, D)
    scale: float,
    causal: bool,
    keep: Tensor | None,  # (batch, Q) bool
) -> bool:
    """Add the statistics of plain attention; False, and nothing done, for the long way: a pass, then `accumulate`."""
    if torch.compiler.is_compiling() or type(query) is not Tensor or type(key) is not Tensor:
        return False
    if any(_audience((query, key))) or autocasts(query.device.type):
        return False
    kernels = (entry.accumulate_attention for entry in backends.asked() if entry.accumulate_attention is not None)
    return any(kernel(totals, query, key, scale, causal, keep) for kernel in kernels)


# ---- the scores themselves ------------------------------------------------------------------------------------------


def sample(request: Request, generator: torch.Generator | None = None) -> Tensor:  # (*b, Q)
    """One key per row, drawn; -1 on an empty row."""
    return selection.sample(_traceable(request), generator)


def top(request: Request, k: int) -> tuple[Tensor, Tensor]:  # (*b, Q, k) each
    """The k best scores and their keys, best first, without a gradient; past the visible keys -inf and -1."""
    r = _traceable(request)
    return selection.top(r, k, kernels=not _audience((r.query, r.key, r.scale, r.bias)).looks)


def gaps(request: Request, edges: Sequence[float] | Tensor) -> Tensor:  # (*b, Q, E) int64
    """How many visible keys score within each edge of their row's largest score, without a gradient."""
    r = request
    return count_gaps(r, edges, kernels=not _audience((r.query, r.key, r.scale, r.bias)).looks)


def scores(request: Request) -> Tensor:  # (*b, Q, K)
    """All scores at once, differentiable: the one dense thing here; parameters of a score get theirs from torch."""
    return tiled.scores_whole(request)
