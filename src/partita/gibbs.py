"""Gibbs: the distribution over keys, kept as its ingredients, and everything that can be read off it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita._checks import broadcast, check_pair, check_rows, check_whole
from partita.engine import State, Stats
from partita.engine import explain as explain_request
from partita.engine.axes import split_heads
from partita.engine.disjoint import visible as visible_keys
from partita.engine.execute import attention as plain_attention
from partita.engine.execute import both_ways, execute, sample, scores, top, weighted_nll
from partita.engine.execute import gaps as count_gaps
from partita.engine.execute import received as column_sums
from partita.engine.pairs import Pairs
from partita.engine.request import Request, build, extend
from partita.engine.sums import Sums
from partita.engine.terms import Term
from partita.errors import DtypeError, ValueRangeError
from partita.precision import output_dtype
from partita.scale import Policy, TargetEntropy
from partita.score import InnerProduct, Score
from partita.solve import as_mask, only_hides, solve_scale
from partita.support import Support
from partita.support.base import check_support

__all__ = ["Gibbs", "explain", "plain_attention"]


class _Passes(dict[str, tuple[tuple[object, ...], Sums]]):
    """Finished passes by what they read; a class of its own because a plain dict cannot be referred to weakly."""

    target: Tensor | None = None  # the one the "target" pass has read
    request: tuple[tuple[object, ...], Request] | None = None
    features: tuple[tuple[object, ...], tuple[Tensor, Tensor]] | None = None
    scale: float | Tensor = 1.0


class Gibbs:
    """A distribution over keys for each query.

        p(j|i) = exp( softcap(scale_i * <query_i, key_j>) + bias_ij ) / Z_i        j in the support of i

    Nothing of size n_query * n_key is built, except by `probs`. The first read fills all row statistics; later reads of
    the same object share that pass and its graph. A tensor given here, or to the support, that is changed in place is
    noticed by the next read; what torch keeps no version of is not: tensors made under `torch.inference_mode`, and
    writes through `.data`, NumPy or another process.

    >>> p = Gibbs(torch.zeros(2, 3), torch.zeros(5, 3))
    >>> p.entropy()  # uniform over 5 keys: log 5
    tensor([1.6094, 1.6094])

    scale: None (1), a number, a tensor broadcastable to the rows, or a policy of `partita.scale`.
    bias: broadcastable to (..., n_query, n_key); -inf hides a key.
    grouped: query has a multiple of key's heads, (..., heads, n, dim).
    cap_bias: the bias is added before the softcap instead of after it.
    score: what stands in the place of <query, key>: an object of `partita.score`, or any callable that gives the scores
        (..., q, k) of a tile of queries and a tile of keys. A module's parameters get their gradients.
    """

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
        self._passes = _Passes()
        if self._pairs is not None and not torch.compiler.is_compiling():
            self._pairs.check(self._build(1.0))
        self.request()  # every mistake is reported here, before anything is computed

    # ---- how sharp -------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float | Tensor:
        """The scale of each row: a policy's answer, or what was given."""
        self.request()
        return self._passes.scale

    def _resolve(self) -> float | Tensor:
        policy = self._given
        if not isinstance(policy, Policy):
            return policy
        if isinstance(policy, TargetEntropy):
            if self.softcap is not None:
                raise ValueRangeError("TargetEntropy takes no softcap: it solves for the scale of plain scores.")
            if self.bias is not None and only_hides(self.bias):
                self.support, self.bias = as_mask(self.bias, self.support), None
            entropy = policy.target(self._visible())
            given: Any = {"support": self.support, "bias": self.bias, "grouped": self.grouped, "score": self.score}
            solved: Tensor = solve_scale(self.query, self.key, entropy=entropy, **given)
            return solved
        return policy(self._visible(), self.query.shape[-1], self.query)

    def _visible(self) -> Tensor:
        """Visible keys per row before any pass: closed form for supports; a bias of -inf is looked at."""
        request = self._build(1.0)
        terms = request.terms
        if request.bias is not None:
            shown = Term(mask=request.bias != -torch.inf)
            terms = tuple(term & shown for term in terms) if terms else (shown,)
        count = visible_keys(terms, request.n_query, request.n_key, request.batch, self.query.device)
        return request.ungroup(count).to(request.dtype)

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
        known = self._passes.features
        if known is None or known[0] != self._stamp():
            made = prepare(self.query, self.key)
            self._passes.features = known = self._stamp(), made
            passes = weakref.ref(self._passes)
            for node in (x.grad_fn for x in made if x.grad_fn is not None):
                node.register_prehook(lambda _: _forget(passes))
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
        known = self._passes.request
        if known is not None and (torch.compiler.is_compiling() or known[0] == self._stamp()):
            return known[1]
        if isinstance(self._given, Policy):
            self._build(1.0)  # what else is wrong is said before a policy computes
        self._passes.scale = self._resolve()
        request = self._build(self._passes.scale)
        self._passes.request = (() if torch.compiler.is_compiling() else self._stamp(), request)
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
            wider = self._build(self._passes.scale, broadcast(*rows))
            request = extend(wider, value=value, target=target, **asked)
            assert request is not None
        sums = execute(request)
        if not torch.compiler.is_compiling():
            self._forget_after_backward(sums)
            if extremes and request.batch == ready.batch:
                self._passes["extremes"] = (self._stamp(), sums)
            if request.level == 2 and request.batch == ready.batch:
                self._passes["rows"] = (self._stamp(), sums)
                if target is not None:
                    self._passes["target"] = (self._stamp(target), sums)
                    self._passes.target = target
        return sums

    def _forget_after_backward(self, sums: Sums) -> None:
        """Once a backward has run through a pass its graph may be gone: the next read starts a new one."""
        if sums.node is not None:
            passes = weakref.ref(self._passes)  # or the graph and this object would keep each other alive
            sums.node.register_prehook(lambda _: _forget(passes))

    def _pass(self) -> Sums:
        known = self._passes.get("rows")
        if known is not None and known[0] == self._stamp():
            return known[1]
        return self.reduce()

    def _rows(self) -> State:
        return self._pass().state

    # ---- row statistics --------------------------------------------------------------------------------------------

    def log_partition(self) -> Tensor:  # (..., n_query)
        """log Z = log sum_j exp(score_j); -inf on an empty support."""
        return self._rows().log_partition()

    def entropy(self) -> Tensor:
        """H = -sum_j p_j log p_j = log Z - E[score], computed centred at the peak; 0 on an empty support."""
        return self._rows().entropy()

    def mean_score(self) -> Tensor:
        """E[score]."""
        return self._rows().mean_score()

    def score_variance(self) -> Tensor:
        """Var[score]: minus the derivative of the entropy with respect to log scale, where there is no bias."""
        return self._rows().score_variance()

    def max_score(self) -> Tensor:
        """max_j score_j; has no gradient (`top(1)` has)."""
        return self._rows().max_score()

    def min_score(self) -> Tensor:
        """min_j score_j over the visible keys, +inf on an empty support; has no gradient."""
        least = self._extremes().least
        assert least is not None
        return least

    def argmax(self) -> Tensor:  # (..., n_query) int64
        """The key of the largest score, the first of those that tie; -1 on an empty support.

        >>> Gibbs(torch.ones(1, 1), torch.tensor([[2.0], [3.0], [3.0], [1.0]])).argmax()
        tensor([1])
        """
        return self._place(0)

    def argmin(self) -> Tensor:  # (..., n_query) int64
        """The key of the smallest score, the first of those that tie; -1 on an empty support."""
        return self._place(1)

    def _place(self, which: int) -> Tensor:
        places = self._extremes().places
        assert places is not None
        return places[which]

    def _extremes(self) -> Sums:
        """The pass that knows both ends; where the rows are known already it leaves everything else out."""
        for name in ("extremes", "rows"):
            known = self._passes.get(name)
            if known is not None and known[0] == self._stamp():
                if known[1].places is not None:
                    return known[1]
                with torch.no_grad():
                    found = self.reduce(statistics=False, extremes=True)
                self._passes["extremes"] = (self._stamp(), found)
                return found
        return self.reduce(extremes=True)

    def visible(self) -> Tensor:
        """Number of keys each query may see."""
        return self._rows().visible()

    def effective_width(self) -> Tensor:
        """exp(H): between 1 and `visible`; 1 on an empty support, whose entropy is 0."""
        return self.entropy().exp()

    def stats(self) -> Stats:
        """All row statistics, in one pass."""
        return self._rows().stats()

    # ---- reads that need more than the rows ------------------------------------------------------------------------

    def expectation(self, value: Tensor) -> Tensor:  # (..., n_query, dim_value)
        """E[value_j] under p(.|i), for value (..., n_key, dim_value); 0 on an empty support."""
        return self.mean(value)[0].to(output_dtype(value))

    def mean(self, value: Tensor, *, statistics: bool = True) -> tuple[Tensor, State]:  # (..., n_query, dim_value)
        """E[value_j] in the dtype of the sums, and the state of the rows it was read from, which holds no value.

        One pass over the values less than `state(value).expectation()`; statistics as for `state`.
        """
        sums = self.reduce(value, statistics=statistics, mean=True)
        assert sums.mean is not None
        return sums.mean, sums.state

    def state(self, value: Tensor | None = None, *, statistics: bool = True) -> State:
        """The mergeable state of these keys; `partita.merge` joins those of other keys of the same queries.

        statistics=False leaves out the moments of the score, for a reader of log Z and E[value] alone.
        """
        return self._rows() if value is None else self.reduce(value, statistics=statistics).state

    def nll(self, target: Tensor) -> Tensor:  # (..., n_query)
        """-log p(target|i) = log Z - score_target; +inf where the target is not visible.

        >>> Gibbs(torch.zeros(1, 2), torch.zeros(10, 2)).nll(torch.tensor([3]))  # log 10
        tensor([2.3026])
        """
        return self._at(target).nll()

    def weighted_nll(self, target: Tensor, weight: Tensor) -> Tensor:  # ()
        """sum_i weight_i * -log p(target_i|i): a scalar, whose gradients a backend may make while it goes forward.

        >>> uniform = Gibbs(torch.zeros(2, 2), torch.zeros(10, 2))
        >>> uniform.weighted_nll(torch.tensor([3, 4]), torch.tensor([0.5, 0.5]))  # log 10
        tensor(2.3026)
        """
        request = extend(self.request(), target=target, statistics=False)
        if request is None:  # the target brings batch dimensions of its own
            return (weight * self.reduce(target=target, statistics=False).nll()).sum()
        return weighted_nll(request, weight)

    def both_ways_nll(self) -> tuple[Tensor, Tensor]:  # (n,), (n,)
        """-log p(i|i) of key i for query i, and of query i for key i, from one score matrix of n pairs.

            rows_i = log sum_j exp(s_ij) - s_ii          columns_j = log sum_i exp(s_ij) - s_jj

        Without a support and a softcap, with one scale for all rows: a column has no row of its own.
        """
        request = self.request()
        if request.terms or request.softcap is not None or request.scale.numel() > 1:
            raise ValueRangeError("both ways need one scale for all rows, no support and no softcap.")
        return both_ways(request)

    def received(self, weight: Tensor | None = None) -> Tensor:  # (..., n_key)
        """What each key receives from all rows: the other margin, in two passes at most.

            received_j = sum_i weight_i p(j|i)

        Equal to ``(weight[..., None] * p.probs()).sum(-2)``. Grouped queries give a number per key head. A row that
        sees nothing gives nothing. Has gradients to query, key, scale, bias and weight (M-COL-1, M-COL-2).

        >>> Gibbs(torch.zeros(3, 2), torch.zeros(4, 2), support=partita.support.causal()).received()  # 1 + 1/2 + 1/3
        tensor([1.8333, 0.8333, 0.3333, 0.0000])

        weight: broadcasts to the rows (..., n_query); 1 unless given.
        """
        request, rows = self.request(), self._pass()
        peak, mass = rows.peak, rows.mass.detach()
        if weight is None:
            weight = torch.ones_like(mass)
        else:
            check_rows("weight", weight, mass)
            weight = weight.to(mass.dtype).expand(mass.shape)
        if request.groups > 1:
            peak, mass, weight = (split_heads(x, 1, request.groups) for x in (peak, mass, weight))
        return column_sums(request, peak, mass, weight)

    def log_prob(self, target: Tensor) -> Tensor:
        """log p(target|i)."""
        return -self.nll(target)

    def target_rank(self, target: Tensor) -> Tensor:  # (..., n_query) int64
        """How many visible keys score higher than the target: 0 is the best."""
        rank = self._at(target).rank
        assert rank is not None
        return rank

    def _at(self, target: Tensor) -> Sums:
        """The pass that reads this target, its rank included; the last one is remembered."""
        known = self._passes.get("target")
        if known is not None and self._passes.target is target and known[0] == self._stamp(target):
            return known[1]
        return self.reduce(target=target, rank=True)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:  # (..., n_query) int64
        """One key per query, drawn from p by the Gumbel-max rule while streaming; -1 on an empty support."""
        request = self.request()
        return request.ungroup(sample(request, generator))

    def top(self, k: int) -> tuple[Tensor, Tensor]:  # (..., n_query, k) each
        """The k best scores and their keys, best first; past the visible keys -inf and -1. Scores have a gradient."""
        check_whole("k", k, least=0)
        request = self.request()
        score, index = top(request, k)
        given = (request.query, request.key, self.bias, self.scale, *(self._pairs.parameters if self._pairs else ()))
        if torch.is_grad_enabled() and [1 for t in given if isinstance(t, Tensor) and t.requires_grad]:
            again = _score_at(request, index.clamp(min=0))
            score = torch.where(index >= 0, again, score)
        return request.ungroup(score, 1), request.ungroup(index, 1)

    def top_log_prob(self, k: int) -> tuple[Tensor, Tensor]:  # (..., n_query, k) each
        """log p of the k likeliest keys, and those keys; past the visible keys -inf and -1.

        >>> Gibbs(torch.ones(1, 1), torch.tensor([[3.0], [1.0]]).log()).top_log_prob(1)[0].exp()  # 3 / (3 + 1)
        tensor([[0.7500]])
        """
        score, index = self.top(k)
        level = torch.where(self._rows().empty(), 0.0, self.log_partition())
        return score - level[..., None], index

    def gaps(self, edges: Sequence[float] | Tensor) -> Tensor:  # (..., n_query, len(edges)) int64
        """How many visible keys score within each edge of the row's maximum: how many compete with the best.

            gaps_ie = #{ j : max_k score_ik - score_ij <= edge_e }

        The maximum itself counts, so a row that sees something has at least 1; 0 on an empty support, and where a
        visible score is nan. Edges may be in any order, +inf among them counts every visible key. No gradient
        (M-COL-5).

        >>> Gibbs(torch.ones(1, 1), torch.tensor([[5.0], [4.0], [4.0], [1.0]])).gaps([0.0, 1.0, 10.0])
        tensor([[1, 3, 4]])
        """
        request = self.request()
        return request.ungroup(count_gaps(request, edges), 1)

    def probs(self) -> Tensor:  # (..., n_query, n_key)
        """The whole matrix p(j|i): dense, n_query * n_key numbers. For small problems and for looking at."""
        request = self.request()
        s = scores(request)
        state = State.of(s)
        level = torch.where(state.empty(), torch.zeros_like(state.peak), state.log_partition())
        p = (s - level[..., None]).exp()
        return (p.flatten(-4, -3) if request.groups > 1 else p).to(self.query.dtype)

    def __repr__(self) -> str:
        given: dict[str, object] = {"scale": self._given, "bias": self.bias, "support": self.support}
        given |= {"softcap": self.softcap, "score": self.score}
        more = "".join(
            f", {name}={tuple(value.shape) if isinstance(value, Tensor) else value!r}"
            for name, value in given.items()
            if value is not None and not (name == "scale" and isinstance(value, float) and value == 1.0)
        )
        return f"Gibbs(query={tuple(self.query.shape)}, key={tuple(self.key.shape)}, dtype={self.query.dtype}{more})"


