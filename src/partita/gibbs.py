"""Gibbs: the distribution over keys, kept as its ingredients, and everything that can be read off it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita._checks import check_rows, check_whole
from partita.engine import State, Stats
from partita.engine import explain as explain_request
from partita.engine.axes import split_heads
from partita.engine.execute import attention as plain_attention
from partita.engine.execute import both_ways, sample, scores, top, weighted_nll
from partita.engine.execute import gaps as count_gaps
from partita.engine.execute import received as column_sums
from partita.engine.request import extend
from partita.engine.selection import chosen_scores
from partita.engine.state import levels
from partita.engine.sums import Sums
from partita.errors import DtypeError, ValueRangeError
from partita.passes import Passes, remember, remembered
from partita.precision import output_dtype

__all__ = ["Gibbs", "explain", "plain_attention"]


class Gibbs(Passes):
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

    def _pass(self) -> Sums:
        found = remembered(self, "rows")
        return self.reduce() if found is None else found

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
            found = remembered(self, name)
            if found is not None:
                if found.places is None:
                    with torch.no_grad():
                        found = self.reduce(statistics=False, extremes=True)
                    remember(self, "extremes", found)
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
        found = remembered(self, "target", target)
        return self.reduce(target=target, rank=True) if found is None else found

    def sample(self, generator: torch.Generator | None = None) -> Tensor:  # (..., n_query) int64
        """One key per query, drawn from p by the Gumbel-max rule while streaming; -1 on an empty support."""
        request = self.request()
        return request.ungroup(sample(request, generator))

    def top(self, k: int) -> tuple[Tensor, Tensor]:  # (..., n_query, k) each
        """The k best scores and their keys, best first; past the visible keys -inf and -1. Scores have a gradient."""
        check_whole("k", k, least=0)
        request = self.request()
        score, index = top(request, k)
        parameters = () if request.pairs is None else request.pairs.parameters
        given = (request.query, request.key, self.bias, self.scale, *parameters)
        if torch.is_grad_enabled() and [1 for t in given if isinstance(t, Tensor) and t.requires_grad]:
            again = chosen_scores(request, index.clamp(min=0))
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
        p = (s - levels(s)[..., None]).exp()
        return (p.flatten(-4, -3) if request.groups > 1 else p).to(self.query.dtype)


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
