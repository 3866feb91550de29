"""The arguments of a call, read once: which keys, what is added, how sharp; and the same for a block of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, cast

import torch
from torch import Tensor

from partita import support as supports
from partita._checks import (
    broadcast_batch,
    check_bias,
    check_device,
    check_float,
    check_matrix,
    expands,
    shape_text,
)
from partita.attn.positions import Bias
from partita.engine import State
from partita.engine.callable_score import Pairs
from partita.engine.request import build
from partita.engine.terms import Term
from partita.engine.terms import cut as tile
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.recompute import by_rows, row_blocks, states_by_rows
from partita.scale import Policy, TargetEntropy
from partita.score import Score
from partita.support import Support
from partita.support.base import check_support

__all__ = ["Options", "Problem", "both", "check_dropout", "check_mask", "sink_per_row"]


_CAUSAL = supports.causal()


class Options(TypedDict, total=False):
    """What every form of attention takes besides query, key and value."""

    attn_mask: Tensor | None
    is_causal: bool
    scale: float | Tensor | Policy | None
    enable_gqa: bool
    support: Support | None
    bias: Tensor | Bias | None
    softcap: float | None
    score: Score | None


@dataclass(eq=False)
class Problem:
    query: Tensor  # (..., heads, n_query, dim)
    key: Tensor  # (..., heads, n_key, dim)
    scale: float | Tensor | Policy
    support: Support | None
    bias: Tensor | None
    rule: Bias | None  # a bias made a block at a time
    softcap: float | None
    grouped: bool
    score: Score | None = None

    @property
    def n_query(self) -> int:
        return self.query.shape[-2]

    @property
    def n_key(self) -> int:
        return self.key.shape[-2]

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        support: Support | None = None,
        bias: Tensor | Bias | None = None,
        scale: float | Tensor | Policy | None = None,
        softcap: float | None = None,
        score: Score | None = None,
        enable_gqa: bool = False,
        **others: object,
    ) -> Problem:
        """The arguments of attention, checked as far as a distribution does not check them itself."""
        for name in others:
            raise TypeError(
                f"{name} is no option of this form of attention, which takes {', '.join(Options.__annotations__)}; "
                f"all others are partita.attention's alone."
            )
        for name, x in (("query", query), ("key", key)):
            if not isinstance(x, Tensor) or x.dim() < 2:
                check_matrix(name, x)
        if support is not None:
            check_support(support)
        rule, bias = (bias, None) if isinstance(bias, Bias) else (None, bias)
        if attn_mask is not None:
            if check_mask(attn_mask):
                support = both(support, supports.mask(attn_mask))
            elif bias is None:
                bias = attn_mask
            else:
                check_float("bias", bias)
                check_device(("bias", "attn_mask"), (bias, attn_mask))
                broadcast_batch((("bias", bias.shape), ("attn_mask", attn_mask.shape)))
                bias = bias + attn_mask
        if bias is not None:
            if not isinstance(bias, Tensor):
                check_float("bias", bias)
            bias = bias.reshape(1, -1) if bias.dim() < 2 else bias
            if rule is not None:
                check_bias(bias, query.shape[-2], key.shape[-2])
        if is_causal:
            support = both(support, _CAUSAL)
        if scale is None:  # a score of another kind has a size of its own
            scale = max(query.shape[-1], 1) ** -0.5 if score is None else 1.0
        return Problem(query, key, scale, support, bias, rule, softcap, enable_gqa, score)

    def gibbs(self) -> Gibbs:
        """The distribution of all rows; a rule is written out."""
        bias = self.bias if self.rule is None else self._tile(slice(0, self.n_query), slice(None))
        return Gibbs(
            self.query, self.key, scale=self.scale, bias=bias, support=self.support, softcap=self.softcap,
            grouped=self.grouped, score=self.score,
        )  # fmt: skip

    def resolved(self) -> Problem:
        """The policy replaced by the scale it gives each row, so that some rows can be taken alone."""
        if not isinstance(self.scale, Policy):
            return self
        if self.rule is not None and isinstance(self.scale, TargetEntropy):  # the rule exists for a block at a time
            solved = by_rows(lambda rows: (cast("Tensor", self.rows(rows).gibbs().scale),), self.blocks(), (0,))
            return replace(self, scale=solved[0])
        whole = replace(self, rule=None).gibbs()
        return replace(self, scale=whole.scale, support=whole.support, bias=whole.bias)

    def ready(self, value: Tensor) -> Problem:
        """Resolved, for what reads blocks of its rows or keys: whatever a pass over all of them raises is raised."""
        if not isinstance(value, Tensor):
            check_float("value", value)
        if value.dim() > max(self.query.dim(), self.key.dim()):
            raise ShapeError(f"value has more batch dimensions than query and key; got {shape_text(value)}.")
        self.batch(value)
        return self.resolved()

    def state(self, value: Tensor) -> State:
        """The state of all rows of a resolved problem, a block at a time where a rule adds to their scores."""
        if self.rule is None:
            return self.gibbs().state(value)
        return states_by_rows(lambda rows: self.rows(rows).state(value), self.blocks(value))

    # Rows and keys are cut by a method each: a graph that compares a slice with None is bound to its numbers.

    def rows(self, rows: slice, also: Support | None = None) -> Problem:
        """A block of rows of a resolved problem, its rule written out, over the keys that `also` shows."""
        scale, support = self.scale, self.support
        if isinstance(scale, Tensor) and scale.dim() and scale.shape[-1] != 1:
            scale = scale[..., rows]
        if support is not None and (rows.start, rows.stop) != (0, self.n_query):
            support = _Cut(support, self.n_query, self.n_key, rows=rows)
        support = support if also is None else both(support, also)
        query, bias = self.query[..., rows, :], self._tile(rows, slice(None))
        return replace(self, query=query, scale=scale, bias=bias, support=support, rule=None)

    def keys(self, keys: slice) -> Problem:
        """All rows of a resolved problem over a block of its keys, its rule written out."""
        support = self.support
        if support is not None and (keys.start, keys.stop) != (0, self.n_key):
            support = _Cut(support, self.n_query, self.n_key, keys=keys)
        key, bias = self.key[..., keys, :], self._tile(slice(0, self.n_query), keys)
        return replace(self, key=key, bias=bias, support=support, rule=None)

    def _tile(self, rows: slice, keys: slice) -> Tensor | None:
        """What is added to the scores of these rows and keys."""
        bias = None if self.bias is None else tile(self.bias, rows, keys)
        if self.rule is None:
            return bias
        made = self.rule.rows(rows, self.n_query, self.n_key, self.query.detach())[..., keys]
        return made if bias is None else bias + made

    def spread(self, value: Tensor) -> Tensor:
        """One value per query head."""
        return value.repeat_interleave(self.query.shape[-3] // value.shape[-3], -3) if self.grouped else value

    def batch(self, value: Tensor | None = None) -> tuple[int, ...]:
        """The batch dimensions of the rows, heads included."""
        scale = 1.0 if isinstance(self.scale, Policy) else self.scale
        pairs = None if self.score is None else Pairs(self.score)
        r = build(self.query, self.key, value, scale=scale, bias=self.bias, grouped=self.grouped, pairs=pairs)
        return r.batch if r.groups == 1 else (*r.batch[:-2], math.prod(r.batch[-2:]))

    def blocks(self, value: Tensor | None = None) -> list[slice]:
        return row_blocks(self.n_query, self.n_key, self.batch(value))


@dataclass(frozen=True, eq=False)
class _Cut(Support):
    """The support of some rows or keys of a larger problem: the first of them here is row or key 0."""

    whole: Support
    n_query: int
    n_key: int
    rows: slice | None = None
    keys: slice | None = None

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        terms = self.whole.bind(self.n_query, self.n_key, batch, device)
        if self.rows is not None:
            terms = tuple(term.rows(self.rows) for term in terms)
        return terms if self.keys is None else tuple(term.keys(self.keys) for term in terms)


def both(a: Support | None, b: Support) -> Support:
    return b if a is None else a & b


def sink_per_row(sink: Tensor, rows: Tensor, name: str = "sink") -> Tensor:
    """A sink per head spread over the head's rows; `rows` has their shape and dtype."""
    check_float(name, sink)
    check_device(("query", name), (rows, sink))
    if sink.dim() == 1 and rows.dim() >= 2 and sink.shape[0] == rows.shape[-2]:
        sink = sink[:, None]
    if not expands(sink.shape, rows.shape):
        raise ShapeError(
            f"{name} must be one score per head, or broadcast to the rows {shape_text(rows)}; got {shape_text(sink)}."
        )
    return sink.to(rows.dtype).expand_as(rows)


def check_mask(attn_mask: Tensor) -> bool:
    """Whether it hides keys, being boolean, or is added to the scores."""
    if not isinstance(attn_mask, Tensor):
        check_float("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise DtypeError(f"attn_mask must be boolean (True = visible) or floating (added); got {attn_mask.dtype}.")
    return attn_mask.dtype == torch.bool


def check_dropout(p: float) -> None:
    if not isinstance(p, (int, float)) or not 0.0 <= p <= 1.0:
        raise ValueRangeError(f"dropout_p must be a probability between 0 and 1; got {p!r}.")
