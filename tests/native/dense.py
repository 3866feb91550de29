"""The engine's sums and their gradients, dense, in float64, with torch's own autograd: the native kernels' judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.engine.request import Request
from partita.engine.terms import Term
from tests import reference


@dataclass(frozen=True)
class Case:
    """Canonical operands of one call."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    scale: Tensor
    bias: Tensor | None = None
    target: Tensor | None = None
    terms: tuple[Term, ...] = ()
    softcap: float | None = None

    def request(self, **reads: bool) -> Request:
        return Request(
            self.query, self.key, self.value, self.scale, self.bias, self.target, self.terms, self.softcap, **reads
        )

    def exact(self) -> Case:
        """The same numbers in float64, ready for autograd."""

        def wide(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().double().requires_grad_()

        return replace(self, **{name: wide(getattr(self, name)) for name in ("query", "key", "value", "scale", "bias")})


def visible(case: Case) -> Tensor:
    """(*b, Q, K) bool, bias included."""
    n_query, n_key = case.query.shape[-2], case.key.shape[-2]
    cols = torch.arange(n_key)
    seen = torch.ones(n_query, n_key, dtype=torch.bool) if not case.terms else torch.zeros(1, dtype=torch.bool)
    for term in case.terms:
        one = torch.ones(n_query, n_key, dtype=torch.bool)
        if term.start is not None:
            one = one & (cols >= term.start[..., None])
        if term.stop is not None:
            one = one & (cols < term.stop[..., None])
        if term.query_segment is not None and term.key_segment is not None:
            one = one & (term.query_segment[..., None] == term.key_segment[..., None, :])
        if term.mask is not None:
            one = one & term.mask
        if term.skip is not None:
            one = one & (cols != term.skip[..., None])
        seen = seen | one
    if case.bias is not None:
        seen = seen & (case.bias > float("-inf"))
    return seen


def scores(case: Case) -> Tensor:
    """(*b, Q, K): -inf where not visible."""
    seen = visible(case)
    s = reference.score(case.query, case.key, scale=case.scale, bias=case.bias, softcap=case.softcap, visible=seen)
    batch = [seen.shape[:-2], s.shape[:-2]]
    batch += [case.target.shape[:-1]] if case.target is not None else []
    batch += [case.value.shape[:-2]] if case.value is not None else []
    return s.expand(*torch.broadcast_shapes(*batch), *s.shape[-2:])


@dataclass(frozen=True)
class Dense:
    peak: Tensor
    mass: Tensor
    first: Tensor
    second: Tensor
    moment: Tensor | None
    count: Tensor
    target_score: Tensor | None

    @property
    def spread(self) -> Tensor:
        """The second moment about the mean."""
        return self.second - self.first**2 / torch.where(self.mass == 0, 1.0, self.mass)


def reduce(case: Case, peak: Tensor | None = None) -> Dense:
    """The sums, relative to `peak` (a constant) or to the true peak."""
    s = scores(case)
    seen = s > float("-inf")
    top = s.detach().amax(-1) if s.shape[-1] else torch.full(s.shape[:-1], float("-inf"), dtype=s.dtype)
    peak = top if peak is None else peak.double()
    c = torch.where(seen, s - torch.where(peak.isinf(), 0.0, peak)[..., None], 0.0)
    e = torch.where(seen, c.exp(), 0.0)
    moment = None if case.value is None else e @ case.value
    picked = None
    if case.target is not None:
        index = case.target.expand(s.shape[:-1])[..., None]
        picked = s.gather(-1, index)[..., 0]
    return Dense(top, e.sum(-1), (e * c).sum(-1), (e * c * c).sum(-1), moment, seen.sum(-1), picked)


def total(sums: Dense, upstream: Sequence[Tensor | None]) -> Tensor:
    """<upstream, (mass, first, second, moment, target_score)>, which the backward pass differentiates."""
    parts = [0.0 * sums.mass.sum()]
    for got, g in zip((sums.mass, sums.first, sums.second, sums.moment, sums.target_score), upstream, strict=True):
        if g is not None and got is not None:
            parts.append((torch.where(got > float("-inf"), got, 0.0) * g.double()).sum())
    return torch.stack(parts).sum()
