"""Gibbs: the distribution over keys, kept as its ingredients, and everything that can be read off it.

Passes over it are remembered until something they read has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from partita._checks import (
    broadcast,
    check_float,
    check_index_dtype,
    check_kind,
    check_pair,
    check_rows,
    check_whole,
    has_values,
    shape_text,
)  # fmt: skip
from partita.engine import State, Stats
from partita.engine import explain as explain_request
from partita.engine.axes import split_heads
from partita.engine.callable_score import Pairs, compared
from partita.engine.dispatch import both_ways, execute, scores, weighted_nll
from partita.engine.dispatch import received as column_sums
from partita.engine.request import Reads, Request, build
from partita.engine.scans import chosen_scores, sample, top
from partita.engine.scans import gaps as count_gaps
from partita.engine.state import levels
from partita.engine.sums import Sums
from partita.errors import DtypeError, ShapeError, TargetError, ValueRangeError
from partita.precision import output_dtype
from partita.scale import Policy, TargetEntropy
from partita.score import InnerProduct, Score
from partita.solve import as_mask, only_hides, solve_scale
from partita.support import Support
from partita.support.base import check_support

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Gibbs", "explain", "sharper"]

_IGNORED = -100  # a target that is none, as torch's cross entropy has it


class _Known(dict[str, tuple[Any, tuple[object, ...], Tensor | None]]):
    """What was made, the stamp it was made at, and the target it has read, by name; a dict that can be weakly held."""

    def forget_after(self, node: Any) -> None:
        """Once a backward has run through a pass its graph may be gone: the next read starts a new one."""
        if node is not None:
            own = weakref.ref(self)  # or the graph and this object would keep each other alive

            def forget(_: object) -> None:
                known = own()
                if known is not None:
                    known.clear()

            node.register_prehook(forget)


class Gibbs:
    """A distribution over keys for each query.

        p(j|i) = exp( softcap(scale_i * <query_i, key_j>) + bias_ij ) / Z_i        j in the support of i

    Nothing of size n_query * n_key is built, except by `probs`. The first read fills all row statistics; later reads of
    the same object share that pass and its graph. A tensor given here, or to the support, that is changed in place is
    noticed by the next read; what has no version counter is not tracked: tensors made under `torch.inference_mode`, and
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
        self._known = _Known()
        if self._pairs is not None and not torch.compiler.is_compiling():
            self._pairs.check(self._build(1.0))
        self.request()  # every mistake is reported here, before anything is computed

    # ---- how sharp -------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float | Tensor:
        """The scale of each row: a policy's answer, or what was given."""
        return self._ready()[1]

    def _resolve(self, policy: Policy) -> Tensor:
        unscaled = self._build(1.0)  # what else is wrong is said before a policy computes
        if not isinstance(policy, TargetEntropy):
            return policy(unscaled.ungroup(unscaled.visible()), self.query.shape[-1], self.query)
        if self.softcap is not None:
            raise ValueRangeError("TargetEntropy takes no softcap: it solves for the scale of plain scores.")
        if self.bias is not None and only_hides(self.bias):
            self.support, self.bias = as_mask(self.bias, self.support), None
            unscaled = self._build(1.0)
        entropy = policy.target(unscaled.ungroup(unscaled.visible()))
        given: Any = {"support": self.support, "bias": self.bias, "grouped": self.grouped, "score": self.score}
        solved = solve_scale(self.query, self.key, entropy=entropy, **given)
        assert isinstance(solved, Tensor)
        return solved

    # ---- the pass --------------------------------------------------------------------------------------------------

    def _features(self) -> tuple[Tensor, Tensor]:
        """What is compared: query and key, or what the score makes of both; made again like a pass."""
        if not hasattr(self.score, "features"):
            return self.query, self.key
        check_pair(self.query, self.key, alike=False)
        if torch.compiler.is_compiling():
            return compared(self.score, self.query, self.key)
        made: tuple[Tensor, Tensor] | None = self._remembered("features")
        if made is None:
            made = compared(self.score, self.query, self.key)
            self._remember("features", made)
            for x in made:
                self._known.forget_after(x.grad_fn)
        return made

    def _build(
        self, scale: float | Tensor, value: Tensor | None = None, target: Tensor | None = None, **reads: Unpack[Reads]
    ) -> Request:
        query, key = (self.query, self.key) if self.score is None else self._features()
        return build(
            query, key, value, target, scale=scale, bias=self.bias, support=self.support, softcap=self.softcap,
            cap_bias=self.cap_bias, grouped=self.grouped, pairs=self._pairs, **reads,
        )  # fmt: skip

    def request(self) -> Request:
        """The request to the engine, without a value or a target; renewed like a pass."""
        return self._ready()[0]

    def _ready(self) -> tuple[Request, float | Tensor]:
        """The request, and the scale of its rows; a graph, which has no versions to compare, keeps the first one."""
        compiling = torch.compiler.is_compiling()
        found: tuple[Request, float | Tensor] | None
        found = self._known["request"][0] if compiling and "request" in self._known else self._remembered("request")
        if found is None:
            scale = self._resolve(self._given) if isinstance(self._given, Policy) else self._given
            found = self._build(scale), scale
            self._known["request"] = found, () if compiling else self._stamp(), None
        return found

    def _stamp(self, target: Tensor | None = None) -> tuple[object, ...]:
        """What a cached pass depends on as well as this object: the grad mode, and whether a tensor was written to."""
        modules = [x for x in (self._given, self.score) if isinstance(x, torch.nn.Module)]
        learned = [p for x in modules for p in x.parameters()] if modules else []
        bound = () if self.support is None or self.support.positional else self.support.tensors()
        given = (self.query, self.key, self.bias, self._given, target, *learned, *bound)
        versions = [t._version for t in given if isinstance(t, Tensor) and not t.is_inference()]
        return torch.is_grad_enabled(), *versions

    def reduce(self, value: Tensor | None = None, target: Tensor | None = None, **reads: Unpack[Reads]) -> Sums:
        """The pass: sums of every row, and what a value or a target adds; remembered for later reads of the rows.

        rank: how many keys score above the target.
        statistics: the moments of the score; without them the state knows log Z alone.
        variance: the second of them; without it the variance is nan, and a GPU saves a third of the arithmetic.
        mean: E[value] in place of the moment it comes from.
        argmax: the first key of the largest score.
        """
        request = self.asking(value, target, **reads)
        sums = execute(request)
        if not torch.compiler.is_compiling():
            self._known.forget_after(sums.node)
            # a value or a target may bring batch dimensions of its own
            if (value is None and target is None) or request.batch == self.request().batch:
                if request.argmax:
                    self._remember("argmax", sums)
                if request.statistics and request.variance:
                    self._remember("rows", sums)
                    if target is not None:
                        self._remember("target", sums, target)
        return sums

    def asking(self, value: Tensor | None = None, target: Tensor | None = None, **reads: Unpack[Reads]) -> Request:
        """The request with a value or a target, and with what is read."""
        return self._build(self._ready()[1], value, target, **reads)

    def _remember(self, name: str, made: object, target: Tensor | None = None) -> None:
        self._known[name] = made, self._stamp(target), target

    def _remembered(self, name: str, target: Tensor | None = None) -> Any:
        """What was last made of this name, unless something it read has changed since, or its graph is gone."""
        made, stamp, read = self._known.get(name, (None, (), None))
        return made if made is not None and read is target and stamp == self._stamp(target) else None

    def _rows(self) -> State:
        found: Sums | None = self._remembered("rows")
        return (self.reduce() if found is None else found).state

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

    def argmax(self) -> Tensor:  # (..., n_query) int64
        """The key of the largest score, the first of those that tie; -1 on an empty support.

        >>> Gibbs(torch.ones(1, 1), torch.tensor([[2.0], [3.0], [3.0], [1.0]])).argmax()
        tensor([1])
        """
        found: Sums | None = self._remembered("argmax") or self._remembered("rows")
        if found is None:
            found = self.reduce(argmax=True)
        elif found.argmax is None:  # the rows are known: everything else is left out
            with torch.no_grad():
                found = self.reduce(statistics=False, argmax=True)
            self._remember("argmax", found)
        assert found.argmax is not None
        return found.argmax

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
        if value is None:
            check_float("value", value)
        sums = self.reduce(value, statistics=statistics, mean=True)
        assert sums.mean is not None
        return sums.mean, sums.state

    def state(self, value: Tensor | None = None, *, statistics: bool = True) -> State:
        """The mergeable state of these keys; `partita.merge` joins those of other keys of the same queries.

        statistics=False leaves out the moments of the score, for a reader of log Z and E[value] alone.
        """
        return self._rows() if value is None else self.reduce(value, statistics=statistics).state

    def nll(self, target: Tensor) -> Tensor:  # (..., n_query)
        """-log p(target|i) = log Z - score_target; +inf where the target is not visible, 0 where it is -100.

        A target (..., n_query, K) names K keys per row and makes the scores K times; `token_stats` makes them once.

        >>> Gibbs(torch.zeros(1, 2), torch.zeros(10, 2)).nll(torch.tensor([3]))  # log 10
        tensor([2.3026])
        """
        return self._of_target(target, Sums.nll, 0)

    def weighted_nll(self, target: Tensor, weight: Tensor) -> Tensor:  # ()
        """sum_i weight_i * -log p(target_i|i): a scalar, whose gradients a backend may make while it goes forward.

        >>> uniform = Gibbs(torch.zeros(2, 2), torch.zeros(10, 2))
        >>> uniform.weighted_nll(torch.tensor([3, 4]), torch.tensor([0.5, 0.5]))  # log 10
        tensor(2.3026)
        """
        if target is None:
            check_index_dtype("target", target)
        request = self.asking(target=target, statistics=False)
        if not isinstance(weight, Tensor) or weight.shape != target.shape or weight.dtype != request.dtype:
            rows = request.ungroup(request.scale.new_empty(()).expand(*request.batch, request.n_query))
            check_rows("weight", weight, target.expand(broadcast(rows.shape, target.shape)), over="target")
            weight = weight.to(request.dtype).expand(target.shape)
        return weighted_nll(request, weight)

    def both_ways_nll(self) -> tuple[Tensor, Tensor]:  # (n,), (n,)
        """-log p(i|i) of key i for query i, and of query i for key i, from one score matrix of n pairs.

            rows_i = log sum_j exp(s_ij) - s_ii          columns_j = log sum_i exp(s_ij) - s_jj

        Without a support and a softcap, with one scale for all rows: a column has no row of its own.
        """
        request = self.request()
        if request.terms or request.softcap is not None or request.scale.numel() > 1:
            raise ValueRangeError("both ways need one scale for all rows, no support and no softcap.")
        if request.n_query != request.n_key:
            raise ShapeError(
                f"both ways need pairs, key i for query i, so the same number of both; "
                f"got query {shape_text(self.query)} and key {shape_text(self.key)}."
            )
        return both_ways(request)

    def received(self, weight: Tensor | None = None) -> Tensor:  # (..., n_key)
        """What each key receives from all rows (column sums), in two passes at most.

            received_j = sum_i weight_i p(j|i)

        Equal to ``(weight[..., None] * p.probs()).sum(-2)``. Grouped queries give a number per key head. A row that
        sees nothing gives nothing. Has gradients to query, key, scale, bias and weight (M-COL-1, M-COL-2).

        >>> Gibbs(torch.zeros(3, 2), torch.zeros(4, 2), support=partita.support.causal()).received()  # 1 + 1/2 + 1/3
        tensor([1.8333, 0.8333, 0.3333, 0.0000])

        weight: broadcasts to the rows (..., n_query); 1 unless given.
        """
        request, rows = self.request(), self._rows()
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
        return self._of_target(target, _rank, -1)

    def _of_target(self, target: Tensor, read: Callable[[Sums], Tensor], ignored: int) -> Tensor:
        """What a pass with a target gives, for one or K keys per row; `ignored` where the target is -100."""
        if isinstance(target, Tensor) and target.shape[:-1] == self.query.shape[:-1]:
            return self._of_target(target.movedim(-1, 0), read, ignored).movedim(0, -1)
        try:
            if not isinstance(target, Tensor) or has_values(target):
                return read(self._at(target))
        except TargetError:
            if not bool((target == _IGNORED).any()):
                raise
        blank = target == _IGNORED
        return read(self._at(target.masked_fill(blank, 0))).masked_fill(blank, ignored)

    def _at(self, target: Tensor) -> Sums:
        """The pass that reads this target, its rank included; the last one is remembered."""
        if target is None:
            check_index_dtype("target", target)
        found: Sums | None = self._remembered("target", target)
        return self.reduce(target=target, rank=True) if found is None else found

    def sample(self, generator: torch.Generator | None = None) -> Tensor:  # (..., n_query) int64
        """One key per query, drawn from p by the Gumbel-max rule while streaming; -1 on an empty support."""
        if generator is not None:
            check_kind("generator", generator, torch.Generator, "Make one: torch.Generator().manual_seed(0).")
        request = self.request()
        return request.ungroup(sample(request, generator))

    def top(self, k: int) -> tuple[Tensor, Tensor]:  # (..., n_query, k) each
        """The k best scores and their keys, best first; past the visible keys -inf and -1. Scores have a gradient."""
        check_whole("k", k, least=0)
        request = self.request()
        score, index = top(request, k)
        if torch.is_grad_enabled() and [1 for t in request.tensors() if t is not None and t.requires_grad]:
            score = chosen_scores(request, index)
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
        p = (s - levels(s)[..., None]).exp()
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


