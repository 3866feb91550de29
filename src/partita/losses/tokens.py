"""Token statistics: log-probabilities, entropy and more of a language model's tokens, from hidden states.

    logit_iv = softcap(<hidden_i, weight_v> + bias_v) / temperature_i        log p_i(v) = logit_iv - log Z_i

What a trainer reads after pre-training (GRPO, PPO, DPO, distillation, scoring), without logits. One pass fills log p of
one id, entropy, varentropy, the largest and the mean logit and the rank; `log_sum_sq` takes a second pass, at twice the
score, `top_k` another, and ranks of K ids per row K more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from partita import _checks
from partita._torch_function import overridable
from partita.collective import Collective, collective_of
from partita.engine import State
from partita.engine.listed import Limits, Spread, likely_pairs, pair_scores, state_of_pairs
from partita.engine.request import Request
from partita.errors import DtypeError, ShapeError, TargetError, ValueRangeError
from partita.gibbs import Gibbs, sharper
from partita.precision import check_same_dtype, product

__all__ = [
    "TokenStats", "check_head", "check_listed", "collision", "distribution", "parts_of", "row_temperature",
    "scores_of", "token_stats",
]  # fmt: skip

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
        rows = _Rows.of(hidden, weight, ids, bias, temperature, softcap, ignore_index, shift, kept, processes)
        limits = _limits(top_k, top_p, min_p)
        chosen = limits is not None or kept is not None
        if "kept_mass" in wanted and not chosen:
            raise ValueRangeError("kept_mass is of a kept set: give kept=, top_k=, top_p= or min_p=.")
    processes = rows.agree(processes, f"token_stats {(*wanted, best)}, {limits}, shift={shift}")
    found: dict[str, Tensor] = {}
    if chosen:
        _read_kept(found, rows, wanted, best, limits, processes)
    else:
        _read(found, rows, wanted, best, processes)
    return TokenStats(
        {name: found[name] for name in (*wanted, *(TOP if best else ()), *(["outside"] if chosen else []))}
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows that count, flat, and where they came from."""

    gibbs: Gibbs  # of this rank's slice of the vocabulary
    ids: Tensor  # (n, K) int64; 0 where ignored
    counts: Tensor | None  # (n, K) bool: which are not ignored; None: all
    kept: Tensor | None  # (n, k)
    where: Tensor | None  # (n,) flat positions of these rows; None: all are here
    lead: tuple[int, ...]  # of the result
    single: bool  # one id per row, without a dimension of its own

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        bias: Tensor | None,
        temperature: float | Tensor,
        softcap: float | None,
        ignore_index: int,
        shift: int,
        kept: Tensor | None,
        processes: Collective,
    ) -> _Rows:
        _check(hidden, weight, ids, bias, softcap, ignore_index, shift, kept)
        single = ids.dim() == hidden.dim() - 1
        ids = ids[..., None] if single else ids
        lead = tuple(hidden.shape[:-1])
        warmth = row_temperature(temperature, lead)
        if shift:
            left = max(lead[-1] - shift, 0)
            hidden, ids = hidden[..., :left, :], ids[..., shift:, :]
            kept = None if kept is None else kept[..., shift:, :]
            warmth = warmth[..., :left] if isinstance(warmth, Tensor) else warmth
            lead = (*lead[:-1], left)
        n = math.prod(lead)
        flat, ids = hidden.reshape(n, hidden.shape[-1]), ids.reshape(n, ids.shape[-1]).long()
        kept = None if kept is None else kept.reshape(n, kept.shape[-1]).long()
        warmth = warmth.reshape(n) if isinstance(warmth, Tensor) else warmth
        valid, where = ids != ignore_index, None
        counts: Tensor | None = valid
        if _checks.has_values(ids):
            if processes.alone:
                _checks.check_classes(ids[valid], weight.shape[0], ignore_index)
                if kept is not None:
                    check_listed("kept", kept, weight.shape[0])
            some = valid.any(-1)
            if bool(valid.all()):
                counts = None
            elif not bool(some.all()):
                where = some.nonzero()[:, 0]
                flat, ids, counts = flat[where], ids[where], valid[where]
                kept = None if kept is None else kept[where]
                warmth = warmth[where] if isinstance(warmth, Tensor) else warmth
        if counts is not None:
            ids = torch.where(counts, ids, torch.zeros_like(ids))
        return _Rows(distribution(flat, weight, bias, warmth, softcap), ids, counts, kept, where, lead, single)

    def agree(self, processes: Collective, call: str) -> Collective:
        """The same processes with the sizes of their slices; raises on every rank if their rows differ."""
        if processes.alone:
            return processes
        given: dict[str, Any] = {
            "the dtype of hidden": self.gibbs.query.dtype,
            "the rows of hidden": tuple(self.ids.shape),
            "the ids (their sum)": int(self.ids.sum()),
            "the kept ids (their sum)": None if self.kept is None else int(self.kept.sum()),
        }
        processes = processes.check_same(call, [self.gibbs.key.shape[0]], given)
        total = sum(processes.sizes[0])
        if self.ids.numel() and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < total:
            raise TargetError(f"ids must name tokens of the whole vocabulary, 0 <= id < {total}.")
        if self.kept is not None:
            check_listed("kept", self.kept, total)
        return processes

    def place(self, found: Tensor, *, ids: bool = False) -> Tensor:
        """Results of these rows in the caller's shape, 0 where ignored."""
        if ids and self.counts is not None:
            found = torch.where(self.counts, found, torch.zeros_like(found))
        elif self.counts is not None and self.where is None:  # rows that could not be left out
            some = self.counts.any(-1)
            found = torch.where(some if found.dim() == 1 else some[:, None], found, torch.zeros_like(found))
        if self.where is not None:
            found = found.new_zeros((math.prod(self.lead), *found.shape[1:])).index_put((self.where,), found)
        tail = found.shape[1:]
        return found.reshape(self.lead if ids and self.single else (*self.lead, *tail))


