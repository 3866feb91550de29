"""InfoNCE: the positive among its candidates."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from partita import _checks
from partita import support as supports
from partita._overrides import overridable
from partita.contrastive.candidates import (
    Bank,
    agree,
    check_pairs,
    of_other_labels,
    positive_score,
    prepare,
    resolve_scale,
)
from partita.contrastive.diagonal import diagonal_loss
from partita.contrastive.exclude import Exclusion, InUse
from partita.contrastive.queue import Queue
from partita.contrastive.readout import above, readout, similarity_moments
from partita.engine import State, Stats
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.precision import loss_dtype
from partita.processes import Processes, processes_of
from partita.rows import in_row_blocks

__all__ = ["info_nce_loss"]


@overridable
def info_nce_loss(
    query: Tensor,  # (n, dim)
    positive_key: Tensor,  # (n, dim)
    negative_keys: Tensor | None = None,  # (m, dim) unpaired, (n, m, dim) paired
    *,
    temperature: float | Tensor = 0.07,
    reduction: str = "mean",
    negative_mode: str = "unpaired",
    normalize: bool = True,
    symmetric: bool = False,
    return_stats: bool = False,
    group: object | None = None,
    log_temperature: Tensor | None = None,
    labels: Tensor | None = None,
    exclude: Exclusion | None = None,
    hardness: float = 0.0,
    decoupled: bool = False,
    queue: Queue | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """Cross entropy of the positive among its candidates, without the matrix of similarities.

        loss_i = -log( exp(<q_i, k_i> / t) / sum_j exp(<q_i, k_j> / t) )

    Candidates are the positives of the whole batch; with `negative_keys`, one's own positive and those. `normalize`
    makes all vectors unit vectors first. `symmetric` averages with the direction from keys to queries. Between 0 and,
    for equal scores, log(candidates). Spec: M-INC-1, M-INC-3, M-INC-4, M-INC-6.

    >>> x = torch.eye(3)
    >>> info_nce_loss(x, x, temperature=1.0)  # -log( e / (e + 2) )
    tensor(0.5514)

    temperature: a number or a tensor, also one per row; `log_temperature` is its logarithm, for learning.
    labels: (n,) candidates with the anchor's label, but for its own positive, are no negatives.
    exclude: a rule on scores that leaves negatives out, `AbovePositive(margin)` or `Guide(...)`.
    hardness: weights every negative by exp(hardness * similarity), a weight without gradient.
    decoupled: leaves the positive out of the denominator.
    queue: more negatives, from earlier batches.
    return_stats: also a `ContrastStats`, of the direction from queries to keys.
    group: a torch.distributed group (or DeviceMesh) whose ranks hold rows each: the keys of all are candidates, passed
        round in blocks. Every rank gets the global value, with `reduction="none"` and in the statistics its own rows.
    """
    processes = processes_of(group)
    with processes.checks():
        _checks.check_reduction(reduction)
        check_pairs(query, positive_key)
        _check_options(negative_keys, negative_mode, symmetric, exclude, hardness, queue, labels, query)
        if not processes.alone and exclude is not None:
            raise ValueRangeError("exclude looks at all scores of a row, and has no form over a group.")
        scale = resolve_scale(temperature, log_temperature, len(query), query.dtype)
        _check_one_scale(scale, symmetric, hardness)
        q, k = prepare("query", query, normalize), prepare("positive_key", positive_key, normalize)
        negatives = None if negative_keys is None else prepare("negative_keys", negative_keys, normalize)
        kept = None if queue is None else queue.slots()
        for other in (k, negatives, None if kept is None else kept[0].to(k.dtype)):
            if other is not None:
                processes.probe(q, other if other.dim() == 2 else other[..., :0, :], scale)
    rules = (reduction, negative_mode, normalize, symmetric, return_stats, labels is None, hardness, decoupled)
    given = {"query": query, "positive_key": positive_key, "negative_keys": negative_keys}
    kinds = [len(query), 0 if negatives is None else len(negatives), 0 if kept is None else len(kept[0])]
    processes = agree(processes, "info_nce_loss", given, scale, (*rules, queue is None), kinds)
    dtype = loss_dtype(query)
    plain = negative_keys is None and labels is None and exclude is None and queue is None
    if plain and not hardness and not decoupled:
        return diagonal_loss(
            q,
            k,
            scale,
            symmetric=symmetric,
            reduction=reduction,
            return_stats=return_stats,
            dtype=dtype,
            processes=processes,
        )

    banks = _banks(k, negatives, labels, hardness, kept, processes)
    rows, stats = _rows(q, k, scale, banks, exclude, decoupled, return_stats, negative_keys is None)
    if symmetric:
        backward = _banks(q, None, labels, hardness, None, processes)
        back, _ = _rows(k, q, scale, backward, None, decoupled, False, True)
        rows = (rows + back) / 2
    loss = processes.reduce(rows, reduction).to(dtype)
    return loss if stats is None else (loss, stats)


def _banks(
    k: Tensor,
    negatives: Tensor | None,
    labels: Tensor | None,
    hardness: float,
    kept: tuple[Tensor, Tensor | None, Tensor | None] | None,  # the slots of a queue
    processes: Processes,
) -> list[Bank]:
    """Where the negatives come from; across ranks, unpaired ones and queues are everybody's."""
    banks = []
    if negatives is not None:
        banks.append(Bank(negatives, None, hardness, processes=processes, kind=1))
    elif labels is None:
        banks.append(Bank(k, supports.not_self(), hardness, processes=processes))
    else:
        banks.append(of_other_labels(k, labels, labels, hardness, processes, 0))
    if kept is not None and any(processes.sizes[2]):
        stored, kept_labels, used = kept
        keys = stored.to(k.dtype)
        if labels is not None and kept_labels is not None:
            banks.append(of_other_labels(keys, labels, kept_labels, hardness, processes, 2, used))
        else:
            shown = None if used is None else InUse(used)
            banks.append(Bank(keys, shown, hardness, processes=processes, kind=2, used=used))
    return banks