def sharper(gibbs: Gibbs, factor: float) -> Gibbs:
    """The distribution of all scores times a factor: p^factor, normalised again.

    >>> sharper(Gibbs(torch.ones(1, 1), torch.tensor([[3.0], [1.0]]).log()), 2.0).probs()  # 9 to 1
    tensor([[0.9000, 0.1000]])
    """
    p = gibbs
    bias = None if p.bias is None else factor * p.bias
    softcap = None if p.softcap is None else factor * p.softcap
    return Gibbs(
        p.query, p.key, scale=factor * p.scale, bias=bias, support=p.support, softcap=softcap, grouped=p.grouped,
        cap_bias=p.cap_bias, score=p.score,
    )  # fmt: skip


def _rank(sums: Sums) -> Tensor:
    assert sums.rank is not None
    return sums.rank


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


def _check_sharpens(query: Tensor, bias: Tensor | None, scale: object) -> None:
    """A scale multiplies <query, key> and not the bias: where all scores came as a bias it would do nothing."""
    nothing = isinstance(query, Tensor) and query.dim() > 0 and query.shape[-1] == 0
    if nothing and bias is not None and isinstance(scale, Policy):
        raise ValueRangeError(
            f"{scale!r} would do nothing: a scale multiplies the scores of query and key, which have no features here, "
            f"and not the bias. Multiply the scores by policy(visible, dim)[..., None] before they are given as bias, "
            f"or give what makes them as score=."
        )