def _read(found: dict[str, Tensor], rows: _Rows, wanted: tuple[str, ...], best: int, processes: Collective) -> None:
    """Everything of the whole vocabulary."""
    p, ids = rows.gibbs, rows.ids
    parts = parts_of(p, processes)
    ranked = bool({"rank", "is_top"} & set(wanted))
    moments = bool({"entropy", "varentropy", "mean_logit"} & set(wanted)) or (ranked and not processes.alone)

    makes = [part.asking for part in parts]
    log_prob: Tensor | None = None
    rank: Tensor | None = None
    if ids.shape[1] == 1:  # its score and rank come with the pass
        target, here = local_ids(processes, ids[:, 0])
        sums = processes.slices(makes, target, here, rank=ranked, statistics=moments, variance="varentropy" in wanted)
        state, log_prob = sums.state, -sums.nll()[:, None]
        rank = None if sums.rank is None else sums.rank[:, None]
    else:
        state = processes.state(parts, moments)
        if "log_prob" in wanted:
            log_prob = scores_of(parts, processes, ids) - state.log_partition()[:, None]
        if ranked and ids.shape[1]:
            rank = torch.stack([_rank(makes, processes, column) for column in ids.mT], 1)
        elif ranked:
            rank = ids
    _of_ids(found, rows, log_prob, rank)
    _of_rows(found, rows, state, wanted)
    if "log_sum_sq" in wanted:
        twice = processes.state([sharper(part, 2.0) for part in parts], False)
        found["log_sum_sq"] = rows.place(collision(state, twice))
    if best and processes.alone:
        _of_best(found, rows, *p.top(best), state)
    elif best:
        with torch.no_grad():
            score, index = p.top(best)
        _of_best(found, rows, *_best_of_all(score, index + _first(processes), parts, processes), state)


