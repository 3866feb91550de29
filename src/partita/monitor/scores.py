"""The scores of one softmax, in canonical form and not materialised: what is measured is read from a Gibbs of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from partita import Gibbs, support
from partita.attn.problem import Problem
from partita.engine.callable_score import compared
from partita.score import InnerProduct
from partita.support import Support

# the arguments of attention that its scores depend on
_OF_SCORES = ("attn_mask", "is_causal", "scale", "enable_gqa", "support", "bias", "softcap", "score")
WHOLE = 1 << 26  # cells of a support or of a position bias that may be written out for a close look


class NoCloseLook(ValueError):
    """A call whose rows cannot be read, and why: the text is for the user."""


@dataclass(frozen=True)
class Scores:
    """One call. Either query and key, or finished scores (then query and key are None)."""

    query: Tensor | None  # (batch, heads, n_query, dim)
    key: Tensor | None  # (batch, key heads, n_key, dim)
    scale: Any = 1.0  # a number, or a tensor (batch, heads, n_query), each 1 where it does not matter
    mask: Tensor | None = None  # bool (True: visible) or added; broadcasts to (batch, heads, n_query, n_key)
    causal: bool = False  # top left
    support: Support | None = None
    softcap: float | None = None
    scores: Tensor | None = None  # (batch, heads, n_query, n_key)
    keep: Tensor | None = None  # (batch, n_query): real queries

    first: Tensor = field(init=False, repr=False)  # has the batch, the heads, the device and the dtype of the call
    batch: int = field(init=False)
    heads: int = field(init=False)
    n_query: int = field(init=False)
    n_key: int = field(init=False)

    def __post_init__(self) -> None:
        first = self.query if self.scores is None else self.scores
        assert first is not None
        n_key = first.shape[-1] if self.key is None else self.key.shape[2]
        sizes = {"batch": first.shape[0], "heads": first.shape[1], "n_query": first.shape[2], "n_key": n_key}
        for name, value in {"first": first, **sizes}.items():
            object.__setattr__(self, name, value)  # torch.compile traces this, and supports no other way to set a field

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.heads, self.n_query

    @property
    def dense(self) -> Tensor | None:
        """What has a number for each pair of query and key, or is broadcast to it."""
        return self.mask if self.scores is None else self.scores

    def take(self, batch: Tensor | slice | None, rows: Tensor | slice) -> Scores:
        """The same call for some batch entries and some rows; which keys they see is written out."""
        pick = slice(None) if batch is None else batch

        def both(t: Tensor | None, dim: int = 2) -> Tensor | None:
            if t is None:
                return None
            t = t[pick] if t.shape[0] > 1 else t
            if t.shape[dim] == 1:
                return t
            if isinstance(rows, slice):
                return t.narrow(dim, rows.start, rows.stop - rows.start)
            return t.index_select(dim, rows)

        mask = hide(both(self.mask), both(self._written_out()))
        if self.causal:
            index, keys = (torch.arange(n, device=self.first.device) for n in (self.n_query, self.n_key))
            mask = hide(mask, (index[rows, None] >= keys)[None, None])
        scale = both(self.scale) if isinstance(self.scale, Tensor) else self.scale
        key = self.key if self.key is None or batch is None else self.key[pick]
        keep = None if self.keep is None else self.keep[pick][:, rows]
        return Scores(both(self.query), key, scale, mask, False, None, self.softcap, both(self.scores), keep)

    def _written_out(self) -> Tensor | None:
        if self.support is None:
            return None
        if self.n_query * self.n_key > WHOLE:
            raise NoCloseLook(f"a support of {self.n_query} x {self.n_key} keys is too large for a close look")
        return self.support.dense(self.n_query, self.n_key, (self.batch, self.heads), self.first.device)

    def head(self, index: int) -> Scores:
        """The same call for one head."""

        def one(t: Tensor | None) -> Tensor | None:
            return None if t is None else t if t.shape[1] == 1 else t[:, index * t.shape[1] // self.heads :][:, :1]

        mask = hide(self.mask, self._written_out())
        scale = one(self.scale) if isinstance(self.scale, Tensor) else self.scale
        return replace(
            self, query=one(self.query), key=one(self.key), scale=scale, mask=one(mask), support=None,
            scores=one(self.scores),
        )  # fmt: skip

    def gibbs(self) -> Gibbs:
        """The distribution."""
        if self.scores is not None:
            s = added(self.scores)
            zero = s.new_zeros(1, 1, 1, 1)
            return Gibbs(zero.expand(1, 1, self.n_query, 1), zero.expand(1, 1, self.n_key, 1), bias=s)
        assert self.query is not None
        assert self.key is not None
        seen, bias = support.all() if self.support is None else self.support, None
        if self.mask is not None and self.mask.dtype == torch.bool:
            seen = seen & support.mask(self.mask)
        elif self.mask is not None:
            bias = added(self.mask)
        if self.causal:
            seen = seen & support.causal()
        grouped = self.key.shape[1] != self.query.shape[1]
        return Gibbs(
            self.query, self.key, scale=self.scale, bias=bias, support=seen, softcap=self.softcap, grouped=grouped
        )

    def at_factors(self, factors: Sequence[float]) -> Scores:
        """Rows that were taken, once for each factor of the scale, one after the other (a bias stays)."""
        assert self.support is None
        assert not self.causal

        keep = None if self.keep is None else self.keep.repeat(1, len(factors))
        if self.scores is not None:
            s = added(self.scores)
            return replace(self, scores=torch.cat([s * f for f in factors], 2), keep=keep)
        wide = torch.promote_types(self.first.dtype, torch.float32)
        given = torch.as_tensor(self.scale, dtype=torch.float64, device=self.first.device).expand(self.shape)
        scale = torch.cat([given * f for f in factors], 2).to(wide)
        query, mask = self.first.repeat(1, 1, len(factors), 1), self.mask
        if mask is not None and mask.shape[2] > 1:  # a mask of one row is broadcast; a query is one row of its own
            mask = mask.repeat(1, 1, len(factors), 1)
        return replace(self, query=query, scale=scale, mask=mask, keep=keep)

    def plain(self) -> tuple[Tensor, Tensor, float, bool] | None:
        """Query, key, scale and whether it is causal, where nothing else matters."""
        if self.query is None or self.key is None or self.mask is not None or self.support is not None or self.softcap:
            return None
        return (self.query, self.key, self.scale, self.causal) if isinstance(self.scale, (int, float)) else None

    def first_key(self, log_partition: Tensor) -> Tensor:  # (batch, heads, n_query)
        """Mass on key 0: exp(score_i0 - log Z_i), 0 where it is not visible."""
        if self.n_key == 0:
            return torch.zeros_like(log_partition)
        if self.support is not None:  # the support decides which rows see key 0
            return (-self.gibbs().nll(torch.zeros(self.shape, dtype=torch.long, device=self.first.device))).exp()
        mask, scores = (None if t is None else t[..., :1] for t in (self.mask, self.scores))
        alone = replace(self, key=None if self.key is None else self.key[:, :, :1], mask=mask, scores=scores)
        return (alone.gibbs().log_partition().expand(self.shape) - log_partition).exp()  # of one key: its score


def raised(t: Tensor) -> Tensor:
    """In float32, or float64 if it is."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def invisible(dtype: torch.dtype) -> float:
    """Added values at or below this hide a key: the dtype's minimum (and sums with it), and the -1e9 of older code."""
    return max(torch.finfo(dtype).min / 2, -1e8)


