"""What a distribution is made of, and the passes over it, remembered until something they read has changed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita._checks import broadcast, check_pair
from partita.engine.execute import execute
from partita.engine.pairs import Pairs
from partita.engine.request import Request, build, extend
from partita.engine.sums import Sums
from partita.errors import ValueRangeError
from partita.scale import Policy, TargetEntropy
from partita.score import InnerProduct, Score
from partita.solve import as_mask, only_hides, solve_scale
from partita.support import Support
from partita.support.base import check_support

__all__ = ["Passes", "remember", "remembered"]


class _Known(dict[str, tuple[tuple[object, ...], Sums]]):
    """Finished passes by what they read; a class of its own because a plain dict cannot be referred to weakly."""

    target: Tensor | None = None  # the one the "target" pass has read
    request: tuple[tuple[object, ...], Request] | None = None
    features: tuple[tuple[object, ...], tuple[Tensor, Tensor]] | None = None
    scale: float | Tensor = 1.0

    def forget_after(self, node: Any) -> None:
        """Once a backward has run through a pass its graph may be gone: the next read starts a new one."""
        if node is not None:
            own = weakref.ref(self)  # or the graph and this object would keep each other alive
            node.register_prehook(lambda _: _forget(own))


class Passes:
    """Abstract: the ingredients of a distribution over keys (`Gibbs` says what they are), its request, its passes."""

    def __init__(
        self,
        query: Tensor,  # (..., n_query, dim)
        key: Tensor,  # (..., n_key, dim)
        *,
        scale: float | Tensor | Policy | None = None,
        bias: Tensor | None = None,
        support: Support | None = None,
        softcap: float | None = None,
        grouped: bool = False,
        cap_bias: bool = False,
        score: Score | None = None,
    ):
        check_support(support)
        _check_sharpens(query, bias, scale)
        self.query = query
        self.key = key
        self.bias = bias
        self.support = support
        self.softcap = softcap
        self.grouped = grouped
        self.cap_bias = cap_bias
        self.score = score
        self._pairs = None if score is None or isinstance(score, InnerProduct) else Pairs.of(score)
        self._given = 1.0 if scale is None else scale
        self._known = _Known()
        if self._pairs is not None and not torch.compiler.is_compiling():
            self._pairs.check(self._build(1.0))
        self.request()  # every mistake is reported here, before anything is computed

    # ---- how sharp -------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float | Tensor:
        """The scale of each row: a policy's answer, or what was given."""
        self.request()
        return self._known.scale

    def _resolve(self, policy: Policy) -> Tensor:
        unscaled = self._build(1.0)  # what else is wrong is said before a policy computes
        if isinstance(policy, TargetEntropy):
            if self.softcap is not None:
                raise ValueRangeError("TargetEntropy takes no softcap: it solves for the scale of plain scores.")
            if self.bias is not None and only_hides(self.bias):
                self.support, self.bias = as_mask(self.bias, self.support), None
            entropy = policy.target(_visible(self._build(1.0)))
            given: Any = {"support": self.support, "bias": self.bias, "grouped": self.grouped, "score": self.score}
            solved = solve_scale(self.query, self.key, entropy=entropy, **given)
            assert isinstance(solved, Tensor)
            return solved
        return policy(_visible(unscaled), self.query.shape[-1], self.query)

    # ---- the pass --------------------------------------------------------------------------------------------------

    def _features(self) -> tuple[Tensor, Tensor]:
        """What is compared: query and key, or what the score makes of both; made again like a pass."""
        prepare = getattr(self.score, "features", None)
        if prepare is None:
            return self.query, self.key
        check_pair(self.query, self.key, alike=False)
        if torch.compiler.is_compiling():
            made: tuple[Tensor, Tensor] = prepare(self.query, self.key)
            return made
        known = self._known.features
        if known is None or known[0] != self._stamp():
            made = prepare(self.query, self.key)
            self._known.features = known = self._stamp(), made
            for x in made:
                self._known.forget_after(x.grad_fn)
        return known[1]

    def _build(self, scale: float | Tensor, batch: Sequence[int] = ()) -> Request:
        query, key = self._features()
        return build(
            query,
            key,
            scale=scale,
            bias=self.bias,
            support=self.support,
            softcap=self.softcap,
            cap_bias=self.cap_bias,
            grouped=self.grouped,
            batch=batch,
            pairs=self._pairs,
        )

    def request(self) -> Request:
        """What is asked of the engine, without a value or a target; renewed like a pass."""
        known = self._known.request
        if known is not None and (torch.compiler.is_compiling() or known[0] == self._stamp()):
            return known[1]
        given = self._given
        self._known.scale = self._resolve(given) if isinstance(given, Policy) else given
        request = self._build(self._known.scale)
        self._known.request = (() if torch.compiler.is_compiling() else self._stamp(), request)
        return request

    def _stamp(self, target: Tensor | None = None) -> tuple[object, ...]:
        """What a cached pass depends on besides this object: the grad mode, and whether a tensor was written to."""
        learned = tuple(p for x in (self._given, self.score) if isinstance(x, torch.nn.Module) for p in x.parameters())
        bound = () if self.support is None else self.support.tensors()
        given = (self.query, self.key, self.bias, self._given, target, *learned, *bound)
        versions = (t._version for t in given if isinstance(t, Tensor) and not t.is_inference())
        return torch.is_grad_enabled(), *versions

    def reduce(
        self,
        value: Tensor | None = None,
        target: Tensor | None = None,
        *,
        rank: bool = False,
        statistics: bool = True,
        variance: bool = True,
        mean: bool = False,
        extremes: bool = False,
    ) -> Sums:
        """The pass: sums of every row, and what a value or a target adds; remembered for later reads of the rows.

        rank: how many keys score above the target.
        statistics: the moments of the score; without them the state knows log Z alone.
        variance: the second of them; without it the variance is nan, and a GPU saves a third of the arithmetic.
        mean: E[value] in place of the moment it comes from.
        extremes: the smallest score, and the keys of the largest and of the smallest.
        """
        ready = self.request()
        asked = {"rank": rank, "statistics": statistics, "variance": variance, "mean": mean, "extremes": extremes}
        request = extend(ready, value=value, target=target, **asked)
        if request is None:  # the value or the target brings batch dimensions of its own
            rows = [t.shape[:-tail] for t, tail in ((value, 2), (target, 1)) if t is not None]
            wider = self._build(self._known.scale, broadcast(*rows))
            request = extend(wider, value=value, target=target, **asked)
            assert request is not None
        sums = execute(request)
        if not torch.compiler.is_compiling():
            self._known.forget_after(sums.node)
            if extremes and request.batch == ready.batch:
                remember(self, "extremes", sums)
            if request.level == 2 and request.batch == ready.batch:
                remember(self, "rows", sums)
                if target is not None:
                    remember(self, "target", sums, target)
        return sums

    def __repr__(self) -> str:
        given: dict[str, object] = {"scale": self._given, "bias": self.bias, "support": self.support}
        given |= {"softcap": self.softcap, "score": self.score}
        more = "".join(
            f", {name}={tuple(value.shape) if isinstance(value, Tensor) else value!r}"
            for name, value in given.items()
            if value is not None and not (name == "scale" and isinstance(value, float) and value == 1.0)
        )
        return f"Gibbs(query={tuple(self.query.shape)}, key={tuple(self.key.shape)}, dtype={self.query.dtype}{more})"


