"""What is wanted of a pass, in canonical form: checked once, laid out once for each geometry.

Every tensor gets the same number of batch dimensions, of size 1 where it broadcasts, so that a backend, vmap and the
gradient of a broadcast operand need no special case. Grouped queries become one more batch dimension in which key and
value have size 1: keys are never repeated.

`build` looks at shapes, dtypes and devices. What it finds (`Layout`) is remembered by them, so that a call whose like
was seen before pays for its views alone. Values are looked at on the CPU only: a scale must be finite, a target must
name a key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypedDict

import torch
from torch import Tensor

from partita import _checks
from partita.engine.axes import align
from partita.engine.sums import OPERANDS
from partita.engine.terms import Term, pack, unpack
from partita.engine.terms import visible as visible_keys
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.precision import accumulation_dtype, autocasts, lowered

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from partita.engine.callable_score import Pairs
    from partita.support import Support

__all__ = ["Reads", "Request", "build", "check_values"]


class Reads(TypedDict, total=False):
    """What a pass computes; each is a field of `Request`, where it is explained and has its default."""

    rank: bool
    statistics: bool
    variance: bool
    mean: bool
    argmax: bool


@dataclass(eq=False, slots=True)
class Request:
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
    variance: bool = True  # the second among them; readers of the entropy alone leave it out
    mean: bool = False  # E[value] is wanted, not the moment it comes from
    argmax: bool = False  # the first key of the largest score
    as_query: bool = False  # and may have the memory layout of the query, as torch's own attention has
    last: bool = False  # no backward pass follows, which would need the same scores to the last bit
    pairs: Pairs | None = None  # a score that is no inner product

    @property
    def n_query(self) -> int:
        return self.query.shape[-2]

    @property
    def n_key(self) -> int:
        return self.key.shape[-2]

    @property
    def level(self) -> int:
        """How many moments of the score are wanted: 0, 1 (entropy, mean) or 2 (the variance too)."""
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
        return _checks.broadcast(*shapes, *[term.batch for term in self.terms])

    # ---- the tensors, and what is no tensor -----------------------------------------------------------------------

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a pass reads: operands, target, the support's tensors, a score's parameters."""
        own = () if self.pairs is None else self.pairs.parameters
        terms = [t for term in self.terms for t in term if t is not None]
        return (self.query, self.key, self.value, self.scale, self.bias, self.target, *terms, *own)

    def operands(self) -> dict[str, Tensor | None]:
        """What a pass can be differentiated by: `OPERANDS`, then a score's own parameters."""
        own = {} if self.pairs is None else self.pairs.named()
        named = zip(OPERANDS, (self.query, self.key, self.value, self.scale, self.bias), strict=True)
        return {**dict(named), **own}

    def bare(self) -> Bare:
        """The same without its tensors: what a derivative keeps in addition to them."""
        layout = tuple(pack(self.terms)[1]) if self.terms else ()
        pairs = None if self.pairs is None else replace(self.pairs, parameters=())
        return Bare(layout, self.softcap, self.cap_bias, self.groups, self.rank, self.statistics, self.variance,
                    self.mean, self.argmax, pairs)  # fmt: skip

    def with_batch(self, n_batch: int) -> Request:
        """The same request with at least this number of batch dimensions; those in front have size 1."""
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


class Bare(NamedTuple):
    """What of a request is no tensor, and so does not change under transformations."""

    layout: tuple[int, ...] = ()  # of the support's terms
    softcap: float | None = None
    cap_bias: bool = False
    groups: int = 1
    rank: bool = False
    statistics: bool = True
    variance: bool = True
    mean: bool = False
    argmax: bool = False
    pairs: Pairs | None = None

    def over(self, tensors: Sequence[Any]) -> Request:
        """The request these tensors belong to, in the order of `Request.tensors`."""
        query, key, value, scale, bias, target, *rest = tensors
        pairs = self.pairs
        if pairs is not None and pairs.names:
            pairs = replace(pairs, parameters=tuple(rest[len(rest) - len(pairs.names) :]))
        terms = unpack(rest, self.layout) if self.layout else ()
        return Request(query, key, value, scale, bias, target, terms, *self[1:-1], pairs=pairs)

    def places(self, many: int) -> list[int]:
        """Which of a request's tensors it can be differentiated by; the parameters of a score are the last of them."""
        own = 0 if self.pairs is None else len(self.pairs.names)
        return [*range(len(OPERANDS)), *range(many - own, many)]


