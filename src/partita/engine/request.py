"""What is wanted of a pass, in canonical form.

Every tensor gets the same number of batch dimensions, of size 1 where it broadcasts, so that a backend, vmap and the
gradient of a broadcast operand need no special case. Grouped queries become one more batch dimension in which key and
value have size 1: keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from partita import _checks
from partita.engine.axes import Sides, align, split_heads
from partita.engine.disjoint import visible as visible_keys
from partita.engine.terms import Term
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.precision import accumulation_dtype, autocasts, output_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from partita.engine.pairs import Pairs
    from partita.support import Support

__all__ = ["Reads", "Request", "build", "check_values", "extend"]


class Reads(TypedDict, total=False):
    """What a pass shall find out; each is a field of a request, which says what it is and what it is unless given."""

    rank: bool
    statistics: bool
    variance: bool
    mean: bool
    extremes: bool


@dataclass(frozen=True, eq=False)
class Request(Sides):
    query: Tensor  # (*b, Q, D)
    key: Tensor  # (*b, K, D)
    value: Tensor | None  # (*b, K, V)
    scale: Tensor  # (*b, Q or 1), accumulation dtype
    bias: Tensor | None  # (*b, Q or 1, K or 1)
    target: Tensor | None  # (*b, Q) int64
    terms: tuple[Term, ...]  # () shows every key
    softcap: float | None
    cap_bias: bool = False  # the bias is added before the softcap, not after
    groups: int = 1  # queries per key head; the last batch dimension was split by it
    rank: bool = False
    statistics: bool = True  # first and second moments of the score
    variance: bool = True  # the second among them; whoever reads the entropy alone leaves it out
    mean: bool = False  # E[value] is wanted, not the moment it comes from
    extremes: bool = False  # the smallest score, and where it and the largest stand
    as_query: bool = False  # and may lie in memory as the query does, as torch's own attention gives it
    last: bool = False  # no backward pass follows, which would need the same scores to the last bit
    pairs: Pairs | None = None  # a score that is no inner product

    @property
    def level(self) -> int:
        """How many moments of the score are asked for: 0, 1 (entropy, mean) or 2 (the variance too)."""
        return 1 + self.variance if self.statistics else 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all sums."""
        return accumulation_dtype(self.query.dtype)

    @property
    def batch(self) -> tuple[int, ...]:
        """The broadcast of all operands' batch dimensions: that of the rows."""
        shapes = [t.shape[:-2] for t in (self.query, self.key, self.value, self.bias) if t is not None]
        shapes += [t.shape[:-1] for t in (self.scale, self.target) if t is not None]
        return _checks.broadcast(*shapes, *(term.batch for term in self.terms))

    def with_batch(self, n_batch: int) -> Request:
        """The same request with at least so many batch dimensions; those in front have size 1."""
        if self.query.dim() - 2 >= n_batch:
            return self
        bias = None if self.bias is None else align(self.bias, n_batch, 2)
        terms = tuple(term.align(n_batch) for term in self.terms)
        query, key, scale = align(self.query, n_batch, 2), align(self.key, n_batch, 2), align(self.scale, n_batch, 1)
        return replace(self, query=query, key=key, scale=scale, bias=bias, terms=terms)

    def capped(self, products: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scores from scaled products, softcap(s) + bias or softcap(s + bias); and the tanh in them, if there is."""
        if self.softcap is None:
            return products if bias is None else products + bias, None
        before, after = (bias, None) if self.cap_bias else (None, bias)
        t = torch.tanh((products if before is None else products + before) / self.softcap)
        s = self.softcap * t
        return s if after is None else s + after, t

    def visible(self) -> Tensor:  # (*b, Q), accumulation dtype
        """Keys each row may see, before any pass: closed form for supports; a bias of -inf is looked at."""
        terms = self.terms
        if self.bias is not None:
            shown = Term(mask=self.bias != -torch.inf)
            terms = tuple(term & shown for term in terms) or (shown,)
        return visible_keys(terms, self.n_query, self.n_key, self.batch, self.query.device).to(self.dtype)

    def ungroup(self, rows: Tensor, tail: int = 0) -> Tensor:
        """Row results with the heads in one dimension again; `tail` dimensions follow the rows."""
        return rows if self.groups == 1 else rows.flatten(-3 - tail, -2 - tail)


def build(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    support: Support | None = None,
    softcap: float | None = None,
    cap_bias: bool = False,
    grouped: bool = False,
    batch: Sequence[int] = (),
    pairs: Pairs | None = None,
) -> Request:
    """Check everything, align everything; computes nothing of the distribution. `batch` is one more to broadcast to."""
    query, key = (_lowered(t) for t in (query, key))
    _checks.check_pair(query, key, alike=pairs is None)
    n_query, n_key = query.shape[-2], key.shape[-2]
    if bias is not None:
        _checks.check_bias(bias, n_query, n_key)
    if softcap is not None:
        _checks.check_positive("softcap", softcap)
    groups = _groups(query, key) if grouped else 1
    if not grouped:
        _checks.check_heads(query, key)
    scale = _scale(scale, query)
    _checks.check_device(("query", "bias"), (query, bias))
    lead = tuple(key.shape[:-2])
    rows = _checks.broadcast_batch(
        (
            ("query", query.shape[:-2]),
            ("key", (*lead[:-1], lead[-1] * groups) if groups > 1 else lead),
            ("bias", () if bias is None else bias.shape[:-2]),
            ("scale", scale.shape[:-1]),
        )
    )
    terms = () if support is None else support.bind(n_query, n_key, rows, query.device)
    if batch:  # a value's own dimensions come in front: the support knows nothing of them
        rows = _checks.broadcast_batch((("query and key", rows), ("value or target", batch)))
        terms = tuple(term.align(len(rows)) for term in terms)
    request = Request(
        align(query, len(rows), 2),
        align(key, len(rows), 2),
        None,
        align(scale, len(rows), 1),
        None if bias is None else align(bias, len(rows), 2),
        None,
        () if any(term.trivial for term in terms) else terms,
        None if softcap is None else float(softcap),
        cap_bias,
        groups,
        pairs=pairs,
    )
    return _split_heads(request, groups) if groups > 1 else request


def extend(
    request: Request,
    *,
    value: Tensor | None = None,
    target: Tensor | None = None,
    **reads: Unpack[Reads],
) -> Request | None:
    """The same request with a value or a target; None if they have more batch dimensions than it."""
    n_batch = request.query.dim() - 2 - (request.groups > 1)
    if value is not None:
        value = _lowered(value)
        _check_value(value, request)
        if value.dim() - 2 > n_batch:
            return None
        value = align(value, n_batch, 2)
    if target is not None:
        _check_target(target, request)
        if target.dim() - 1 > n_batch:
            return None
        target = align(target.long(), n_batch, 1)
    if request.groups > 1:
        value = None if value is None else value.unsqueeze(-3)
        target = None if target is None else split_heads(target, 1, request.groups)
    named: list[tuple[str, Sequence[int]]] = [("query and key", request.batch)]
    named += [("value", value.shape[:-2])] if value is not None else []
    named += [("target", target.shape[:-1])] if target is not None else []
    _checks.broadcast_batch(named)
    return replace(request, value=value, target=target, as_query=reads.get("mean", False), **reads)


def _check_value(value: Tensor, request: Request) -> None:
    _checks.check_value(value, request.key)
    heads = request.key.shape[-4:-3] if request.groups > 1 else ()
    if heads and (value.dim() < 3 or value.shape[-3] != heads[0]):
        raise ShapeError(f"key and value must have as many heads; got {heads[0]} and {_checks.shape_text(value)}.")


def _check_target(target: Tensor, request: Request) -> None:
    _checks.check_target(target, request.n_key)
    if target.dim() == 0 or target.shape[-1] != request.n_query:
        raise ShapeError(
            f"target must have one index per query, shape (..., {request.n_query}); got {_checks.shape_text(target)}."
        )
    _checks.check_device(("query", "target"), (request.query, target))


def _lowered(tensor: Tensor) -> Tensor:
    """Under autocast, products are taken in its dtype, as torch's own are."""
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and autocasts(tensor.device.type):
        return tensor.to(output_dtype(tensor))
    return tensor


def _scale(scale: float | Tensor, query: Tensor) -> Tensor:
    """The scale as a tensor (..., n_query or 1) in the accumulation dtype."""
    dtype = accumulation_dtype(query.dtype)
    if isinstance(scale, Tensor):
        if not scale.is_floating_point():
            raise DtypeError(f"scale must be a real number or a floating tensor; got {scale.dtype}. Use scale.float().")
        if scale.dim() and scale.shape[-1] not in (1, query.shape[-2]):
            raise ShapeError(
                f"scale must broadcast to the rows (..., {query.shape[-2]}); got {_checks.shape_text(scale)}. "
                f"A scale per head is scale[:, None]."
            )
        _check_finite(scale)
        scale = scale.to(device=query.device, dtype=dtype)
        return scale if scale.dim() else scale[None]
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not _checks.finite(scale):
        raise ValueRangeError(
            f"scale must be a finite number, a tensor or a policy of partita.scale; got {scale!r}. "
            f"None means 1 (1/sqrt(dim) in attention)."
        )
    return torch.full((1,), float(scale), dtype=dtype, device=query.device)


def _check_finite(scale: Tensor) -> None:
    if _checks.has_values(scale) and scale.device.type == "cpu" and not bool(scale.isfinite().all()):
        raise ValueRangeError("scale must be finite; the tensor given holds nan or inf.")


def check_values(request: Request) -> None:
    """What `build` and `extend` ask of values, for a request that was built where there were none."""
    _check_finite(request.scale)
    if request.target is not None:
        _checks.check_target(request.target, request.n_key)


def _groups(query: Tensor, key: Tensor) -> int:
    """Query heads per key head."""
    if query.dim() < 3 or key.dim() < 3:
        raise ShapeError(
            f"grouped queries need a head dimension, (..., heads, n, dim); got query {_checks.shape_text(query)} "
            f"and key {_checks.shape_text(key)}."
        )
    many, few = query.shape[-3], key.shape[-3]
    if few == 0 or many % few:
        raise ShapeError(
            f"with grouped queries, query heads must be a multiple of key heads; got {many} and {few}. "
            f"Check the head dimension, the third from the right."
        )
    return many // few


def _split_heads(request: Request, groups: int) -> Request:
    """The head dimension of size heads (or 1) becomes (key heads, groups) (or (1, 1))."""
    return replace(
        request,
        query=split_heads(request.query, 2, groups),
        key=request.key.unsqueeze(-3),
        scale=split_heads(request.scale, 1, groups),
        bias=None if request.bias is None else split_heads(request.bias, 2, groups),
        terms=tuple(term.split_heads(groups) for term in request.terms),
    )
