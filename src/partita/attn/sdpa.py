"""Face 3: attention reads the mean value each query sees.

Dropout on weights is exact, and its mask is never held:

    out_i = 1/(1-p) * sum_j keep_ij p(j|i) value_j          P(keep_ij) = 1 - p

A dropped key stays in the denominator and loses its value: two states of disjoint keys, of which one has a moment, are
merged, so statistics are those before dropout. The backward pass remakes the mask from a seed of torch's generator.

Inference attention under torch.compile is one custom operator, which takes the fast path when the graph runs:

    partita::attention(query, key, value, scale, causal, grouped, statistics) -> (out, statistics of rows)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, library

from partita import support as supports
from partita._checks import check_float, check_kind, check_no_generator, finite
from partita._torch_function import overridable
from partita.attn.across import ShardedAttention
from partita.attn.positions import Bias
from partita.attn.problem import Problem, check_dropout, sink_per_row
from partita.collective import collective_of
from partita.engine import State, Stats
from partita.engine.autograd import recomputed
from partita.engine.dispatch import attention as plain_attention
from partita.engine.dispatch import execute
from partita.engine.request import build
from partita.errors import ValueRangeError
from partita.precision import accumulation_dtype, autocasts, output_dtype
from partita.recompute import states_by_rows
from partita.scale import Policy
from partita.score import Score
from partita.support import Support

__all__ = ["attention", "draw_seed", "finish"]


@overridable
def attention(
    query: Tensor,  # (..., heads, n_query, dim)
    key: Tensor,  # (..., heads, n_key, dim)
    value: Tensor,  # (..., heads, n_key, dim_value)
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | Policy | None = None,
    enable_gqa: bool = False,
    *,
    support: Support | None = None,
    bias: Tensor | Bias | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    return_stats: bool = False,
    group: object | None = None,
    score: Score | None = None,
) -> Tensor | tuple[Tensor, Any]:
    """The mean value each query sees: E[value_j] for j drawn from Gibbs(query, key).

        out_i = sum_j p(j|i) value_j          p(j|i) = exp(scale * <query_i, key_j> + bias_ij) / Z_i

    Equal to ``F.scaled_dot_product_attention`` in its own arguments, in O(n) memory; `scale` may also be a tensor
    broadcastable to the rows (..., n_query) or a policy of `partita.scale`. A query that sees nothing gives 0.

    >>> x = torch.eye(2)
    >>> attention(torch.zeros(2, 2), x, x)  # no preference: the mean of the values
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])

    bias: a tensor, or a rule over positions (`ALiBi`, `RelativeBias`) that is never written out whole.
    sink: a score per head, (heads,) or broadcastable to the rows, of a key with value 0 that joins the denominator.
    dropout_p: weights dropped at random, whatever the mode of any module; statistics are those before dropout.
    group: a torch.distributed group (or DeviceMesh) over which the sequence is spread: each rank passes its slice of
        query, key and value, in rank order or in that of `partita.distributed.zigzag(group)`, and gets the outputs and
        statistics of its own rows. Positions in supports and masks are those of the whole sequence. DDP averages a
        loss of a rank's own rows over ranks, as without a group: `for_ddp` is not needed.
    score: replaces <query, key>, as for `Gibbs`; `scale` None then means 1.
    """
    if group is not None:
        if score is not None:
            raise ValueRangeError("score= needs every row in one process; leave out group.")
        call = ShardedAttention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, support, bias, softcap, sink
        )  # fmt: skip
        mean, state = call.mean(collective_of(group), return_stats)
        return finish(state, value, sink, return_stats, mean)
    if type(dropout_p) is not float or dropout_p != 0.0:
        check_dropout(dropout_p)
    if (
        attn_mask is None and support is None and bias is None and softcap is None and sink is None
        and dropout_p == 0.0 and score is None
    ):  # fmt: skip
        compiling = torch.compiler.is_compiling()
        sharp: Any = scale.number if isinstance(scale, Policy) and not (is_causal or compiling) else scale
        if sharp is None or type(sharp) is float or sharp is not scale:
            plain = _in_graph if compiling else plain_attention
            found = plain(query, key, value, sharp, is_causal, enable_gqa, return_stats)
            if found is not None:
                return found if return_stats else found[0]
    if not isinstance(value, Tensor):
        check_float("value", value)
    problem = Problem.of(query, key, attn_mask, is_causal, support, bias, scale, softcap, score, enable_gqa)
    if dropout_p > 0.0:
        return finish(_with_dropout(problem, value, dropout_p), value, sink, return_stats)
    if problem.rule is not None:
        return finish(problem.resolved().state(value), value, sink, return_stats)
    if isinstance(problem.scale, Policy) or score is not None:
        sums = problem.gibbs().reduce(value, statistics=return_stats, mean=True)
    else:
        sums = execute(build(
            query, key, value, scale=problem.scale, bias=problem.bias, support=problem.support, softcap=softcap,
            grouped=enable_gqa, statistics=return_stats, mean=True,
        ))  # fmt: skip
    assert sums.mean is not None
    if sink is None and not return_stats:
        return sums.mean.to(output_dtype(value))
    return finish(sums.state, value, sink, return_stats, sums.mean)


def finish(
    state: State, value: Tensor, sink: Tensor | None, return_stats: bool, mean: Tensor | None = None
) -> Tensor | tuple[Tensor, Stats]:
    """The mean value, with a sink in its denominator, in the dtype torch would return."""
    out = state.expectation(consume=True) if mean is None else mean
    if sink is not None:
        out = out * (1 - state.sink_mass(sink_per_row(sink, state.mass)))[..., None]
    out = out.to(output_dtype(value))
    return (out, state.stats()) if return_stats else out


# ---- dropout --------------------------------------------------------------------------------------------------------


def _with_dropout(problem: Problem, value: Tensor, p: float) -> State:
    """The state of all keys, whose moment has lost the dropped values and makes up for them on average."""
    problem = problem.ready(value)
    batch = problem.batch(value)
    seed = draw_seed(value.device)

    def run(rows: slice) -> State:
        kept = _mask((*batch, rows.stop - rows.start, problem.n_key), p, seed, rows.start, value.device)
        loud = problem.rows(rows, also=supports.mask(kept)).gibbs().state(value)
        silent = problem.rows(rows, also=supports.mask(~kept)).gibbs().state()
        assert loud.moment is not None
        whole = loud.merge(replace(silent, moment=torch.zeros_like(loud.moment)))
        assert whole.moment is not None
        return replace(whole, moment=whole.moment * (1 / (1 - p) if p < 1 else 0.0))

    return states_by_rows(run, problem.blocks(value))


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> int | None:
    """A seed from torch's generator of that device, so that torch.manual_seed governs what follows.

    None while tracing: a graph has no seed to remember, it replays torch's own random numbers.
    """
    if generator is not None:
        check_kind("generator", generator, torch.Generator, "Make one: torch.Generator().manual_seed(0).")
    if torch.compiler.is_compiling():
        check_no_generator(generator)
        return None
    return int(torch.randint(1 << 62, (), device=device, generator=generator).item())


def _mask(shape: tuple[int, ...], p: float, seed: int | None, first: int, device: torch.device) -> Tensor:
    if seed is None:
        return torch.rand(shape, dtype=torch.float32, device=device) >= p
    source = torch.Generator(device).manual_seed(seed + first)
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - p, generator=source)


# ---- in a graph -----------------------------------------------------------------------------------------------------


def _in_graph(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool, grouped: bool, statistics: bool
) -> tuple[Tensor, Stats | None] | None:
    """As `plain_attention`, while a graph is traced; None for the general path, which serves it or raises.

    Here nothing broadcasts, nothing is converted, nothing is wrong, and the processor has a kernel for it.
    """
    if query.device.type != "cpu" or autocasts("cpu") or not (query.dim() == key.dim() == value.dim() >= 3):
        return None
    if not (query.dtype == key.dtype == value.dtype and query.is_floating_point()):
        return None
    if scale is not None and not finite(scale):
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None  # the general path saves what its backward needs
    q, k, v = query.shape, key.shape, value.shape
    heads = q[-3] % k[-3] == 0 if grouped and k[-3] > 0 else q[-3] == k[-3]
    if not (q[:-3] == k[:-3] and heads and q[-1] == k[-1] and k[:-1] == v[:-1]):
        return None
    out, rows = torch.ops.partita.attention(query, key, value, scale, causal, grouped, statistics)
    return out, Stats(*rows.unbind()) if statistics else None


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool, grouped: bool, statistics: bool
) -> tuple[Tensor, Tensor]:
    found: Any = attention(query, key, value, None, 0.0, causal, scale, grouped, return_stats=statistics)
    out, stats = found if statistics else (found, None)
    return out.contiguous(), out.new_empty(0) if stats is None else torch.stack(stats)


library.define(
    "partita::attention",
    "(Tensor query, Tensor key, Tensor value, float? scale, bool causal, bool grouped, bool statistics)"
    " -> (Tensor, Tensor)",
)
library.impl("partita::attention", "CompositeExplicitAutograd", _attention)


@library.register_fake("partita::attention")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, scale: Any, causal: bool, grouped: bool, statistics: bool) -> Any:
    rows, dtype = query.shape[:-1], accumulation_dtype(query.dtype)
    stats = query.new_empty((len(Stats._fields), *rows) if statistics else (0,), dtype=dtype)
    return value.new_empty((*rows, value.shape[-1])), stats


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of a program that was exported without them: the general path, from the start."""

    def again(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        results = _attention(query, key, value, *ctx.options)
        return tuple(x for x, g in zip(results, grads, strict=True) if g is not None)

    given = tuple(g for g in grads if g is not None)
    found = recomputed(again, ctx.saved_tensors, ctx.needs_input_grad[:3], given)
    return (*found, None, None, None, None)


library.register_autograd("partita::attention", _backward, setup_context=_remember)