# ---- building one ---------------------------------------------------------------------------------------------------


View = Optional[tuple[int, ...]]  # noqa: UP045  (an alias, read at run time)


class Layout(NamedTuple):
    """What operands of the same shapes, dtypes and devices share."""

    rows: tuple[int, ...]  # the batch of query, key, bias and scale, which a support is bound to
    n_batch: int  # batch dimensions, a value's and a target's own included
    groups: int
    dtype: torch.dtype  # of the sums
    views: tuple[View, ...]  # of query, key, value, scale, bias and target; None: as it is


_LAYOUTS: dict[Any, Layout] = {}
_MOST_LAYOUTS = 1024


def build(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    target: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    support: Support | None = None,
    softcap: float | None = None,
    cap_bias: bool = False,
    grouped: bool = False,
    batch: Sequence[int] = (),
    pairs: Pairs | None = None,
    checked: bool = False,
    **reads: Unpack[Reads],
) -> Request:
    """Check everything, align everything; computes nothing of the distribution.

    batch: one more to broadcast to.
    checked: the target's values are known to name keys.
    """
    plain = _plain()
    if isinstance(query, Tensor) and autocasts(query.device.type):
        query, key = lowered(query), lowered(key)
        value = value if value is None else lowered(value)
    sharp = scale if isinstance(scale, Tensor) else None
    given = (query, key, value, sharp, bias, target)
    layout = known = None
    if plain:
        try:
            known = (
                grouped,
                batch,
                pairs is None,
                *[None if t is None else (t.shape, t.dtype, t.device) for t in given],
            )
            layout = _LAYOUTS.get(known)
        except (AttributeError, TypeError):  # what is no tensor is named below
            known = None
    if layout is None:
        layout = _lay_out(*given, grouped, tuple(batch), pairs is None)
        if known is not None:
            if len(_LAYOUTS) >= _MOST_LAYOUTS:
                _LAYOUTS.clear()
            _LAYOUTS[known] = layout
    if softcap is not None:
        _checks.check_positive("softcap", softcap)
        softcap = float(softcap)
    if sharp is None:
        sharp = (_kept_number if plain else _number)(_finite_number(scale), layout.dtype, query.device)
    else:
        _check_finite(sharp)
        sharp = sharp.to(device=query.device, dtype=layout.dtype)
    if target is not None:
        if not checked:
            _checks.check_target(target, key.shape[-2])
        target = target.long()
    terms: tuple[Term, ...] = ()
    if support is not None:  # the terms of positions alone are kept
        bind = _kept_terms if plain and support.positional and query.shape[-2] <= _MOST_ROWS else _terms
        terms = bind(support, query.shape[-2], key.shape[-2], layout.rows, layout.n_batch, layout.groups, query.device)
    laid: list[Any] = [
        t if t is None or view is None else t.view(view)
        for t, view in zip((query, key, value, sharp, bias, target), layout.views, strict=True)
    ]
    query, key, value, sharp, bias, target = laid
    return Request(
        query, key, value, sharp, bias, target, terms, softcap, cap_bias, layout.groups,
        pairs=pairs, as_query=bool(reads.get("mean")), **{name: bool(flag) for name, flag in reads.items()},
    )  # fmt: skip