def _check_sharpens(query: Tensor, bias: Tensor | None, scale: object) -> None:
    """A scale multiplies <query, key> and not the bias: where all scores came as a bias it would do nothing."""
    nothing = isinstance(query, Tensor) and query.dim() > 0 and query.shape[-1] == 0
    if nothing and bias is not None and isinstance(scale, Policy):
        raise ValueRangeError(
            f"{scale!r} would do nothing: a scale multiplies the scores of query and key, which have no features here, "
            f"and not the bias. Multiply the scores by policy(visible, dim)[..., None] before they are given as bias, "
            f"or give what makes them as score=."
        )


def _forget(passes: weakref.ref[_Passes]) -> None:
    known = passes()
    if known is not None:
        known.clear()
        known.request = known.target = known.features = None


def _score_at(request: Request, index: Tensor) -> Tensor:  # (*b, Q, k)
    """Scores of chosen keys, differentiable; the keys are gathered."""
    batch, (n, k) = request.batch, index.shape[-2:]
    if not request.n_key:  # nothing to choose from: a key of zeros stands in, so that its gradient is 0 and not absent
        pad = torch.nn.functional.pad
        bias = None if request.bias is None else pad(request.bias[..., :0], (0, 1))
        request = replace(request, key=pad(request.key, (0, 0, 0, 1)), bias=bias)
    key = request.key.expand(*batch, *request.key.shape[-2:]).to(request.dtype)
    flat = index.reshape(*batch, n * k, 1).expand(*batch, n * k, key.shape[-1])
    chosen = key.gather(-2, flat).unflatten(-2, (n, k))
    query = request.query.to(request.dtype)
    if request.pairs is None:
        score = ((query * request.scale[..., None])[..., None, :] * chosen).sum(-1)
    else:
        score = request.pairs(query[..., None, :], chosen).squeeze(-2) * request.scale[..., None]
    bias = None
    if request.bias is not None:
        bias = request.bias.expand(*batch, n, request.n_key).gather(-1, index).to(score.dtype)
    if request.softcap is not None:
        before, bias = (bias, None) if request.cap_bias else (None, bias)
        score = request.softcap * torch.tanh((score if before is None else score + before) / request.softcap)
    out: Tensor = score if bias is None else score + bias
    return out


class Explanation(str):
    """Text that is shown as it reads, at a prompt too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(gibbs: Gibbs) -> Explanation:
    """Which backend serves this distribution, and why the others do not.

    >>> print(explain(Gibbs(torch.zeros(2, 3), torch.zeros(5, 3), support=None)).splitlines()[0])  # doctest: +SKIP
    native serves
    """
    if not isinstance(gibbs, Gibbs):
        raise DtypeError(f"explain takes a Gibbs; got {type(gibbs).__name__}. Make one: explain(Gibbs(query, key)).")
    return Explanation(explain_request(gibbs.request()))
