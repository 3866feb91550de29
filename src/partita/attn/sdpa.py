"""Face 3: attention reads the mean value each query sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita._overrides import overridable
from partita.attn.across import ShardedAttention
from partita.attn.bias import Bias
from partita.attn.dropout import check_dropout, state_with_dropout
from partita.attn.problem import Options, Problem, distribution
from partita.attn.rows import states_by_rows
from partita.attn.short import in_graph
from partita.attn.sink import sink_per_row
from partita.engine import State, Stats
from partita.errors import ValueRangeError
from partita.gibbs import Gibbs, plain_attention
from partita.precision import output_dtype
from partita.processes import processes_of
from partita.scale import Policy
from partita.score import Score
from partita.support import Support

__all__ = ["attention", "finish"]


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
    return_received: bool = False,
    group: object | None = None,
    score: Score | None = None,
) -> Tensor | tuple[Any, ...]:
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
    return_received: also what each key receives from all rows, (..., key heads, n_key), last in the result: the sums of
        the columns of the weights before dropout, a sink's share taken off (M-COL-1).
    group: a torch.distributed group (or DeviceMesh) over which the sequence is spread: each rank passes its slice of
        query, key and value, in rank order or in that of `partita.distributed.zigzag(group)`, and gets the outputs and
        statistics of its own rows. Supports and masks speak of positions in the whole sequence.
    score: what stands in the place of <query, key>, as for `Gibbs`; `scale` None then means 1.
    """
    if group is not None:
        if score is not None:
            raise ValueRangeError("score= needs every row in one process; leave out group.")
        if return_received:
            raise ValueRangeError("return_received needs every row in one process; leave out group.")
        call = ShardedAttention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, support, bias, softcap, sink
        )  # fmt: skip
        mean, state = call.mean(processes_of(group), return_stats)
        return finish(state, value, sink, return_stats, mean)
    check_dropout(dropout_p)
    if (
        attn_mask is None and support is None and bias is None and softcap is None and sink is None
        and dropout_p == 0.0 and score is None and not return_received
    ):  # fmt: skip
        compiling = torch.compiler.is_compiling()
        sharp: Any = scale.number if isinstance(scale, Policy) and not (is_causal or compiling) else scale
        if sharp is None or type(sharp) is float or sharp is not scale:
            plain = in_graph if compiling else plain_attention
            found = plain(query, key, value, sharp, is_causal, enable_gqa, return_stats)
            if found is not None:
                return found if return_stats else found[0]
    options: Options = {
        "attn_mask": attn_mask,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "support": support,
        "bias": bias,
        "softcap": softcap,
        "score": score,
    }
    if dropout_p == 0.0 and not isinstance(bias, Bias):
        p = distribution(query, key, **options)
        sums = p.reduce(value, statistics=return_stats or return_received, mean=True)
        assert sums.mean is not None
        if not return_stats and sink is None:
            out: Tensor | tuple[Tensor, Stats] = sums.mean.to(output_dtype(value))
        else:
            out = finish(sums.state, value, sink, return_stats, sums.mean)
        return _with(out, received_by_keys(p, sink)) if return_received else out
    problem = Problem.of(query, key, **options)
    if dropout_p > 0.0:
        out = finish(state_with_dropout(problem, value, dropout_p), value, sink, return_stats)
    else:
        known = problem.resolved()
        state = states_by_rows(lambda rows: known.rows(rows).state(value), known.blocks(value))
        out = finish(state, value, sink, return_stats)
    if not return_received:
        return out
    known = problem.resolved()
    parts = [received_by_keys(known.rows(rows), _sink_of(sink, rows)) for rows in known.blocks()]
    return _with(out, torch.stack(parts).sum(0))


def _with(out: Tensor | tuple[Tensor, Stats], received: Tensor) -> tuple[Any, ...]:
    return (out, received) if isinstance(out, Tensor) else (*out, received)


def _sink_of(sink: Tensor | None, rows: slice) -> Tensor | None:
    """Of some rows of a larger problem."""
    return sink[..., rows] if sink is not None and sink.dim() >= 2 and sink.shape[-1] > 1 else sink


def received_by_keys(p: Gibbs, sink: Tensor | None) -> Tensor:
    """What each key receives from the rows of p, less what a sink takes."""
    if sink is None:
        return p.received()
    state = p.state()
    return p.received(1 - state.sink_mass(sink_per_row(sink, state.mass)))


def finish(
    state: State, value: Tensor, sink: Tensor | None, return_stats: bool, mean: Tensor | None = None
) -> Tensor | tuple[Tensor, Stats]:
    """The mean value, with a sink in its denominator, in the dtype torch would return."""
    out = state.expectation(consume=True) if mean is None else mean
    if sink is not None:
        out = out * (1 - state.sink_mass(sink_per_row(sink, state.mass)))[..., None]
    out = out.to(output_dtype(value))
    return (out, state.stats()) if return_stats else out