def remember(passes: Passes, name: str, sums: Sums, target: Tensor | None = None) -> None:
    """Keep a pass for `remembered`, with the target it has read."""
    passes._known[name] = (passes._stamp(target), sums)
    if target is not None:
        passes._known.target = target


def remembered(passes: Passes, name: str, target: Tensor | None = None) -> Sums | None:
    """The last pass of this name, unless something it read has changed since, or its graph is gone."""
    last = passes._known.get(name)
    if last is None or (target is not None and passes._known.target is not target):
        return None
    return last[1] if last[0] == passes._stamp(target) else None


def _visible(request: Request) -> Tensor:  # (*b, heads, Q), as the query has its heads
    return request.ungroup(request.visible())


def _check_sharpens(query: Tensor, bias: Tensor | None, scale: object) -> None:
    """A scale multiplies <query, key> and not the bias: where all scores came as a bias it would do nothing."""
    nothing = isinstance(query, Tensor) and query.dim() > 0 and query.shape[-1] == 0
    if nothing and bias is not None and isinstance(scale, Policy):
        raise ValueRangeError(
            f"{scale!r} would do nothing: a scale multiplies the scores of query and key, which have no features here, "
            f"and not the bias. Multiply the scores by policy(visible, dim)[..., None] before they are given as bias, "
            f"or give what makes them as score=."
        )


def _forget(own: weakref.ref[_Known]) -> None:
    known = own()
    if known is not None:
        known.clear()
        known.request = known.target = known.features = None