def _read_kept(
    found: dict[str, Tensor],
    rows: _Rows,
    wanted: tuple[str, ...],
    best: int,
    limits: Limits | None,
    processes: Collective,
) -> None:
    """Everything of the kept tokens alone, as a list of pairs of a row and a token."""
    request, n = rows.gibbs.request(), len(rows.ids)
    row, col = _listed(rows, request, limits, processes)
    near, here = local_ids(processes, col)
    if here is not None:
        row, near = row[here], near[here]
    score = pair_scores(request, row, near)
    state = processes.merged(state_of_pairs(score, row, n))
    key = row * (1 << 40) + (col if here is None else col[here])
    key = key.sort().values
    at = torch.arange(n, device=row.device)[:, None] * (1 << 40) + rows.ids
    inside = _contains(key, at) if processes.alone else processes.added(_contains(key, at).long()) > 0
    if {"log_prob", "rank", "is_top"} & set(wanted):
        own = scores_of([rows.gibbs], processes, rows.ids)
        log_prob = torch.where(inside, own - state.log_partition()[:, None], -torch.inf)
        higher = score.detach()[:, None] > own.detach()[row]
        rank = torch.zeros_like(rows.ids).index_add(0, row, higher.long())
        _of_ids(found, rows, log_prob, processes.added(rank) if not processes.alone else rank)
    _of_rows(found, rows, state, wanted)
    if "log_sum_sq" in wanted:
        found["log_sum_sq"] = rows.place(collision(state, processes.merged(state_of_pairs(2 * score, row, n))))
    if "kept_mass" in wanted:
        whole = processes.state(parts_of(rows.gibbs, processes), False)
        found["kept_mass"] = rows.place((state.log_partition() - whole.log_partition()).exp())
    if best:
        top, index = _best_of(score, row, col if here is None else col[here], n, best)
        if not processes.alone:
            top, index = _best_of_all(top, index, [rows.gibbs], processes)
        _of_best(found, rows, top, index, state)
    missing = ~inside if rows.counts is None else ~inside & rows.counts
    found["outside"] = missing.sum()


def _listed(rows: _Rows, request: Request, limits: Limits | None, processes: Collective) -> tuple[Tensor, Tensor]:
    """The kept pairs, each once, that are here at least; given ids restrict those that are found."""
    likely = None if limits is None else _likely(request, limits, processes)
    if rows.kept is None:
        assert likely is not None
        return likely
    row = torch.arange(len(rows.kept), device=rows.kept.device)[:, None].expand_as(rows.kept)
    valid = rows.kept >= 0
    key = (row[valid] * (1 << 40) + rows.kept[valid]).unique()
    if likely is not None:
        own = likely[0] * (1 << 40) + likely[1]
        key = own[_contains(key, own)]
    return key >> 40, key & ((1 << 40) - 1)


def _likely(request: Request, limits: Limits, processes: Collective) -> tuple[Tensor, Tensor]:
    """The pairs that limits keep and that are here."""
    if processes.alone:
        return likely_pairs(request, limits)
    spread = Spread(max(processes.sizes[0]), processes.rank, lambda x: torch.cat(processes.all_gather(x), -1))
    row, near = likely_pairs(request, limits, spread)
    return row, near + _first(processes)


def _contains(key: Tensor, at: Tensor) -> Tensor:
    """Which numbers are in a sorted list."""
    if not key.numel():
        return torch.zeros_like(at, dtype=torch.bool)
    place = torch.searchsorted(key, at).clamp(max=key.numel() - 1)
    return key[place] == at


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


