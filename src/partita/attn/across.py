"""Attention over a sequence spread over processes: every rank holds a slice of queries, keys and values.

    out_i = sum_j p(j|i) value_j        i among this rank's positions, j among all

Supports, lengths, segment ids and boolean masks speak of positions in the whole sequence. A bias or mask may have a row
for each position of the whole or for each of this rank's; its columns are always those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita import _checks
from partita import support as supports
from partita.attn.bias import Bias
from partita.attn.problem import Problem, both
from partita.distributed import Fact, Layout, Ring, Team, Visibility, joint_checks, meet
from partita.engine import State
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.scale import Policy, TargetEntropy
from partita.support import Support

__all__ = ["Spread", "mean_across"]


@dataclass(frozen=True, eq=False)
class Spread:
    """One rank's arguments of a call that all ranks make."""

    query: Tensor  # (..., heads, n_query, dim), of this rank
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | Tensor | Policy | None
    grouped: bool
    support: Support | None
    bias: Tensor | Bias | None
    softcap: float | None

    def check(self) -> Problem:
        """What can be said before the ranks have met; the mask and the bias wait until the whole length is known."""
        if self.dropout_p > 0.0:
            raise ValueRangeError("dropout_p has no form over a group; drop values or outputs instead.")
        if isinstance(self.bias, Bias):
            raise ValueRangeError("a position rule (ALiBi, RelativeBias) has no form over a group; give a bias tensor.")
        if isinstance(self.scale, TargetEntropy):
            raise ValueRangeError(
                "TargetEntropy solves each row with all keys at hand and has no form over a group; "
                "use a policy of the visible keys (LogLength, KappaLog, ...)."
            )
        mask = self.attn_mask
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise DtypeError(f"attn_mask must be boolean (True = visible) or floating (added); got {mask.dtype}.")
        _checks.check_value(self.value, self.key)
        fixed = None if isinstance(self.scale, Policy) else self.scale
        problem = Problem.of(self.query, self.key, scale=fixed, softcap=self.softcap, enable_gqa=self.grouped)
        problem.gibbs()  # the engine's own checks
        problem.batch(self.value)
        return problem

    def facts(self) -> dict[str, Fact]:
        """What must be the same on every rank."""
        grad = torch.is_grad_enabled()
        scale = self.scale
        given = (self.query, self.key, self.value, self.bias, self.attn_mask, scale)
        learned = isinstance(scale, torch.nn.Module) and any(p.requires_grad for p in scale.parameters())
        needed = learned or any(isinstance(t, Tensor) and t.requires_grad for t in given)
        return {
            "the dtype": self.query.dtype,
            "the dimensions of query but its length": _but_length(self.query),
            "the dimensions of key but its length": _but_length(self.key),
            "the dimensions of value but its length": _but_length(self.value),
            "scale": type(scale).__name__ if isinstance(scale, Policy) else scale,
            "softcap": self.softcap,
            "whether there is a support": self.support is not None,
            "whether there is a mask": self.attn_mask is not None,
            "whether there is a bias": self.bias is not None,
            "whether key needs a gradient": grad and self.key.requires_grad,
            "whether value needs a gradient": grad and self.value.requires_grad,
            "whether anything needs a gradient": grad and needed,
        }


def _but_length(tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape[:-2], tensor.shape[-1])


def mean_across(team: Team, call: Spread, statistics: bool) -> tuple[Tensor, State]:
    """The mean value of this rank's rows over the keys and values of all ranks, and the state without it."""
    with joint_checks(team):
        problem = call.check()
    rules = (call.is_causal, call.grouped, statistics, team.zigzag)
    facts = call.facts()
    table = meet(team, f"attention {rules}", [problem.n_query, problem.n_key], facts)
    rows, keys = (Layout.of(sizes, team.zigzag) for sizes in zip(*table, strict=True))
    at = rows.positions(team.rank, call.query.device)

    support = both(call.support, supports.causal()) if call.is_causal else call.support
    bias, mask = _bias_and_mask(call, rows, keys, at)
    batch = _batch(problem, call.value, bias, mask)
    terms = () if support is None else support.bind(rows.total, keys.total, batch, call.query.device)
    seen = Visibility.of(terms, rows.total, keys.total, batch, call.query.device).cut(rows=at)
    seen = seen if mask is None else seen.also(mask)

    scale = problem.scale
    if isinstance(call.scale, Policy):
        counted = seen if bias is None else seen.also(bias.detach() != -torch.inf)
        dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
        visible = counted.visible().to(dtype)
        scale = call.scale(visible, call.query.shape[-1], call.query)
    assert not isinstance(scale, Policy)

    def view(source: int, n: int) -> list[tuple[slice, int, Visibility]]:
        """The runs of a rank's block that some row of ours sees."""
        found, start = [], 0
        for first, length in keys.runs[source]:
            there = seen.cut(keys=slice(first, first + length))
            shown = there.shown() if length else None
            if shown is not None:
                found.append((slice(start, start + length), first, replace(there, terms=shown, at=0)))
            start += length
        return found

    ring = Ring(
        call.query,
        call.key,
        team=team,
        sizes=[row[1] for row in table],
        scale=scale,
        bias=bias,
        view=view,
        softcap=call.softcap,
        grouped=call.grouped,
        batch=batch,
    )
    sums = ring.sums(call.value, statistics=statistics)
    assert sums.mean is not None
    return sums.mean, sums.state


def _bias_and_mask(call: Spread, rows: Layout, keys: Layout, at: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores of this rank's rows, and which keys a boolean mask shows them."""
    bias = None if call.bias is None or isinstance(call.bias, Bias) else _of_rows("bias", call.bias, rows, keys, at)
    if call.attn_mask is None:
        return bias, None
    given = _of_rows("attn_mask", call.attn_mask, rows, keys, at)
    if given.dtype == torch.bool:
        return bias, given
    return (given if bias is None else bias + given), None


def _of_rows(name: str, given: Tensor, rows: Layout, keys: Layout, at: Tensor) -> Tensor:
    """The rows of this rank of a matrix over the whole, or over these rows already."""
    fits = given.dim() >= 2 and given.shape[-1] in (1, keys.total) and given.shape[-2] in (1, len(at), rows.total)
    if not fits:
        raise ShapeError(
            f"{name} must have a column for each key of the whole sequence, {keys.total}, and a row for each query of "
            f"the whole, {rows.total}, or of this rank, {len(at)}; got {_checks.shape_text(given)}."
        )
    return given[..., at, :] if given.shape[-2] == rows.total and rows.total != 1 else given


def _batch(problem: Problem, value: Tensor, bias: Tensor | None, mask: Tensor | None) -> tuple[int, ...]:
    lead = [problem.batch(value), *(t.shape[:-2] for t in (bias, mask) if t is not None)]
    return _checks.broadcast_batch([("query, key and value or bias or mask", shape) for shape in lead])
