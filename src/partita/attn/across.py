"""Attention over a sequence spread over processes: every rank holds a slice of queries, keys and values.

    out_i = sum_j p(j|i) value_j        i among this rank's positions, j among all

Supports, lengths, segment ids and boolean masks speak of positions in the whole sequence. A bias or mask may have a row
for each position of the whole or for each of this rank's; its columns are always those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita import _checks
from partita import support as supports
from partita.attn.bias import Bias
from partita.attn.dropout import check_dropout
from partita.attn.problem import Problem, both
from partita.attn.sink import sink_per_row
from partita.engine import State
from partita.engine.visibility import Visibility
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.processes import Fact, Processes, View
from partita.scale import Policy, TargetEntropy
from partita.support import Support

__all__ = ["ShardedAttention"]


@dataclass(frozen=True, eq=False)
class ShardedAttention:
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
    sink: Tensor | None

    def mean(self, processes: Processes, statistics: bool) -> tuple[Tensor, State]:
        """The mean value of this rank's rows over the keys and values of all ranks, and the state without it."""
        with processes.checks():
            problem, facts = self._check(), self._facts()
        rules = (self.is_causal, self.grouped, statistics, processes.zigzag)
        processes = processes.agree(f"attention {rules}", [problem.n_query, problem.n_key], facts)
        with processes.checks():
            place = _Place.of(processes, self.query.device)
            bias, mask = self._bias_and_mask(place)
            batch = _batch(problem, self.value, bias, mask)
            seen = self._visibility(place, batch, mask)
            scale = self._scale(problem, seen, bias)
            if self.sink is not None:
                sink_per_row(self.sink, self.query.new_empty(1).expand(*batch, problem.n_query))
        if self._waits():  # the same on every rank, as has been agreed: then somebody's checks may have failed
            processes.confirm("attention")
        sums = processes.sums(
            self.query,
            self.key,
            scale,
            bias=bias,
            view=_view(seen, place),
            kind=1,
            value=self.value,
            statistics=statistics,
            softcap=self.softcap,
            grouped=self.grouped,
            batch=batch,
        )
        assert sums.mean is not None
        return sums.mean, sums.state

    def _check(self) -> Problem:
        """What can be said before the ranks have met; the mask and the bias wait until the whole length is known."""
        check_dropout(self.dropout_p)
        if self.dropout_p > 0.0:
            raise ValueRangeError("dropout_p has no form over a group; drop values or outputs instead.")
        if isinstance(self.bias, Bias):
            raise ValueRangeError("a position rule (ALiBi, RelativeBias) has no form over a group; give a bias tensor.")
        if isinstance(self.scale, TargetEntropy):
            raise ValueRangeError(
                "TargetEntropy solves each row with all keys at hand and has no form over a group; "
                "use a policy of the visible keys (LogLength, KappaLog, ...)."
            )
        if self.support is not None and not isinstance(self.support, Support):
            raise DtypeError(f"support must be a Support of partita.support; got {type(self.support).__name__}.")
        mask = self.attn_mask
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise DtypeError(f"attn_mask must be boolean (True = visible) or floating (added); got {mask.dtype}.")
        if self.bias is not None:
            _checks.check_float("bias", self.bias)
        given = (self.query, self.attn_mask, self.bias, self.sink)
        _checks.check_device(("query", "attn_mask", "bias", "sink"), given)
        _checks.check_value(self.value, self.key)
        fixed = None if isinstance(self.scale, Policy) else self.scale
        problem = Problem.of(self.query, self.key, scale=fixed, softcap=self.softcap, enable_gqa=self.grouped)
        problem.gibbs()  # the engine's own checks
        problem.batch(self.value)
        return problem

    def _facts(self) -> dict[str, Fact]:
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
            "whether there is a sink": self.sink is not None,
            "whether key needs a gradient": grad and self.key.requires_grad,
            "whether value needs a gradient": grad and self.value.requires_grad,
            "whether anything needs a gradient": grad and needed,
        }

    def _waits(self) -> bool:
        """Whether anything is left to check once the whole length is known."""
        left = (self.support, self.attn_mask, self.bias, self.sink)
        return isinstance(self.scale, Policy) or any(x is not None for x in left)

    def _visibility(self, place: _Place, batch: tuple[int, ...], mask: Tensor | None) -> Visibility:
        """Which keys of the whole this rank's rows see."""
        support = both(self.support, supports.causal()) if self.is_causal else self.support
        terms = () if support is None else support.bind(place.n_query, place.n_key, batch, place.rows.device)
        seen = Visibility.of(terms, place.n_query, place.n_key, batch, place.rows.device).cut(rows=place.rows)
        return seen if mask is None else seen.also(mask)

    def _scale(self, problem: Problem, seen: Visibility, bias: Tensor | None) -> float | Tensor:
        """A policy counts the keys a row sees in the whole."""
        scale = problem.scale
        if isinstance(self.scale, Policy):
            counted = seen if bias is None else seen.also(bias.detach() != -torch.inf)
            dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
            scale = self.scale(counted.visible().to(dtype), self.query.shape[-1], self.query)
            replace(problem, scale=scale).gibbs()  # checked like a given scale
        assert not isinstance(scale, Policy)
        return scale

    def _bias_and_mask(self, place: _Place) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the scores of this rank's rows, and which keys a boolean mask shows them."""
        bias = None if self.bias is None or isinstance(self.bias, Bias) else place.of_rows("bias", self.bias)
        if self.attn_mask is None:
            return bias, None
        given = place.of_rows("attn_mask", self.attn_mask)
        if given.dtype == torch.bool:
            return bias, given
        return (given if bias is None else bias + given), None