def _best_of_all(score: Tensor, index: Tensor, parts: Sequence[Gibbs], processes: Collective) -> tuple[Tensor, Tensor]:
    """The same of all ranks, from the best of each; with a gradient."""
    best, at = torch.cat(processes.all_gather(score.detach()), -1).sort(dim=-1, descending=True, stable=True)
    best, at = (x[:, : score.shape[-1]] for x in (best, at))
    index = torch.cat(processes.all_gather(index), -1).gather(-1, at)
    found = scores_of(parts, processes, torch.where(best.isneginf(), 0, index))
    return found.masked_fill(best.isneginf(), -torch.inf), index.masked_fill(best.isneginf(), -1)


def _of_best(found: dict[str, Tensor], rows: _Rows, score: Tensor, index: Tensor, state: State) -> None:
    level = torch.where(state.empty(), 0.0, state.log_partition())
    found["top_k_log_prob"] = rows.place(score - level[:, None])
    found["top_k_ids"] = rows.place(index)


def _of_ids(found: dict[str, Tensor], rows: _Rows, log_prob: Tensor | None, rank: Tensor | None) -> None:
    if log_prob is not None:
        found["log_prob"] = rows.place(log_prob, ids=True)
    if rank is not None:
        found["rank"] = rows.place(rank, ids=True)
        top = rank == 0
        found["is_top"] = rows.place(top if log_prob is None else top & ~log_prob.isneginf(), ids=True)


def _of_rows(found: dict[str, Tensor], rows: _Rows, state: State, wanted: tuple[str, ...]) -> None:
    reads = {
        "entropy": state.entropy, "varentropy": state.score_variance, "max_logit": state.max_score,
        "mean_logit": state.mean_score, "logsumexp": state.log_partition,
    }  # fmt: skip
    for name in wanted:
        if name in reads:
            found[name] = rows.place(reads[name]())


def _first(processes: Collective) -> int:
    """The id of the first token of this rank's slice."""
    return 0 if processes.alone else sum(processes.sizes[0][: processes.rank])