def _rows(
    q: Tensor,
    k: Tensor,
    scale: float | Tensor,
    banks: list[Bank],
    exclude: Exclusion | None,
    decoupled: bool,
    return_stats: bool,
    in_batch: bool,
) -> tuple[Tensor, Stats | None]:
    """The loss of every row against the union of banks, and its statistics."""
    positive = positive_score(q, k, 1.0)
    score = scale * positive
    if exclude is None:
        negatives = functools.reduce(State.merge, [bank.state(q, scale, return_stats) for bank in banks])
        rank = torch.zeros_like(positive).long()
        for bank in banks if return_stats else ():
            rank = rank + above(bank, q, positive.detach())
    else:
        negatives, rank = _excluding(exclude, q, banks[0].key, positive, scale, in_batch)
    rest = negatives.log_partition()
    nothing = negatives.empty()
    if decoupled:
        rows = torch.where(nothing, torch.zeros_like(score), torch.where(nothing, score, rest) - score)
    else:
        rows = -logsigmoid(score - rest)
    if not return_stats:
        return rows, None
    whole = negatives.merge(State.of(score[:, None]))
    moments = similarity_moments(banks, q, positive, [positive] if in_batch else [])
    surprised = rows if not decoupled else -logsigmoid(score - rest)
    return rows, readout(whole, negatives, rank, surprised, positive, moments, scale, (q, k))


def _excluding(
    exclude: Exclusion, q: Tensor, key: Tensor, positive: Tensor, scale: float | Tensor, in_batch: bool
) -> tuple[State, Tensor]:
    """The state of the negatives a rule leaves, a few rows at a time."""
    exclude.check(len(q), len(key))
    numbers = torch.arange(len(q), device=q.device)
    column = torch.arange(len(key), device=q.device)

    def few(rows: Tensor, own: Tensor, at: Tensor, keys: Tensor, factor: Tensor) -> Tensor:
        with torch.no_grad():
            keep = ~exclude.hidden(at, rows, keys, own)
            if in_batch:
                keep &= column != at[:, None]
            rank = ((rows @ keys.mT > own[:, None]) & keep).sum(-1)
        part = factor[at] if factor.dim() else factor
        state = Gibbs(rows, keys, scale=part, support=supports.mask(keep)).state()
        return torch.stack([state.peak, state.mass, state.first, state.spread, state.count, rank.to(own.dtype)], -1)

    factor = scale if isinstance(scale, Tensor) else torch.tensor(scale, dtype=positive.dtype, device=q.device)
    factor = factor.reshape(()) if factor.numel() == 1 else factor
    columns = in_row_blocks(few, [q, positive.detach(), numbers], [key, factor], len(key)).unbind(-1)
    peak, mass, first, spread, count, rank = columns
    return State(peak.detach(), mass, first, spread, count.detach()), rank.detach().long()


def _check_one_scale(scale: float | Tensor, symmetric: bool, hardness: float) -> None:
    if isinstance(scale, Tensor) and scale.numel() > 1:
        if symmetric:
            raise ValueRangeError("symmetric takes one temperature for all rows: a column has no row of its own.")
        if hardness:
            raise ValueRangeError("hardness takes one temperature for all rows.")


def _check_options(
    negative_keys: Tensor | None,
    mode: str,
    symmetric: bool,
    exclude: Exclusion | None,
    hardness: float,
    queue: Queue | None,
    labels: Tensor | None,
    query: Tensor,
) -> None:
    if mode not in ("unpaired", "paired"):
        raise ValueRangeError(f"negative_mode must be 'unpaired' or 'paired'; got {mode!r}.")
    _checks.check_positive("hardness", hardness, zero=True)
    n, dim = query.shape
    if negative_keys is not None:
        wanted = 2 if mode == "unpaired" else 3
        fits = negative_keys.dim() == wanted and negative_keys.shape[-1] == dim
        fits = fits and (mode == "unpaired" or negative_keys.shape[0] == n)
        if not fits:
            shape = f"(m, {dim})" if mode == "unpaired" else f"({n}, m, {dim})"
            raise ShapeError(
                f"{mode} negative_keys must have shape {shape}; got {_checks.shape_text(negative_keys)}. "
                f"negative_mode='paired' is for negatives of each query, 'unpaired' for shared ones."
            )
    if symmetric and (negative_keys is not None or exclude is not None or queue is not None):
        raise ValueRangeError("symmetric is for in-batch negatives alone: other negatives have no second direction.")
    if labels is not None:
        _checks.check_index_dtype("labels", labels)
        if tuple(labels.shape) != (n,):
            raise ShapeError(f"labels must have one entry per row, shape ({n},); got {_checks.shape_text(labels)}.")
        if negative_keys is not None or exclude is not None:
            raise ValueRangeError(
                "labels describe in-batch keys (and the queue's); leave out negative_keys and exclude."
            )
    if exclude is not None:
        if not isinstance(exclude, Exclusion):
            raise DtypeError(f"exclude must be an Exclusion (AbovePositive, Guide); got {type(exclude).__name__}.")
        if mode == "paired" or queue is not None or hardness:
            raise ValueRangeError("exclude is for in-batch or unpaired negatives, without queue and hardness.")
    if queue is not None and queue.dim != dim:
        raise ShapeError(f"the queue holds vectors of {queue.dim} features, query has {dim}.")
