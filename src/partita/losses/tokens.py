"""Token statistics: log-probabilities, entropy and more of a language model's tokens, from hidden states.

    logit_iv = softcap(<hidden_i, weight_v> + bias_v) / temperature_i        log p_i(v) = logit_iv - log Z_i

What a trainer reads after pre-training (GRPO, PPO, DPO, distillation, scoring), without logits. One pass fills log p of
one id, entropy, varentropy, the largest and the mean logit and the rank; `log_sum_sq` takes a second pass, at twice the
score, `top_k` another, and ranks of K ids per row K more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from partita import _checks
from partita._torch_function import overridable
from partita.collective import Collective, collective_of
from partita.engine import State
from partita.engine.listed import Limits, pair_scores, state_of_pairs
from partita.errors import DtypeError, ShapeError, TargetError, ValueRangeError
from partita.gibbs import Gibbs
from partita.losses.vocabulary import Vocabulary, check_head, check_listed, collision, distribution, row_temperature
from partita.rows import Rows

__all__ = ["TokenStats", "token_stats"]

_MANY = 1 << 40  # more than there are tokens
OF_IDS = ("log_prob", "rank", "is_top")
OF_ROWS = ("entropy", "varentropy", "log_sum_sq", "max_logit", "mean_logit", "logsumexp", "kept_mass")
TOP = ("top_k_log_prob", "top_k_ids")


class TokenStats:
    """What was wanted of every token: an attribute per name, and `outside`, how many ids were not in their kept set.

    log_prob, rank, is_top: the shape of ids.          top_k_log_prob, top_k_ids: (..., k).
    entropy, varentropy (variance of log p), log_sum_sq (log sum_v p_v^2), max_logit, mean_logit (E[logit]), logsumexp,
    kept_mass (mass of the kept set in the whole vocabulary): one number per row.
    """

    def __init__(self, found: dict[str, Tensor]):
        self.__dict__.update(found)

    def __getattr__(self, name: str) -> NoReturn:
        known = (*OF_IDS, *OF_ROWS, "top_k")
        hint = f" Ask for it: want=(..., {name!r})." if name in known or name in TOP else ""
        raise AttributeError(f"these token statistics hold {', '.join(self.__dict__)}, no {name!r}.{hint}")

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.__dict__.values())

    def __repr__(self) -> str:
        return f"TokenStats({', '.join(f'{name} {tuple(x.shape)}' for name, x in self.__dict__.items())})"


@overridable
def token_stats(
    hidden: Tensor,  # (..., dim)
    weight: Tensor,  # (vocabulary, dim)
    ids: Tensor,  # (...) or (..., K)
    *,
    bias: Tensor | None = None,  # (vocabulary,)
    temperature: float | Tensor = 1.0,  # a number, or one per row
    softcap: float | None = None,
    ignore_index: int = -100,
    kept: Tensor | None = None,  # (..., k) int64, -1 fills up
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    want: str | Iterable[str] = ("log_prob", "entropy"),
    shift: int = 0,
    group: object | None = None,
) -> TokenStats:
    """Log-probabilities, entropy and more of tokens, from hidden states, in memory that does not grow with the logits.

        logit_iv = softcap(<hidden_i, weight_v> + bias_v) / temperature_i        log p_i(v) = logit_iv - log Z_i

    Equal to ``F.log_softmax(hidden @ weight.T / temperature, -1).gather(-1, ids)`` and what can be computed from it. An
    ignored id gives 0, and a row whose ids are all ignored gives 0 in every field; neither has a gradient.

    >>> token_stats(torch.zeros(1, 4), torch.zeros(10, 4), torch.tensor([3])).log_prob  # -log 10
    tensor([-2.3026])

    want: any of log_prob, rank (how many tokens are likelier), is_top; entropy, varentropy, log_sum_sq, max_logit,
        mean_logit, logsumexp, kept_mass; "top_k:5" for the five likeliest ids and their log p. All but ranks, ids and
        max_logit have gradients.
    kept, top_k, top_p, min_p: the tokens a sampler kept. Everything is then that of the distribution renormalised over
        them; an id outside has log p of -inf. `kept` lists them per row; the others find them, with the temperature, in
        the order top_k, top_p, min_p, by one more product without a gradient.
    shift: 1 for next-token prediction, with ids (..., T) the tokens themselves: position t reads id t + 1, and `kept`
        belongs to the ids. Results are (..., T - shift).
    group: a torch.distributed group over which the vocabulary is spread: each rank passes its slice of weight and bias,
        in rank order, and ids of the whole. The gradient of hidden comes in parts that add up over ranks; under DDP
        pass `partita.distributed.replicate(hidden, group)`.
    """
    wanted, best = _wanted(want)
    processes = collective_of(group)
    with processes.validate():
        lead = check_head(hidden, weight, bias)
        _check(lead, ids, softcap, ignore_index, shift, kept)
        _checks.check_device(("hidden", "ids", "kept"), (hidden, ids, kept))
        warmth = row_temperature(temperature, lead)
        limits = _limits(top_k, top_p, min_p)
        chosen = limits is not None or kept is not None
        if "kept_mass" in wanted and not chosen:
            raise ValueRangeError("kept_mass is of a kept set: give kept=, top_k=, top_p= or min_p=.")
        single = ids.dim() == len(lead)
        ids = (ids[..., None] if single else ids).long()
        if shift:
            left = max(lead[-1] - shift, 0)
            hidden, ids = hidden[..., :left, :], ids[..., shift:, :]
            kept = None if kept is None else kept[..., shift:, :]
            warmth = warmth[..., :left] if isinstance(warmth, Tensor) else warmth
        counts = ids != ignore_index
        if processes.alone and _checks.has_values(ids):
            _checks.check_classes(ids[counts], len(weight), ignore_index)
        if processes.alone and kept is not None:
            check_listed("kept", kept, len(weight))
        rows = Rows.of(counts.any(-1) if ids.shape[-1] else counts.new_ones(ids.shape[:-1]))
        warmth = rows.take(warmth) if isinstance(warmth, Tensor) else warmth
        p, counts = distribution(rows.take(hidden), weight, bias, warmth, softcap), rows.take(counts)
        ids, kept = rows.take(ids).where(counts, 0), None if kept is None else rows.take(kept).long()
    if not processes.alone:
        call = f"token_stats {(*wanted, best)}, {limits}, shift={shift}"
        processes = _agreed(processes, call, p, ids, kept)
    read = _Reading(Vocabulary(p, processes), rows, ids, counts, single, wanted, best)
    if chosen:
        read.kept(_listed(read.tokens, kept, limits))
    else:
        read.whole()
    return TokenStats(
        {name: read.found[name] for name in (*wanted, *(TOP if best else ()), *(["outside"] if chosen else []))}
    )


def _agreed(processes: Collective, call: str, p: Gibbs, ids: Tensor, kept: Tensor | None) -> Collective:
    """The same processes with the sizes of their slices; raises on every rank if their rows differ."""
    given: dict[str, Any] = {
        "the dtype of hidden": p.query.dtype,
        "the rows of hidden": tuple(ids.shape),
        "the ids (their sum)": int(ids.sum()),
        "the kept ids (their sum)": None if kept is None else int(kept.sum()),
    }
    processes = processes.check_same(call, [len(p.key)], given)
    total = sum(processes.sizes[0])
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < total:
        raise TargetError(f"ids must name tokens of the whole vocabulary, 0 <= id < {total}.")
    if kept is not None:
        check_listed("kept", kept, total)
    return processes


@dataclass(frozen=True, eq=False)
class _Reading:
    """What is read of some rows, and what was found."""

    tokens: Vocabulary
    rows: Rows
    ids: Tensor  # (n, K) int64; 0 where ignored
    counts: Tensor  # (n, K) bool: which are not ignored
    single: bool  # one id per row, without a dimension of its own
    wanted: tuple[str, ...]
    best: int
    found: dict[str, Tensor] = field(default_factory=dict)

    def wants(self, *names: str) -> bool:
        return not set(names).isdisjoint(self.wanted)

    def whole(self) -> None:
        """Everything of the whole vocabulary."""
        tokens, processes, ids = self.tokens, self.tokens.processes, self.ids
        ranked, varies = self.wants("rank", "is_top"), self.wants("varentropy")
        moments = varies or self.wants("entropy", "mean_logit") or (ranked and not processes.alone)
        log_prob = rank = None
        if ids.shape[1] == 1:  # its score and rank come with the pass
            target, here = tokens.local(ids[:, 0])
            sums = tokens.sums(target, here, rank=ranked, statistics=moments, variance=varies)
            state, log_prob = sums.state, -sums.nll()[:, None]
            rank = None if sums.rank is None else sums.rank[:, None]
        else:
            state = tokens.state(statistics=moments)
            if self.wants("log_prob"):
                log_prob = tokens.scores(ids) - state.log_partition()[:, None]
            if ranked:
                rank = torch.stack([tokens.rank(column) for column in ids.mT], 1) if ids.shape[1] else ids
        self._of_ids(log_prob, rank)
        self._of_rows(state, tokens.twice)
        if self.best:
            score, near = tokens.gibbs.top(self.best)
            self._of_best(score, near + tokens.first, state)

    def kept(self, pairs: tuple[Tensor, Tensor]) -> None:
        """Everything of the kept tokens alone, given as pairs of a row and a token."""
        tokens, processes, ids = self.tokens, self.tokens.processes, self.ids
        row, col = pairs
        near, here = tokens.local(col)
        if here is not None:
            row, col, near = row[here], col[here], near[here]
        score = pair_scores(tokens.gibbs.request(), row, near)
        state = processes.merged(state_of_pairs(score, row, len(ids)))
        every = torch.arange(len(ids), device=row.device)[:, None]
        inside = processes.added(_contains(_numbers(row, col).sort().values, _numbers(every, ids)).long()) > 0
        if self.wants(*OF_IDS):
            own = tokens.scores(ids)
            log_prob = torch.where(inside, own - state.log_partition()[:, None], -torch.inf)
            higher = score.detach()[:, None] > own.detach()[row]
            self._of_ids(log_prob, processes.added(torch.zeros_like(ids).index_add(0, row, higher.long())))
        self._of_rows(state, lambda: processes.merged(state_of_pairs(2 * score, row, len(ids))))
        if self.wants("kept_mass"):
            mass = (state.log_partition() - tokens.state().log_partition()).exp()
            self.found["kept_mass"] = self.rows.place(mass)
        if self.best:
            self._of_best(*_best_of(score, row, col, len(ids), self.best), state)
        self.found["outside"] = (self.counts & ~inside).sum()

    def _of_ids(self, log_prob: Tensor | None, rank: Tensor | None) -> None:
        known = {"log_prob": log_prob, "rank": rank, "is_top": None if rank is None else rank == 0}
        if rank is not None and log_prob is not None:
            known["is_top"] = (rank == 0) & ~log_prob.isneginf()
        for name, found in known.items():
            if found is not None:
                placed = self.rows.place(found.masked_fill(~self.counts, 0), tail=1)
                self.found[name] = placed[..., 0] if self.single else placed

    def _of_rows(self, state: State, twice: Callable[[], State]) -> None:
        reads: dict[str, Callable[[], Tensor]] = {
            "entropy": state.entropy, "varentropy": state.score_variance, "max_logit": state.max_score,
            "mean_logit": state.mean_score, "logsumexp": state.log_partition,
            "log_sum_sq": lambda: collision(state, twice()),
        }  # fmt: skip
        for name in self.wanted:
            if name in reads:
                self.found[name] = self.rows.place(reads[name]())

    def _of_best(self, score: Tensor, ids: Tensor, state: State) -> None:
        score, ids = self.tokens.best_of_all(score, ids)
        level = torch.where(state.empty(), 0.0, state.log_partition())
        self.found["top_k_log_prob"] = self.rows.place(score - level[:, None], tail=1)
        self.found["top_k_ids"] = self.rows.place(ids, tail=1)


def _listed(tokens: Vocabulary, kept: Tensor | None, limits: Limits | None) -> tuple[Tensor, Tensor]:
    """The kept pairs, each once, that are here at least; given ids restrict those that limits find."""
    found = None if limits is None else _numbers(*tokens.likely(limits))
    if kept is not None:
        row = torch.arange(len(kept), device=kept.device)[:, None].expand_as(kept)
        given = _numbers(row, kept)[kept >= 0].unique()
        found = given if found is None else found[_contains(given, found)]
    assert found is not None
    return found // _MANY, found % _MANY


def _numbers(row: Tensor, col: Tensor) -> Tensor:
    """One number for each pair, in the order of rows, then tokens."""
    return row * _MANY + col


def _contains(known: Tensor, at: Tensor) -> Tensor:
    """Which numbers are in a sorted list."""
    if not known.numel():
        return torch.zeros_like(at, dtype=torch.bool)
    place = torch.searchsorted(known, at).clamp(max=known.numel() - 1)
    return known[place] == at


def _best_of(score: Tensor, row: Tensor, col: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:  # (n, k) each
    """The k best pairs of every row, best first; past the last -inf and -1."""
    order = score.detach().argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    many = torch.bincount(row, minlength=n)
    place = torch.arange(k, device=row.device)
    missing = place >= many[:, None]
    take = ((many.cumsum(0) - many)[:, None] + place).clamp(max=max(len(order) - 1, 0))
    if not len(order):
        return score.new_full((n, k), -torch.inf), torch.full((n, k), -1, dtype=row.dtype, device=row.device)
    chosen = order[take]
    return score[chosen].masked_fill(missing, -torch.inf), col[chosen].masked_fill(missing, -1)


# ---- what was given --------------------------------------------------------------------------------------------------


def _wanted(want: str | Iterable[str]) -> tuple[tuple[str, ...], int]:
    """The names that were asked for, and k of "top_k:k"."""
    names = (
        (want,) if isinstance(want, str) else tuple(want) if isinstance(want, (tuple, list, set, frozenset)) else None
    )
    if names is None:
        raise DtypeError(f"want must be a name or a sequence of names; got {want!r}. One is ('log_prob', 'entropy').")
    best = 0
    for name in names:
        head, _, k = str(name).partition(":")
        if head == "top_k" and k.isdecimal() and int(k) > 0:
            best = int(k)
        elif name not in (*OF_IDS, *OF_ROWS):
            raise ValueRangeError(
                f"want must name any of {', '.join((*OF_IDS, *OF_ROWS))}, or top_k:5 for the five likeliest; "
                f"got {name!r}."
            )
    return tuple(name for name in dict.fromkeys(names) if not name.startswith("top_k")), best


def _limits(top_k: int | None, top_p: float | None, min_p: float | None) -> Limits | None:
    if top_k is None and top_p is None and min_p is None:
        return None
    if top_k is not None:
        _checks.check_whole("top_k", top_k, least=1)
    for name, given in (("top_p", top_p), ("min_p", min_p)):
        if given is not None:
            _checks.check_number(name, given, 0, 1)
    if top_p == 0:
        raise ValueRangeError("top_p must be above 0: a set of no tokens has no distribution.")
    return Limits(top_k, top_p, min_p)


def _check(
    lead: tuple[int, ...], ids: Tensor, softcap: float | None, ignore_index: int, shift: int, kept: Tensor | None
) -> None:
    _checks.check_index_dtype("ids", ids)
    if tuple(ids.shape) != lead and tuple(ids.shape[:-1]) != lead:
        raise ShapeError(
            f"ids must be one per row, {lead}, or K per row, {(*lead, 'K')}; got {_checks.shape_text(ids)}."
        )
    if softcap is not None:
        _checks.check_positive("softcap", softcap)
    _checks.check_whole("ignore_index", ignore_index)
    _checks.check_whole("shift", shift, least=0)
    if shift and not lead:
        raise ShapeError("shift needs positions: hidden (..., T, dim) and ids (..., T).")
    if kept is not None:
        _checks.check_index_dtype("kept", kept)
        if tuple(kept.shape[:-1]) != lead:
            raise ShapeError(f"kept must list tokens per row, {(*lead, 'k')}; got {_checks.shape_text(kept)}.")