def added(t: Tensor) -> Tensor:
    """Scores or an added mask as the engine takes them: raised, and -inf where a key is hidden."""
    return torch.where(t <= invisible(t.dtype), -torch.inf, raised(t))


def hide(mask: Tensor | None, seen: Tensor | None) -> Tensor | None:
    """A mask, boolean or added, that also hides what is not seen."""
    if mask is None or seen is None:
        return seen if mask is None else mask
    return mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)


def sdpa_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: Any, softcap: float | None = None
) -> Scores:
    """Any shape SDPA takes, as (batch, heads, n, dim)."""
    rank, lead = query.dim(), query.shape[:-3]

    def shaped(t: Tensor, inner: int) -> Tensor:
        """(batch, heads) before the `inner` last dimensions."""
        t = t.detach()
        while t.dim() < inner:
            t = t[None]
        if rank < 4:
            t = t.unsqueeze(-inner - 1)
        elif rank > 4 and t.dim() > inner + 1:
            t = t.expand(*lead, *t.shape[-inner - 1 :]).flatten(0, rank - 4)
        while t.dim() < inner + 2:
            t = t[None]
        return t

    query, key, mask = shaped(query, 2), shaped(key, 2), None if mask is None else shaped(mask, 2)
    scale = shaped(scale, 1) if isinstance(scale, Tensor) else scale
    return Scores(query, key, scale, mask, causal, None, softcap)


def partita_scores(call: dict[str, Any]) -> Scores:
    """A call of partita.attention: its own reading of its arguments, its policy called with all that it can see."""
    query, key = call["query"], call["key"]
    options: Any = {name: call[name] for name in _OF_SCORES if name in call}
    causal = bool(options.get("is_causal", False))
    problem = Problem.of(query.detach(), key.detach(), **options)
    scale = problem.resolved().scale
    if isinstance(problem.score, InnerProduct):
        query, key = compared(problem.score, query.detach(), key.detach())
    elif problem.score is not None:
        raise NoCloseLook("a score given by a callable takes no close look")
    n_query, n_key, lead = query.shape[-2], key.shape[-2], query.shape[:-2]
    mask, seen = problem.bias, options.get("support")
    if problem.rule is not None:
        if math.prod(lead) * n_query * n_key > WHOLE:
            raise NoCloseLook(f"a position bias of {n_query} x {n_key} is too large for a close look")
        rule = problem.rule.dense(n_query, n_key, query.detach())
        mask = rule if mask is None else mask + rule
    shown = options.get("attn_mask")
    mask = hide(mask, shown if shown is not None and shown.dtype == torch.bool else None)
    if seen is not None and query.dim() != 4:  # its batch dimensions change here
        mask, seen = hide(mask, seen.dense(n_query, n_key, lead, query.device)), None
    read = sdpa_scores(query, key, mask, causal, scale, problem.softcap)
    return replace(read, support=seen)


def self_padding(call: Scores) -> Tensor | None:
    """Padded queries of self-attention, read off the mask: a token that may not see itself is padding.

    Where no token may see itself the mask means something else, and nothing is left out.
    """
    if call.n_query != call.n_key:
        return None
    seen, dense = None, call.dense
    if dense is not None:
        line = dense[:, 0, 0] if dense.shape[2] == 1 else dense[:, 0].diagonal(dim1=-2, dim2=-1)
        seen = line if line.dtype == torch.bool else line > invisible(line.dtype)
    if call.support is not None and call.n_query * call.n_key <= WHOLE // 4:
        shown = call.support.dense(call.n_query, call.n_key, (call.batch, call.heads), call.first.device)
        shown = shown[:, 0].diagonal(dim1=-2, dim2=-1)
        seen = shown if seen is None else seen & shown
    if seen is None:
        return None
    seen = seen.expand(call.batch, call.n_query)
    return seen | ~seen.any(-1, keepdim=True)