def local_ids(processes: Collective, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ids in this rank's slice, 0 where they are elsewhere, and which are here; None: all."""
    if processes.alone:
        return ids, None
    ids = ids - _first(processes)
    here = (ids >= 0) & (ids < processes.sizes[0][processes.rank])
    return torch.where(here, ids, torch.zeros_like(ids)), here


def parts_of(p: Gibbs, processes: Collective) -> list[Gibbs]:
    """The distribution, or over a group in exact rows the leaves that it is cut into."""
    found = processes.leaves((p.query, p.scale), p.key, p.bias)
    if len(found) == 1:
        return [p]
    options: dict[str, Any] = {"softcap": p.softcap, "cap_bias": p.cap_bias, "score": p.score}
    return [Gibbs(query, key, scale=scale, bias=bias, **options) for (query, scale), key, bias in found]


def scores_of(parts: Sequence[Gibbs], processes: Collective, ids: Tensor) -> Tensor:  # (n, K)
    """The logits of these ids."""
    near, here = local_ids(processes, ids)
    row = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    if here is None:
        return pair_scores(parts[0].request(), row.reshape(-1), near.reshape(-1)).reshape(ids.shape)
    total, first = torch.zeros(ids.shape, dtype=parts[0].request().dtype, device=ids.device), 0
    for part in parts:
        n = part.key.shape[0]
        mine = here & (near >= first) & (near < first + n)
        total = total.index_put((mine,), pair_scores(part.request(), row[mine], near[mine] - first))
        first += n
    return processes.total(total)


@torch.no_grad()
def _rank(makes: Sequence[Callable[..., Request]], processes: Collective, ids: Tensor) -> Tensor:
    target, here = local_ids(processes, ids.contiguous())
    rank = processes.slices(makes, target, here, rank=True, statistics=not processes.alone).rank
    assert rank is not None
    return rank


def collision(state: State, twice: State) -> Tensor:
    """log sum p^2 = log Z(2 s) - 2 log Z(s), relative to the peaks."""
    gap = torch.where(state.empty(), torch.zeros_like(state.peak), twice.peak - 2 * state.peak)
    return twice.log_mass() + gap - 2 * state.log_mass()


# ---- what was given --------------------------------------------------------------------------------------------------


def distribution(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float | Tensor, softcap: float | None
) -> Gibbs:
    """softcap(<h, w> + b) / T: a number goes into scale, bias and softcap; one per row stands outside of the cap."""
    if not isinstance(temperature, Tensor):
        bias = None if bias is None else (bias if temperature == 1.0 else bias / temperature)[None]
        softcap = None if softcap is None else softcap / temperature
        return Gibbs(hidden, weight, scale=1.0 / temperature, bias=bias, softcap=softcap, cap_bias=softcap is not None)
    if bias is not None:  # one more feature
        hidden = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
        weight = torch.cat([weight, bias[:, None].to(weight.dtype)], 1)
    return Gibbs(hidden, weight, scale=temperature.reciprocal(), score=None if softcap is None else _Capped(softcap))


@dataclass(frozen=True)
class _Capped:
    """softcap(<q, k>) as a score, for a scale that stands outside of the cap."""

    softcap: float
    per_pair = 1

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.softcap * torch.tanh(product(query, key.mT) / self.softcap)


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


def row_temperature(temperature: float | Tensor, lead: tuple[int, ...]) -> float | Tensor:  # a number, or one per row
    """Checked; a tensor of one number without a gradient is that number, where values can be read."""
    if not isinstance(temperature, Tensor):
        _checks.check_positive("temperature", temperature)
        return float(temperature)
    _checks.check_float("temperature", temperature)
    if _checks.has_values(temperature) and not bool(((temperature > 0) & temperature.isfinite()).all()):
        raise ValueRangeError("temperature must be positive and finite in every row; greedy decoding is want='is_top'.")
    if not _checks.expands(temperature.shape, lead):
        raise ShapeError(
            f"temperature must be a number or broadcast to the rows {lead}; got {_checks.shape_text(temperature)}."
        )
    return temperature.to(torch.promote_types(temperature.dtype, torch.float32)).expand(lead)


def check_head(name: str, hidden: Tensor, weight: Tensor) -> torch.Size:
    """The rows of hidden states that fit a head."""
    head = "weight" if name == "hidden" else "ref_weight"
    _checks.check_float(name, hidden)
    _checks.check_float(head, weight)
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[-1]:
        raise ShapeError(
            f"{name} must be (..., dim) and {head} (vocabulary, dim); got {_checks.shape_text(hidden)} and "
            f"{_checks.shape_text(weight)}. nn.Linear keeps its weight that way round."
        )
    check_same_dtype((name, head), hidden, weight)
    _checks.check_device((name, head), (hidden, weight))
    return hidden.shape[:-1]


def _check(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    ignore_index: int,
    shift: int,
    kept: Tensor | None,
) -> None:
    lead = tuple(check_head("hidden", hidden, weight))
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
    if bias is not None:
        _checks.check_float("bias", bias)
        if tuple(bias.shape) != (weight.shape[0],):
            raise ShapeError(
                f"bias must have one number per token, shape {(weight.shape[0],)}; got {_checks.shape_text(bias)}."
            )
    if kept is not None:
        _checks.check_index_dtype("kept", kept)
        if tuple(kept.shape[:-1]) != lead:
            raise ShapeError(f"kept must list tokens per row, {(*lead, 'k')}; got {_checks.shape_text(kept)}.")
    _checks.check_device(("hidden", "ids", "bias", "kept"), (hidden, ids, bias, kept))


def check_listed(name: str, index: Tensor, vocabulary: int, least: int = -1) -> None:
    if not _checks.has_values(index) or not index.numel():
        return
    low, high = torch.stack(torch.aminmax(index)).tolist()
    if low < least or high >= vocabulary:
        none = ", or -1 for none" if least < 0 else ""
        raise TargetError(f"{name} must name tokens, 0 <= id < {vocabulary}{none}; got values from {low} to {high}.")
