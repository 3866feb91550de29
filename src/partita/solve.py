"""The scale at which each row has a given entropy.

    find scale_i  with  H(scale_i * s_i) = target_i            dH / d log(scale) = -Var[scale * s]

Newton steps on log(scale) from streamed statistics, kept inside a bracket (M-SCL-10); one pass serves all rows. The
derivative is that of the implicit function, so no iteration is differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, library

from partita import _checks
from partita.engine import State
from partita.engine.axes import is_mapped, mapped_first
from partita.engine.callable_score import Pairs, compared
from partita.engine.dispatch import execute
from partita.engine.request import Bare, Request, build
from partita.engine.second import differentiable, gradient
from partita.engine.terms import pack, unpack
from partita.errors import ShapeError, ValueRangeError
from partita.precision import product
from partita.score import InnerProduct, Score
from partita.support import Support, mask
from partita.support.base import check_support

__all__ = ["as_mask", "only_hides", "solve_scale"]

_STEPS = 80
_SMALL = 1e-3
_GRID = 31  # scales tried from _SMALL to _REACH: steps of a factor 1.7
_REACH = 1e4  # the cap: scores spread over this many nats are as one-hot as they get


def solve_scale(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    *,
    entropy: float | Tensor | None = None,
    width: float | Tensor | None = None,
    support: Support | None = None,
    bias: Tensor | None = None,
    grouped: bool = False,
    score: Score | None = None,
    return_reached: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # (..., n_query)
    """The scale per row at which the entropy of Gibbs(query, key, scale=...) is `entropy`, or log(width).

        H(scale_i * <query_i, .>) = entropy_i          d scale / d s_j = -scale p_j (s_j - E[s]) / Var[s]

    A target above log(visible) gives scale 0; one below the entropy of the tied maxima gives a large finite cap; both
    without gradient.

    With a bias, which no scale multiplies, the entropy is not monotone in the scale and may reach the target several
    times, or never (M-DER-4). The smallest such scale is searched from 0 on in steps of a factor 1.7; without one, the
    scale of the nearest entropy is returned, without gradient. A bias of 0 and -inf is a mask; a graph takes no other.

    score: as for `Gibbs`.
    return_reached: also return which rows have their target, (..., n_query) boolean.

    >>> s = solve_scale(torch.ones(1, 1), torch.tensor([[1.0], [0.0]]), entropy=0.5623)  # p = (3/4, 1/4): log 3
    >>> round(s.item(), 2)
    1.1
    """
    if (entropy is None) == (width is None):
        raise ValueRangeError("give exactly one of entropy (nats) and width (keys).")
    check_support(support)
    if bias is not None:
        _checks.check_float("bias", bias)
    if bias is not None and only_hides(bias):
        support, bias = as_mask(bias, support), None
    query, key = compared(score, query, key)
    pairs = None if score is None or isinstance(score, InnerProduct) else Pairs.of(score)
    rows = build(query, key, support=support, grouped=grouped, pairs=pairs, bias=bias)
    if pairs is not None:
        if torch.compiler.is_compiling():
            raise ValueRangeError("inside a graph a scale is solved for scores that are inner products, no others.")
        pairs.check(rows)
    count = rows.visible()
    target = _target(entropy, width, rows.ungroup(count)).reshape(count.shape)
    split = replace(rows, groups=1)  # the heads of grouped queries stay separate, as in the count
    still = None if split.bias is None else split.bias.detach()
    quiet = replace(split, query=split.query.detach(), key=split.key.detach(), bias=still)
    solved, reached = _solve(quiet, target.detach(), count)
    if torch.is_grad_enabled() and [1 for t in (target, *rows.tensors()) if t is not None and t.requires_grad]:
        if torch.compiler.is_compiling():  # a compiled graph has no second derivative
            solved = _followed(split, solved, reached, target)
        else:
            solved = _Solved.apply(split.bare(), solved, reached, target, *split.tensors())  # type: ignore[no-untyped-call]
    found = rows.ungroup(solved)
    return (found, rows.ungroup(reached)) if return_reached else found


def only_hides(bias: Tensor) -> bool:
    """Whether a bias is a mask, of 0 and -inf; a graph checks it when it runs."""
    if torch.compiler.is_compiling() or not _checks.concrete(bias):
        return True
    return bool(((bias == 0) | (bias == -torch.inf)).all())


def _followed(rows: Request, solved: Tensor, reached: Tensor, target: Tensor, order: int = 1) -> Tensor:
    """The solved scale with `order` derivatives: Newton steps of length 0, with a constant slope, that torch
    differentiates."""
    slope = None
    for _ in range(order):
        state = _at(rows, solved)
        if slope is None and rows.bias is None:
            slope = (state.score_variance() / solved.clamp(min=torch.finfo(solved.dtype).tiny)).detach()
        elif slope is None:
            slope = _slope(rows, solved)
        miss = state.entropy() - target
        step = (miss - miss.detach()) / torch.where(reached, slope, torch.ones_like(slope))
        solved = solved + torch.where(reached, step, torch.zeros_like(step))
    return solved


class _Solved(torch.autograd.Function):
    """The solved scale; its gradient is that of one step, its second derivative that of two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Bare, solved: Tensor, reached: Tensor, *operands: Tensor | None) -> Tensor:
        return solved.view_as(solved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rows, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        solved, reached, *operands = ctx.saved_tensors
        needs, rows = ctx.needs_input_grad[3:], ctx.rows

        def first(g: Tensor, solved: Tensor, reached: Tensor, *given: Tensor | None) -> list[Tensor]:
            def once(target: Tensor, *own: Tensor | None) -> Tensor:
                return _followed(rows.over(own), solved, reached, target)

            return gradient(once, needs, g, given)

        def again(target: Tensor, *own: Tensor | None) -> Tensor:
            return _followed(rows.over(own), solved, reached, target, order=2)

        found = iter(differentiable(first, again, needs, g, (solved, reached), operands))
        return (None, None, None, *(next(found) if needed else None for needed in needs))


def _slope(rows: Request, scale: Tensor) -> Tensor:
    """-dH / d scale of each row with a bias: Cov[z, s] instead of a variance."""
    given = {name: getattr(rows, name) for name in ("query", "key", "bias")}
    rows = replace(rows, **{name: x.detach() for name, x in given.items() if x is not None})
    at = scale.detach()
    (grad,) = gradient(lambda at: _at(rows, at).entropy(), (True,), torch.ones_like(at), (at,))
    return -grad


def as_mask(bias: Tensor, support: Support | None) -> Support:
    """A bias that only hides keys, as a support."""
    shown = torch.ops.partita.shown(bias.detach()) if torch.compiler.is_compiling() else _shown(bias)
    return mask(shown) if support is None else support & mask(shown)


def _shown(bias: Tensor) -> Tensor:
    if _checks.concrete(bias) and only_hides(bias):
        return bias == 0
    raise ValueRangeError(
        "with a bias the entropy is not monotone in the scale, so no scale is solved for inside a graph; "
        "hide keys with a support, or solve outside of the graph."
    )


def _target(entropy: float | Tensor | None, width: float | Tensor | None, n: Tensor) -> Tensor:
    for name, number in (("entropy", entropy), ("width", width)):
        if number is not None and not isinstance(number, Tensor):
            _checks.check_number(name, number)
    given = torch.as_tensor(entropy if width is None else width, dtype=n.dtype, device=n.device)
    least, limit = (0, "entropy must not be negative") if width is None else (1, "width must be at least 1 key")
    _check_least(given, least, limit)
    if not _checks.expands(given.shape, n.shape):
        shapes = _checks.shape_text(n), _checks.shape_text(given)
        raise ShapeError(f"the target must broadcast to the rows {shapes[0]}; got {shapes[1]}.")
    return (given if width is None else given.log()).expand_as(n)


def _check_least(given: Tensor, least: float, limit: str) -> None:
    if _checks.has_values(given) and not bool((given >= least).all()):
        raise ValueRangeError(f"{limit}; got a smallest value of {float(given.detach().min())}.")


def _score_deviation(rows: Request, n: Tensor) -> Tensor:
    """Standard deviation of each row's scores over all keys, from the keys' covariance: a starting point."""
    if rows.pairs is not None:  # at a small scale all keys weigh the same
        found = (_at(rows, torch.full_like(n, _SMALL)).score_variance().sqrt() / _SMALL).nan_to_num(1.0, 1.0, 1.0)
        return torch.where(found > 0, found, torch.ones_like(found))
    q, k = rows.query.to(n.dtype), rows.key.to(n.dtype).nan_to_num(0.0, 0.0, 0.0)
    if k.shape[-2] == 0:
        return torch.ones_like(n)
    k = k - k.mean(-2, keepdim=True)
    covariance = product(k.mT, k) / k.shape[-2]
    longest = k.norm(dim=-1).amax(-1, keepdim=True)
    variance = (product(q, covariance) * q).sum(-1).clamp(min=0.0)
    sigma = variance.sqrt().nan_to_num(1.0, 1.0, 1.0)
    size = q.norm(dim=-1).nan_to_num(1.0, 1.0, 1.0) * longest
    tiny = torch.finfo(n.dtype).eps * size + torch.finfo(n.dtype).tiny
    return torch.where(sigma > tiny, sigma, torch.ones_like(sigma)).expand_as(n)


def _at(rows: Request, scale: Tensor) -> State:
    """The rows at another scale."""
    return execute(replace(rows, scale=scale)).state


def _solve(rows: Request, target: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of every row, and whether its target is within reach; one operator in a graph."""
    mapped = [1 for x in (rows.query, rows.key, target, n) if is_mapped(x)]
    if mapped and rows.pairs is not None:
        raise ValueRangeError(
            "under vmap a scale is solved for scores that are inner products, no others; give the whole batch at once, "
            "without vmap."
        )
    if torch.compiler.is_compiling() or mapped:
        support, layout = pack(rows.terms)
        scale, reached = torch.ops.partita.solve_scale(rows.query, rows.key, support, layout, target, n)
        return scale, reached
    search = _search if rows.bias is None else _search_with_bias
    with torch.no_grad():
        return search(rows, target, n)


def _search_with_bias(rows: Request, target: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the smallest scale found at which the entropy crosses the target, and whether there is one."""
    sigma = _score_deviation(rows, n)
    tolerance = 1e-10 if n.dtype == torch.float64 else 2e-6

    def miss_at(scale: Tensor) -> Tensor:
        return _at(rows, scale).entropy() - target

    low = torch.zeros_like(n)
    miss = miss_at(low)
    best, least = low, miss.abs()
    found = miss.abs() <= tolerance * (1 + target)
    high, side = low, miss.sign()
    waiting = ~found
    edge = low
    grid = torch.logspace(math.log10(_SMALL), math.log10(_REACH), _GRID, dtype=torch.float64, device="cpu")
    for step in grid.tolist():
        here = step / sigma
        miss = miss_at(here)
        nearer = miss.abs() < least
        best, least = torch.where(nearer, here, best), torch.where(nearer, miss.abs(), least)
        passed = waiting & (miss.sign() != side)
        low, high = torch.where(passed, edge, low), torch.where(passed, here, high)
        waiting, edge = waiting & ~passed, here
        if not bool(waiting.any()):
            break
    reached = ~waiting
    for _ in range(_STEPS):
        middle = (low + high) / 2
        miss = miss_at(torch.where(reached & ~found, middle, best))
        close = miss.abs() <= tolerance * (1 + target)
        nearer = reached & ~found & (miss.abs() < least)
        best, least = torch.where(nearer, middle, best), torch.where(nearer, miss.abs(), least)
        found = found | (reached & close) | miss.isnan()
        if bool((found | ~reached).all()):
            break
        before = miss.sign() == side
        low, high = torch.where(before, middle, low), torch.where(before, high, middle)
    return best, reached


def _search(rows: Request, target: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Safeguarded Newton on log(scale); returns the scale and whether the target is within reach."""
    sigma = _score_deviation(rows, n)
    ceiling = n.clamp(min=1).log()
    # a target within rounding of log n needs no sharpness at all
    flat = target >= ceiling - 4 * torch.finfo(n.dtype).eps * ceiling
    tolerance = 1e-10 if n.dtype == torch.float64 else 2e-6
    cap = (_REACH / sigma).log()
    start = (2 * (ceiling - target).clamp(min=1e-12)).sqrt() / sigma
    x = start.log().clamp(max=cap)
    low = torch.full_like(x, -torch.inf)  # here the entropy is above the target
    high = torch.full_like(x, torch.inf)  # here it is below
    done = flat.clone()
    capped = torch.zeros_like(flat)
    best, least = x, torch.full_like(x, torch.inf)  # in float32 a row may reach its noise before the tolerance
    for _ in range(_STEPS):
        state = _at(rows, torch.where(flat, torch.zeros_like(x), x.exp()))
        miss = state.entropy() - target
        close = miss.abs() <= tolerance * (1 + target)
        nearer = miss.abs() < least
        best, least = torch.where(nearer, x, best), torch.where(nearer, miss.abs(), least)
        capped = capped | (~done & (miss > 0) & ~close & (x >= cap))
        done = done | close | capped | miss.isnan()
        if bool(done.all()):
            break
        low = torch.where(miss > 0, torch.maximum(low, x), low)
        high = torch.where(miss < 0, torch.minimum(high, x), high)
        step = x + (miss / state.score_variance()).clamp(-2.0, 2.0)
        middle = torch.where(low.isinf(), high - 1.5, torch.where(high.isinf(), low + 1.5, (low + high) / 2))
        inside = (step > low) & (step < high)  # false also where the step is nan
        following = torch.where(inside, step, middle).clamp(max=cap)
        x = torch.where(done, x, following)
    scale = torch.where(flat, torch.zeros_like(x), torch.where(capped, x, best).exp())
    return scale, ~flat & ~capped


# ---- operators ------------------------------------------------------------------------------------------------------

library.define(
    "partita::solve_scale",
    "(Tensor query, Tensor key, Tensor[] support, int[] layout, Tensor target, Tensor n) -> (Tensor, Tensor)",
)
library.define("partita::shown", "(Tensor bias) -> Tensor")
library.impl("partita::shown", "CompositeExplicitAutograd", _shown)


@library.impl("partita::solve_scale", "CompositeExplicitAutograd")
def _(
    query: Tensor, key: Tensor, support: Sequence[Tensor], layout: Sequence[int], target: Tensor, n: Tensor
) -> tuple[Tensor, Tensor]:
    _check_least(target, 0, "the entropy aimed at must not be negative")
    rows = Request(query, key, None, torch.ones_like(n), None, None, unpack(support, layout), None)
    with torch.no_grad():
        return _search(rows, target, n)


def _mapped(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """vmap: one more batch dimension, in front."""
    query, key, support, layout, target, n = arguments
    query, key, target, n = (
        mapped_first(t, d, info.batch_size)
        for t, d in zip((query, key, target, n), (*in_dims[:2], *in_dims[4:]), strict=True)
    )
    support = [mapped_first(t, d) for t, d in zip(support, in_dims[2], strict=True)]
    return torch.ops.partita.solve_scale(query, key, support, layout, target, n), (0, 0)


library.register_vmap("partita::solve_scale", _mapped)


@library.register_fake("partita::solve_scale")  # type: ignore[untyped-decorator]
def _(
    query: Tensor, key: Tensor, support: Sequence[Tensor], layout: Sequence[int], target: Tensor, n: Tensor
) -> tuple[Tensor, Tensor]:
    return n.new_empty(n.shape), n.new_empty(n.shape, dtype=torch.bool)


@library.register_fake("partita::shown")  # type: ignore[untyped-decorator]
def _(bias: Tensor) -> Tensor:
    return bias.new_empty(bias.shape, dtype=torch.bool)
