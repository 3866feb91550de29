"""Anchors that are candidates of one another: two views of each item (SimCLR), several items of a label (SupCon)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita import _checks
from partita import support as supports
from partita._torch_function import overridable
from partita.collective import Collective, collective_of
from partita.contrastive.candidates import Anchors, Bank, agree, check_pairs, of_other_labels, prepare, resolve_scale
from partita.contrastive.readout import LabelStats, label_stats, readout
from partita.engine import Stats
from partita.errors import ShapeError
from partita.precision import loss_dtype, no_autocast
from partita.rows import in_row_blocks
from partita.score import Score
from partita.support import Support

__all__ = ["label_rows", "nt_xent_loss", "supcon_loss"]


@overridable
def nt_xent_loss(
    out0: Tensor,  # (n, dim) one view
    out1: Tensor,  # (n, dim) the other view of the same items
    *,
    temperature: float | Tensor = 0.5,
    reduction: _checks.Reduction = "mean",
    return_stats: bool = False,
    group: object | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """SimCLR's loss: 2n unit anchors, the positive is the other view, the anchor itself is no candidate.

        loss_i = -log( exp(<x_i, x_i'> / t) / sum_{j != i} exp(<x_i, x_j> / t) ),       2n - 1 candidates

    Rows of `reduction="none"` and of the statistics: the anchors of out0, then those of out1. Spec: M-INC-1.
    Over a `group` as `info_nce_loss`; under DDP call `partita.distributed.for_ddp(loss, group).backward()`.

    >>> x = torch.eye(1)
    >>> nt_xent_loss(x, x)  # a single candidate, the positive
    tensor(0.)
    """
    processes = collective_of(group)
    with processes.validate():
        _checks.check_reduction(reduction)
        check_pairs(out0, out1, ("out0", "out1"))
        x = torch.cat([prepare("out0", out0, True), prepare("out1", out1, True)])
        scale = resolve_scale(temperature, None, len(x), out0.dtype)
        processes.check_pass(x, x, scale)
    given = {"out0 and out1": x}
    processes = agree(processes, "nt_xent_loss", given, scale, (reduction, return_stats))
    other = torch.arange(len(x), device=x.device).roll(len(out0))
    reads: dict[str, Any] = {"target": other, "rank": return_stats, "statistics": return_stats}
    sums = processes.sums(x, x, scale, support=supports.not_self(), **reads)
    loss = processes.reduce(sums.nll(), reduction).to(loss_dtype(out0))
    if not return_stats:
        return loss
    # the positive is n rows before or after its anchor; everything else but the anchor is a negative
    n = max(len(out0), 1)  # of no anchors too there are windows
    window = supports.window
    rest = window(None, -n - 1) | (window(n - 1, n - 1) & supports.not_self()) | window(-n - 1, None)
    anchors, banks, partners = Anchors(x, scale, processes), [Bank(x, rest)], x[other]
    with torch.no_grad():
        negatives, left_out = anchors.state(banks), [anchors.positive(each) for each in (x, partners)]
    return loss, readout(anchors, partners, banks, sums.state, negatives, sums.nll(), left_out, sums.rank)


@overridable
def supcon_loss(
    embeddings: Tensor,  # (n, dim)
    labels: Tensor,  # (n,)
    *,
    temperature: float | Tensor = 0.1,
    ref_emb: Tensor | None = None,  # (m, dim)
    ref_labels: Tensor | None = None,  # (m,)
    reduction: _checks.Reduction = "mean",
    return_stats: bool = False,
    group: object | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """Supervised contrast: every candidate of the anchor's label is a positive; the mean is outside the log.

        loss_i = mean_{j positive of i} -log p(j|i) = log Z_i - <x_i, mean positive> / t

    Candidates are the other embeddings, or all of `ref_emb`. The numerator is linear in the keys: sums per label, no
    pass, no mask. Anchors without a positive are left out (0 with `reduction="none"`); none at all gives 0.
    Over a `group` as `info_nce_loss`; under DDP call `partita.distributed.for_ddp(loss, group).backward()`.

    >>> x = torch.ones(3, 1)
    >>> supcon_loss(x, torch.tensor([0, 0, 1]))  # two anchors with one positive among two candidates: log 2
    tensor(0.6931)
    """
    processes = collective_of(group)
    with processes.validate():
        _checks.check_reduction(reduction)
        _check_labels("embeddings", embeddings, "labels", labels)
        if (ref_emb is None) != (ref_labels is None):
            raise ShapeError("ref_emb and ref_labels belong together: give both or neither.")
        x = prepare("embeddings", embeddings, True)
        scale = resolve_scale(temperature, None, len(x), x.dtype)
        keys, key_labels = x, labels
        if ref_emb is not None and ref_labels is not None:
            _check_labels("ref_emb", ref_emb, "ref_labels", ref_labels)
            keys, key_labels = prepare("ref_emb", ref_emb, True), ref_labels
        _checks.check_device(("embeddings", "labels", "ref_labels"), (x, labels, key_labels))
        processes.check_pass(x, keys, scale)
    given, itself = {"embeddings": embeddings, "ref_emb": ref_emb}, ref_emb is None
    options = (reduction, return_stats, itself)
    processes = agree(processes, "supcon_loss", given, scale, options, (len(x), len(keys)))
    anchors = Anchors(x, scale, processes)
    rows, count, stats = label_rows(anchors, labels, keys, key_labels, itself=itself, stats=return_stats)
    total = (count > 0).sum().to(rows.dtype)
    loss = processes.reduce(rows, reduction, total).to(loss_dtype(embeddings))
    return loss if stats is None else (loss, stats)


def label_rows(
    anchors: Anchors,
    labels: Tensor,
    keys: Tensor,
    key_labels: Tensor,
    *,
    itself: bool,  # the keys are the anchors: none is a candidate of itself
    stats: bool,
) -> tuple[Tensor, Tensor, LabelStats | None]:
    """Each anchor's loss, 0 without a positive, and how many positives it has.

    The loss of a sole positive that holds all of the probability is 0 itself, not what rounding leaves of it.
    """
    x, scale = anchors.query, anchors.scale
    state = anchors.state([Bank(keys, supports.not_self() if itself else None, 1)], stats)
    if anchors.score is None:
        total, count = _label_sums(anchors, labels, keys, key_labels)
        if itself:
            total, count = total - x.to(total.dtype), count - 1
        similarity = (x.to(total.dtype) * total).sum(-1)
    else:
        similarity, count = _scores_of_label(x, labels, keys, key_labels, itself, anchors.score)
    positive = scale * similarity / count.clamp(min=1)
    level = torch.where(state.empty(), positive, state.log_partition())
    alone = (count == 1) & (state.mass == 1) & (state.peak - positive < 1)
    rows = torch.where((count > 0) & ~alone, level - positive, torch.zeros_like(positive))
    if not stats:
        return rows, count, None
    bank = of_other_labels(keys, labels.long(), key_labels.long(), anchors.processes, 1)
    with torch.no_grad():
        negatives = anchors.state([bank])
        right = (count > 0) & ((negatives.max_score() < state.max_score()) | negatives.empty())
    return rows, count, label_stats(state, negatives, right, rows, count, x, scale)


def _label_sums(anchors: Anchors, labels: Tensor, keys: Tensor, key_labels: Tensor) -> tuple[Tensor, Tensor]:
    """For each anchor the sum and the number of the keys with its label; O((n + m) dim)."""
    x, processes = anchors.query, anchors.processes
    dtype = torch.promote_types(x.dtype, torch.float32)
    labels, key_labels = labels.long().contiguous(), key_labels.long().contiguous()
    every = processes.gather_rows(key_labels, 1)
    # sums go to the place where a label first comes; where the number of labels is not read, every key has a place
    whole = torch.cat(every)
    known = whole.unique() if whole.is_cpu and not torch.compiler.is_compiling() else whole.sort()[0]
    if len(known) > max(processes.sizes[1]):  # more sums than a rank has keys: they go round in blocks
        return _label_sums_round(processes, x, labels, keys, every)
    of_key = torch.searchsorted(known, key_labels)
    sums = keys.new_zeros(len(known), keys.shape[-1], dtype=dtype).index_add(0, of_key, keys.to(dtype))
    counts = torch.zeros_like(known, dtype=dtype).index_add(0, of_key, torch.ones_like(of_key, dtype=dtype))
    if not len(known):
        return torch.zeros_like(x, dtype=dtype), counts.new_zeros(len(x))
    sums, counts = processes.pooled(sums), processes.added(counts)
    at = torch.searchsorted(known, labels).clamp(max=len(known) - 1)
    there = known[at] == labels
    return sums[at] * there[:, None], counts[at] * there


def _scores_of_label(
    x: Tensor, labels: Tensor, keys: Tensor, key_labels: Tensor, itself: bool, score: Score
) -> tuple[Tensor, Tensor]:
    """For each anchor the sum of its scores with the keys of its label, and their number; a few rows at a time."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    own, number = (torch.arange(len(each), device=x.device) for each in (x, keys))

    def few(rows: Tensor, label: Tensor, at: Tensor, keys: Tensor, key_labels: Tensor) -> Tensor:
        same = label[:, None] == key_labels
        if itself:
            same = same & (at[:, None] != number)
        with no_autocast(rows):
            raw = score(rows, keys)
        return torch.stack([torch.where(same, raw, 0.0).sum(-1), same.sum(-1).to(raw.dtype)], -1)

    return in_row_blocks(few, [x.to(dtype), labels, own], [keys.to(dtype), key_labels], len(keys)).unbind(-1)  # type: ignore[return-value]


def _label_sums_round(
    processes: Collective, x: Tensor, labels: Tensor, keys: Tensor, every: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same by a pass whose weights are all 1 (scale 0) and whose value is the key: a block at a time."""

    def same(source: int, n: int) -> list[tuple[slice, int, Support]]:
        return [(slice(0, n), 0, supports.segments(labels, every[source]))]

    sums = processes.sums(x.detach(), keys, 0.0, view=same, kind=1, value=keys, statistics=False)
    assert sums.mean is not None
    return sums.mean * sums.state.count[:, None], sums.state.count


def _check_labels(name: str, vectors: Tensor, label_name: str, labels: Tensor) -> None:
    _checks.check_float(name, vectors)
    _checks.check_index_dtype(label_name, labels)
    if vectors.dim() != 2 or tuple(labels.shape) != (len(vectors),):
        raise ShapeError(
            f"{name} must be (n, dim) and {label_name} (n,); got {_checks.shape_text(vectors)} and "
            f"{_checks.shape_text(labels)}."
        )
