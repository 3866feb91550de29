"""Attention over a sequence spread over processes: every rank holds a slice of queries, keys and values.

    out_i = sum_j p(j|i) value_j        i among this rank's positions, j among all

Positions in supports, lengths, segment ids and masks are those of the whole sequence. A bias or mask has a row for each
position of the whole, or for each of this rank's; its columns are always those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita import _checks
from partita import support as supports
from partita.attn.positions import Bias
from partita.attn.problem import both, check_dropout, check_mask, sink_per_row
from partita.collective import Collective, Fact, View
from partita.engine import State
from partita.engine.terms import Visibility
from partita.errors import ShapeError, ValueRangeError
from partita.precision import accumulation_dtype
from partita.scale import Policy, TargetEntropy
from partita.support import Support
from partita.support.base import check_support

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

    def mean(self, collective: Collective, statistics: bool) -> tuple[Tensor, State]:
        """The mean value of this rank's rows over the keys and values of all ranks, and the state without it."""
        with collective.validate():
            scale, batch = self._check(collective)
            given = self._given() if collective.size > 1 else {}
        rules = (self.is_causal, self.grouped, statistics, collective.zigzag)
        collective = collective.check_same(f"attention {rules}", [self.query.shape[-2], self.key.shape[-2]], given)
        late = (self.support, self.attn_mask, self.bias, self.sink) != (None, None, None, None)
        # what can be checked only against the whole sequence; whether there is any is the same on every rank by now
        with collective.validate("attention" if late or isinstance(self.scale, Policy) else ""):
            assert not isinstance(self.bias, Bias)
            bias, mask = _own_rows("bias", self.bias, collective), _own_rows("attn_mask", self.attn_mask, collective)
            if mask is not None and mask.dtype != torch.bool:
                bias, mask = mask if bias is None else bias + mask, None
            if bias is not None or mask is not None:
                lead = [batch, *(t.shape[:-2] for t in (bias, mask) if t is not None)]
                batch = _checks.broadcast_batch([("query, key and value or bias or mask", shape) for shape in lead])
            seen = self._visibility(collective, batch, mask)
            if isinstance(self.scale, Policy):  # it counts the keys a row sees in the whole
                counted = seen if bias is None else seen.also(bias.detach() != -torch.inf)
                scale = self.scale(
                    counted.visible().to(accumulation_dtype(self.query.dtype)), self.query.shape[-1], self.query
                )
                self._batch(collective, scale)  # checked like a given scale
            if self.sink is not None:
                sink_per_row(self.sink, self.query.new_empty(1).expand(*batch, self.query.shape[-2]))
        sums = collective.sums(
            self.query, self.key, scale, bias=bias, view=_view(seen, collective.runs(1)), kind=1, value=self.value,
            statistics=statistics, softcap=self.softcap, grouped=self.grouped, batch=batch,
        )  # fmt: skip
        assert sums.mean is not None
        return sums.mean, sums.state

    def _check(self, collective: Collective) -> tuple[float | Tensor, tuple[int, ...]]:
        """Raise what can be found before the sizes of all ranks are known.

        Gives the scale, 1 in the place of a policy, and the batch dimensions of the rows.
        """
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
        check_support(self.support)
        mask, scale = self.attn_mask, self.scale
        if mask is not None:
            check_mask(mask)
        if self.bias is not None:
            _checks.check_float("bias", self.bias)
        _checks.check_device(("query", "attn_mask", "bias", "sink"), (self.query, mask, self.bias, self.sink))
        if scale is None:
            _checks.check_matrix("query", self.query)
            scale = float(max(self.query.shape[-1], 1) ** -0.5)
        sharp = 1.0 if isinstance(scale, Policy) else scale
        return sharp, self._batch(collective, sharp)

    def _batch(self, collective: Collective, scale: float | Tensor) -> tuple[int, ...]:
        """The batch dimensions of the rows, after the engine's own checks."""
        return collective.check_pass(
            self.query, self.key, scale, value=self.value, softcap=self.softcap, grouped=self.grouped
        )

    def _given(self) -> dict[str, Fact]:
        """What must be the same on every rank."""
        scale, grad = self.scale, torch.is_grad_enabled()
        named = {"query": self.query, "key": self.key, "value": self.value}
        others = {"support": self.support, "mask": self.attn_mask, "bias": self.bias, "sink": self.sink}
        learned = scale.parameters() if isinstance(scale, torch.nn.Module) else [scale]
        given = (*named.values(), self.bias, self.attn_mask, *learned)
        needed = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
        return {
            "the dtype": self.query.dtype,
            **{f"the dimensions of {name} but its length": (*t.shape[:-2], t.shape[-1]) for name, t in named.items()},
            "scale": type(scale).__name__ if isinstance(scale, Policy) else scale,
            "softcap": self.softcap,
            **{f"whether there is a {name}": x is not None for name, x in others.items()},
            "whether key needs a gradient": grad and self.key.requires_grad,
            "whether value needs a gradient": grad and self.value.requires_grad,
            "whether anything needs a gradient": grad and bool(needed),
        }

    def _visibility(self, collective: Collective, batch: tuple[int, ...], mask: Tensor | None) -> Visibility:
        """Which keys of the whole this rank's rows see."""
        support = both(self.support, supports.causal()) if self.is_causal else self.support
        (n_query, n_key), device = map(sum, collective.sizes), self.query.device
        terms = () if support is None else support.bind(n_query, n_key, batch, device)
        rows = collective.positions(collective.rank, 0, device)
        seen = Visibility.of(terms, n_query, n_key, batch, device).cut(rows=rows)
        return seen if mask is None else seen.also(mask)


def _own_rows(name: str, given: Tensor | None, collective: Collective) -> Tensor | None:
    """This rank's rows of a matrix over the whole, or over these rows already."""
    if given is None:
        return None
    (n_query, n_key), own = map(sum, collective.sizes), collective.sizes[0][collective.rank]
    fits = given.dim() >= 2 and given.shape[-1] in (1, n_key) and given.shape[-2] in (1, own, n_query)
    if not fits:
        raise ShapeError(
            f"{name} must have a column for each key of the whole sequence, {n_key}, and a row for each query of the "
            f"whole, {n_query}, or of this rank, {own}; got {_checks.shape_text(given)}."
        )
    whole = given.shape[-2] == n_query and n_query != 1
    return given[..., collective.positions(collective.rank, 0, given.device), :] if whole else given


def _view(seen: Visibility, runs: Sequence[Sequence[tuple[int, int]]]) -> View:
    """The runs of a rank's block that some row sees."""

    def view(source: int, n: int) -> Iterable[tuple[slice, int, Visibility]]:
        start = 0
        for first, length in runs[source]:
            there = seen.cut(keys=slice(first, first + length))
            shown = there.shown() if length else None
            if shown is not None:
                there = Visibility(shown, there.n_query, length, there.batch, there.device)
                yield slice(start, start + length), first, there
            start += length

    return view