def _plain() -> bool:
    """Whether tensors are what they seem: nothing traces, transforms or dispatches, so that constants may be kept."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    )


def _lay_out(
    query: Tensor, key: Tensor, value: Tensor | None, scale: Tensor | None, bias: Tensor | None, target: Tensor | None,
    grouped: bool, batch: tuple[int, ...], alike: bool,
) -> Layout:  # fmt: skip
    """What is wrong with these operands, or how they are laid out."""
    _checks.check_pair(query, key, alike=alike)
    n_query, n_key = query.shape[-2], key.shape[-2]
    if bias is not None:
        _checks.check_bias(bias, n_query, n_key)
    groups = _groups(query, key) if grouped else 1
    if not grouped:
        _checks.check_heads(query, key)
    if scale is not None:
        _check_scale(scale, query)
    _checks.check_device(("query", "bias"), (query, bias))
    lead = tuple(key.shape[:-2])
    named: list[tuple[str, Sequence[int]]] = [
        ("query", query.shape[:-2]),
        ("key", (*lead[:-1], lead[-1] * groups) if groups > 1 else lead),
        ("bias", () if bias is None else bias.shape[:-2]),
        ("scale", () if scale is None else scale.shape[:-1]),
    ]
    rows = _checks.broadcast_batch(named)
    own: list[tuple[str, Sequence[int]]] = [("value or target", batch)] if batch else []
    if value is not None:
        _checks.check_value(value, key)
        heads = tuple(value.shape[:-2])
        if groups > 1:
            if len(heads) < 1 or heads[-1] != lead[-1]:
                raise ShapeError(
                    f"key and value must have the same number of heads; got {lead[-1]} and {_checks.shape_text(value)}."
                )
            heads = (*heads[:-1], heads[-1] * groups)
        own.append(("value", heads))
    if target is not None:
        _check_target(target, query)
        own.append(("target", target.shape[:-1]))
    # a value's own dimensions come in front: the support knows nothing of them
    n_batch = len(_checks.broadcast_batch([("query and key", rows), *own]))

    def view(tensor: Tensor | None, tail: int, keys: bool = False) -> View:
        return None if tensor is None else _view(tuple(tensor.shape), tail, n_batch, groups, keys)

    one = scale is None or not scale.dim()
    sharp = _view((1,) if scale is None or one else tuple(scale.shape), 1, n_batch, groups, False)
    sharp = (1,) if sharp is None and one else sharp
    views = view(query, 2), view(key, 2, True), view(value, 2, True), sharp, view(bias, 2), view(target, 1)
    return Layout(rows, n_batch, groups, accumulation_dtype(query.dtype), views)


def _view(given: tuple[int, ...], tail: int, n_batch: int, groups: int, keys: bool) -> View:
    """The shape with all batch dimensions, and with the heads as (key heads, groups); None if it has that already."""
    shape = (*[1] * (n_batch + tail - len(given)), *given)
    if groups > 1:
        at = len(shape) - tail - 1
        heads = (shape[at], 1) if keys else (1, 1) if shape[at] == 1 else (shape[at] // groups, groups)
        shape = (*shape[:at], *heads, *shape[at + 1 :])
    return None if len(shape) == len(given) else shape


def _terms(
    support: Support, n_query: int, n_key: int, rows: tuple[int, ...], n_batch: int, groups: int, device: torch.device
) -> tuple[Term, ...]:
    with torch.inference_mode(False) if support.positional else torch.no_grad():
        terms = support.bind(n_query, n_key, rows, device)
    if any(term.trivial for term in terms):
        return ()
    if n_batch != len(rows):
        terms = tuple([term.align(n_batch) for term in terms])
    return tuple([term.split_heads(groups) for term in terms]) if groups > 1 else terms


_MOST_ROWS = 4096
_kept_terms = functools.lru_cache(maxsize=128)(_terms)  # at most 16 kB a bound


def _number(scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1,), scale, dtype=dtype, device=device)


@functools.lru_cache(maxsize=128)
def _kept_number(scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # what is made in that mode can be used in no graph
        return _number(scale, dtype, device)


def _check_target(target: Tensor, query: Tensor) -> None:
    _checks.check_index_dtype("target", target)
    if target.dim() == 0 or target.shape[-1] != query.shape[-2]:
        raise ShapeError(
            f"target must have one index per query, shape (..., {query.shape[-2]}); got {_checks.shape_text(target)}."
        )
    _checks.check_device(("query", "target"), (query, target))


def _check_scale(scale: Tensor, query: Tensor) -> None:
    n_query = query.shape[-2]
    if scale.is_meta:
        _checks.check_device(("query", "scale"), (query, scale))
    if not scale.is_floating_point():
        raise DtypeError(f"scale must be a real number or a floating tensor; got {scale.dtype}. Use scale.float().")
    if scale.dim() and not _checks.expands(scale.shape[-1:], (n_query,)):
        raise ShapeError(
            f"scale must broadcast to the rows (..., {n_query}); got {_checks.shape_text(scale)}. "
            f"A scale per head is scale[:, None]."
        )


def _finite_number(scale: object) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not _checks.finite(scale):
        raise ValueRangeError(
            f"scale must be a finite number, a tensor or a policy of partita.scale; got {scale!r}. "
            f"None means 1 (1/sqrt(dim) in attention)."
        )
    return float(scale)


def _check_finite(scale: Tensor) -> None:
    if _checks.has_values(scale) and not bool(scale.isfinite().all()):
        raise ValueRangeError("scale must be finite; the tensor given holds nan or inf.")


def check_values(request: Request) -> None:
    """The checks of values that `build` makes, for a request that was built where there were none."""
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