@dataclass(frozen=True, eq=False)
class _Place:
    """Where this rank's rows lie in the whole sequence, and the keys of every rank."""

    rows: Tensor  # (Q,) positions
    runs: tuple[tuple[tuple[int, int], ...], ...]  # of keys, per rank: (first position, length)
    n_query: int  # of the whole
    n_key: int

    @staticmethod
    def of(processes: Processes, device: torch.device) -> _Place:
        rows = [torch.arange(first, first + n, device=device) for first, n in processes.runs(0)[processes.rank]]
        n_query, n_key = (sum(sizes) for sizes in processes.sizes)
        return _Place(torch.cat(rows), processes.runs(1), n_query, n_key)

    def of_rows(self, name: str, given: Tensor) -> Tensor:
        """The rows of this rank of a matrix over the whole, or over these rows already."""
        own = len(self.rows)
        fits = given.dim() >= 2 and given.shape[-1] in (1, self.n_key) and given.shape[-2] in (1, own, self.n_query)
        if not fits:
            raise ShapeError(
                f"{name} must have a column for each key of the whole sequence, {self.n_key}, and a row for each query "
                f"of the whole, {self.n_query}, or of this rank, {own}; got {_checks.shape_text(given)}."
            )
        whole = given.shape[-2] == self.n_query and self.n_query != 1
        return given[..., self.rows, :] if whole else given


def _view(seen: Visibility, place: _Place) -> View:
    """The runs of a rank's block that some row of ours sees."""

    def view(source: int, n: int) -> Iterable[tuple[slice, int, Visibility]]:
        start = 0
        for first, length in place.runs[source]:
            there = seen.cut(keys=slice(first, first + length))
            shown = there.shown() if length else None
            if shown is not None:
                yield slice(start, start + length), first, replace(there, terms=shown, at=0)
            start += length

    return view


def _but_length(tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape[:-2], tensor.shape[-1])


def _batch(problem: Problem, value: Tensor, bias: Tensor | None, mask: Tensor | None) -> tuple[int, ...]:
    lead = [problem.batch(value), *(t.shape[:-2] for t in (bias, mask) if t is not None)]
    return _checks.broadcast_batch([("query, key and value or bias or mask", shape) for shape in lead])
