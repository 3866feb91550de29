"""InfoNCE: the positive among its candidates, in the batch, given, from a queue or from states of several banks."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from partita import _checks
from partita import support as supports
from partita._torch_function import overridable
from partita.collective import ALONE, Collective, collective_of
from partita.contrastive.candidates import (
    Anchors,
    Bank,
    Exclusion,
    InUse,
    agree,
    check_pairs,
    of_other_labels,
    prepare,
    resolve_scale,
)
from partita.contrastive.queue import Queue
from partita.contrastive.readout import readout
from partita.engine import State, Stats
from partita.engine.callable_score import Pairs, compared
from partita.engine.small import pairs
from partita.engine.state import check_state
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.precision import loss_dtype
from partita.rows import in_row_blocks, reduce_rows
from partita.score import InnerProduct, Score

__all__ = ["diagonal_loss", "info_nce_loss", "joint_loss"]


@overridable
def info_nce_loss(
    query: Tensor,  # (n, dim)
    positive_key: Tensor,  # (n, dim)
    negative_keys: Tensor | None = None,  # (m, dim) unpaired, (n, m, dim) paired
    *,
    temperature: float | Tensor = 0.07,
    reduction: _checks.Reduction = "mean",
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
    score: Score | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """Cross entropy of the positive among its candidates, without the matrix of similarities.

        loss_i = -log( exp(<q_i, k_i> / t) / sum_j exp(<q_i, k_j> / t) )

    Candidates are the positives of the whole batch; with `negative_keys`, the row's own positive and those. `normalize`
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
    score: replaces <q, k>, as for `partita.Gibbs`, on the vectors as `normalize` leaves them.
    return_stats: also a `ContrastStats`, of the direction from queries to keys.
    group: a torch.distributed group (or DeviceMesh) whose ranks hold rows each: the keys of all are candidates, passed
        round in blocks. Every rank gets the global value, with `reduction="none"` and in the statistics its own rows.
        Under DDP call `partita.distributed.for_ddp(loss, group).backward()`, as DDP averages what has to be summed.
    """
    processes = collective_of(group)
    with processes.validate():
        _checks.check_reduction(reduction)
        check_pairs(query, positive_key)
        scale = resolve_scale(temperature, log_temperature, len(query), query.dtype)
        _check_options(negative_keys, negative_mode, symmetric, exclude, hardness, queue, labels, query, scale)
        if not processes.alone and exclude is not None:
            raise ValueRangeError("exclude needs all scores of a row, and has no form over a group.")
        if score is not None:
            _check_score(score, processes, exclude, hardness)
        kept = None if queue is None else queue.slots()
        for other in (positive_key, negative_keys, None if kept is None else kept[0].to(query.dtype)):
            if other is not None:
                processes.check_pass(query, other if other.dim() == 2 else other[..., :0, :], scale)
    plain = negative_keys is None and labels is None and exclude is None and queue is None
    plain = plain and not hardness and not decoupled
    if not (plain and processes.alone):
        rules = (reduction, negative_mode, normalize, symmetric, return_stats, labels is None, hardness, decoupled)
        given = {"query": query, "positive_key": positive_key, "negative_keys": negative_keys}
        kinds = [len(query), 0 if negative_keys is None else len(negative_keys), 0 if kept is None else len(kept[0])]
        processes = agree(processes, "info_nce_loss", given, scale, (*rules, queue is None), kinds)
    if isinstance(score, InnerProduct):  # of other vectors
        query, positive_key = prepare("query", query, normalize), prepare("positive_key", positive_key, normalize)
        if negative_keys is not None:
            negative_keys = compared(score, query, prepare("negative_keys", negative_keys, normalize))[1]
        kept = None if kept is None else (compared(score, query, kept[0].to(query.dtype))[1], *kept[1:])
        (query, positive_key), score, normalize = compared(score, query, positive_key), None, False
    if plain and score is None:
        return diagonal_loss(
            query, positive_key, scale, symmetric=symmetric, normalize=normalize, reduction=reduction,
            return_stats=return_stats, processes=processes,
        )  # fmt: skip
    q, k = prepare("query", query, normalize), prepare("positive_key", positive_key, normalize)
    negatives = None if negative_keys is None else prepare("negative_keys", negative_keys, normalize)
    anchors, in_batch = Anchors(q, scale, processes, score, hardness), negative_keys is None
    banks = _banks(anchors, k, negatives, labels, kept)
    rows, stats = _rows(anchors, k, banks, exclude, decoupled, in_batch, return_stats)
    if symmetric:
        back = anchors.turned(k)
        rows = (rows + _rows(back, q, _banks(back, q, None, labels, None), None, decoupled, True, False)[0]) / 2
    loss = processes.reduce(rows, reduction).to(loss_dtype(query))
    return loss if stats is None else (loss, stats)


def diagonal_loss(
    query: Tensor,  # (n, dim)
    key: Tensor,  # (n, dim)
    scale: float | Tensor,
    *,
    symmetric: bool = True,
    normalize: bool = False,
    reduction: _checks.Reduction = "mean",
    return_stats: bool = False,
    bias: Tensor | None = None,  # (1, 1)
    processes: Collective = ALONE,
) -> Tensor | tuple[Tensor, Stats]:
    """InfoNCE of the pairs of a batch: row i belongs to column i, every other column is a negative.

    loss = mean_i ( log Z_row_i - s_ii ),        symmetric: averaged with  mean_j ( log Z_column_j - s_jj )
    """

    def loss(query: Tensor, key: Tensor, sharp: Tensor | None = None) -> Tensor:
        q, k = prepare("query", query, normalize), prepare("key", key, normalize)
        factor = scale if sharp is None else sharp
        own = torch.arange(len(q), device=q.device)
        if symmetric:
            rows, columns = processes.both_ways_nll(q, k, factor, bias, own)
            nll = (rows + columns) / 2
        else:
            nll = processes.sums(q, k, factor, bias=bias, target=own, statistics=False).nll()
        return processes.reduce(nll, reduction).to(loss_dtype(query))

    if not return_stats:
        alone = processes.alone and bias is None
        small = pairs(query, key, scale, normalize, symmetric, reduction, loss) if alone else None
        return loss(query, key) if small is None else small
    q, k = prepare("query", query, normalize), prepare("key", key, normalize)
    own = torch.arange(len(q), device=q.device)
    sums = processes.sums(q, k, scale, bias=bias, target=own, rank=True)
    rows = down = sums.nll()
    if symmetric:
        rows = (down + processes.sums(k, q, scale, bias=bias, target=own, statistics=False).nll()) / 2
    anchors, others = Anchors(q, scale, processes), [Bank(k, supports.not_self())]
    with torch.no_grad():
        negatives, left_out = anchors.state(others), [anchors.positive(k)]
    stats = readout(anchors, k, others, sums.state, negatives, down, left_out, sums.rank)
    return processes.reduce(rows, reduction).to(loss_dtype(query)), stats


@overridable
def joint_loss(positive: Tensor, *states: State, reduction: _checks.Reduction = "mean") -> Tensor:  # (n,)
    """-log of the positive's share among the keys of all states, its own included: banks, queues, other directions.

        loss_i = log( sum over banks Z_i ) - positive_i

    The positive must be among the keys of one of the states.

    >>> import partita
    >>> half = partita.State.of(torch.zeros(1, 2))
    >>> joint_loss(torch.zeros(1), half, half)  # log 4
    tensor(1.3863)
    """
    _checks.check_reduction(reduction)
    if not states:
        raise ShapeError("joint_loss needs at least one state.")
    check_state("every argument after positive", states[0])
    level = functools.reduce(State.merge, states).log_partition()
    _checks.check_rows("positive", positive, level, over="states")
    return reduce_rows(level - positive, reduction)


def _banks(
    anchors: Anchors,
    key: Tensor,  # the positives
    negatives: Tensor | None,
    labels: Tensor | None,
    kept: tuple[Tensor, Tensor | None, Tensor | None] | None,  # the slots of a queue
) -> list[Bank]:
    """Where the negatives come from; across ranks, unpaired ones and queues are those of all ranks."""
    processes = anchors.processes
    if negatives is not None:
        banks = [Bank(negatives, kind=1)]
    elif labels is None:
        banks = [Bank(key, supports.not_self())]
    else:
        banks = [of_other_labels(key, labels, labels, processes, 0)]
    if kept is not None and any(processes.sizes[2]):
        stored, kept_labels, used = kept
        keys = stored.to(key.dtype)
        if labels is not None and kept_labels is not None:
            banks.append(of_other_labels(keys, labels, kept_labels, processes, 2, used))
        else:
            banks.append(Bank(keys, None if used is None else InUse(used), 2, used=used))
    return banks


def _rows(
    anchors: Anchors,
    key: Tensor,
    banks: list[Bank],
    exclude: Exclusion | None,
    decoupled: bool,
    in_batch: bool,
    return_stats: bool,
) -> tuple[Tensor, Stats | None]:
    """The loss of every row against the union of banks, and its statistics."""
    positive = anchors.positive(key)
    logit, rank = anchors.scale * positive, None
    if exclude is None:
        negatives = anchors.state(banks, return_stats)
    else:
        negatives, rank = _excluding(exclude, anchors, banks[0].key, positive, in_batch)
    rest, nothing = negatives.log_partition(), negatives.empty()
    surprised = rows = -logsigmoid(logit - rest)
    if decoupled:
        rows = torch.where(nothing, torch.zeros_like(logit), torch.where(nothing, logit, rest) - logit)
    if not return_stats:
        return rows, None
    whole, left_out = negatives.merge(State.of(logit[:, None])), [positive.detach()] if in_batch else []
    return rows, readout(anchors, key, banks, whole, negatives, surprised, left_out, rank)


def _excluding(
    exclude: Exclusion, anchors: Anchors, key: Tensor, positive: Tensor, in_batch: bool
) -> tuple[State, Tensor]:
    """The state of the negatives a rule leaves, a few rows at a time."""
    q, scale = anchors.query, anchors.scale
    exclude.check(len(q), len(key))
    numbers = torch.arange(len(q), device=q.device)
    column = torch.arange(len(key), device=q.device)

    def few(rows: Tensor, own: Tensor, at: Tensor) -> Tensor:
        with torch.no_grad():
            keep = ~exclude.hidden(at, rows, key, own)
            if in_batch:
                keep &= column != at[:, None]
            rank = ((rows @ key.mT > own[:, None]) & keep).sum(-1)
        part = scale[at] if isinstance(scale, Tensor) and scale.numel() > 1 else scale
        state = Gibbs(rows, key, scale=part, support=supports.mask(keep)).state()
        return torch.stack([state.peak, state.mass, state.first, state.spread, state.count, rank.to(own.dtype)], -1)

    columns = in_row_blocks(few, [q, positive.detach(), numbers], [], len(key)).unbind(-1)
    peak, mass, first, spread, count, rank = columns
    return State(peak.detach(), mass, first, spread, count.detach()), rank.detach().long()


def _check_score(score: Score, processes: Collective, exclude: Exclusion | None, hardness: float) -> None:
    Pairs.of(score)
    if not processes.alone:
        raise ValueRangeError("score= needs every row in one process; leave out group.")
    if not isinstance(score, InnerProduct) and (exclude is not None or hardness):
        raise ValueRangeError(
            "exclude and hardness look at inner products; leave them out, or give score= one of partita.score that is "
            "one (Cosine, SquaredDistance, Bilinear)."
        )


def _check_options(
    negative_keys: Tensor | None,
    mode: str,
    symmetric: bool,
    exclude: Exclusion | None,
    hardness: float,
    queue: Queue | None,
    labels: Tensor | None,
    query: Tensor,
    scale: float | Tensor,
) -> None:
    if mode not in ("unpaired", "paired"):
        raise ValueRangeError(f"negative_mode must be 'unpaired' or 'paired'; got {mode!r}.")
    _checks.check_positive("hardness", hardness, zero=True)
    n, dim = query.shape
    if negative_keys is not None:
        _checks.check_float("negative_keys", negative_keys)
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
        if labels.is_meta:
            _checks.check_device(("query", "labels"), (query, labels))
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
    if queue is not None:
        _checks.check_kind("queue", queue, Queue, "Make one: Queue(size, dim).")
        if queue.dim != dim:
            raise ShapeError(f"the queue holds vectors of {queue.dim} features, query has {dim}.")
    if isinstance(scale, Tensor) and scale.numel() > 1 and (symmetric or hardness):
        given, why = ("symmetric", ": a column has no row of its own") if symmetric else ("hardness", "")
        raise ValueRangeError(f"{given} takes one temperature for all rows{why}.")
