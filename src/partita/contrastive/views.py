"""Anchors that are candidates of one another: two views of each item (SimCLR), several items of a label (SupCon)."""

from __future__ import annotations

import torch
from torch import Tensor

from partita import _checks
from partita import support as supports
from partita._overrides import overridable
from partita.contrastive import candidates
from partita.contrastive.readout import ContrastStats, LabelStats, per_row, readout, similarity_moments, width_of
from partita.engine import State, Stats
from partita.engine.sums import Sums
from partita.errors import ShapeError
from partita.precision import loss_dtype
from partita.processes import Processes, processes_of
from partita.support import Support

__all__ = ["nt_xent_loss", "supcon_loss"]


@overridable
def nt_xent_loss(
    out0: Tensor,  # (n, dim) one view
    out1: Tensor,  # (n, dim) the other view of the same items
    *,
    temperature: float | Tensor = 0.5,
    reduction: str = "mean",
    return_stats: bool = False,
    group: object | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """SimCLR's loss: 2n unit anchors, the positive is the other view, the anchor itself is no candidate.

        loss_i = -log( exp(<x_i, x_i'> / t) / sum_{j != i} exp(<x_i, x_j> / t) ),       2n - 1 candidates

    Rows of `reduction="none"` and of the statistics: the anchors of out0, then those of out1. Spec: M-INC-1.

    >>> x = torch.eye(1)
    >>> nt_xent_loss(x, x)  # a single candidate, the positive
    tensor(0.)
    """
    processes = processes_of(group)
    with processes.checks():
        _checks.check_reduction(reduction)
        candidates.check_pairs(out0, out1, ("out0", "out1"))
        anchors = torch.cat([candidates.prepare("out0", out0, True), candidates.prepare("out1", out1, True)])
        scale = candidates.resolve_scale(temperature, None, len(anchors), out0.dtype)
        processes.probe(anchors, anchors, scale)
    given = {"out0 and out1": anchors}
    processes = candidates.agree(processes, "nt_xent_loss", given, scale, (reduction, return_stats))
    other = torch.arange(len(anchors), device=anchors.device).roll(len(out0))
    sums = processes.sums(
        anchors,
        anchors,
        scale,
        support=supports.not_self(),
        target=other,
        rank=return_stats,
        statistics=return_stats,
    )
    loss = processes.reduce(sums.nll(), reduction).to(loss_dtype(out0))
    return (loss, _two_views(sums, anchors, other, scale, processes)) if return_stats else loss


@torch.no_grad()
def _two_views(
    sums: Sums, anchors: Tensor, other: Tensor, scale: float | Tensor, processes: Processes
) -> ContrastStats:
    """The positive stands n rows before or after its anchor; everything else but the anchor is a negative."""
    n = len(anchors) // 2
    window = supports.window
    rest = window(None, -n - 1) | window(n - 1, -1) | window(-1, n - 1) | window(-n - 1, None)
    bank = candidates.Bank(anchors, rest, processes=processes)
    positive = candidates.positive_score(anchors, anchors[other], 1.0)
    moments = similarity_moments(
        [bank], anchors, positive, [candidates.positive_score(anchors, anchors, 1.0), positive]
    )
    assert sums.rank is not None
    nll = sums.nll()
    vectors = anchors, anchors[other]
    return readout(sums.state, bank.state(anchors, scale), sums.rank, nll, positive, moments, scale, vectors)


@overridable
def supcon_loss(
    embeddings: Tensor,  # (n, dim)
    labels: Tensor,  # (n,)
    *,
    temperature: float | Tensor = 0.1,
    ref_emb: Tensor | None = None,  # (m, dim)
    ref_labels: Tensor | None = None,  # (m,)
    reduction: str = "mean",
    return_stats: bool = False,
    group: object | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """Supervised contrast: every candidate of the anchor's label is a positive; the mean stands outside the log.

        loss_i = mean_{j positive of i} -log p(j|i) = log Z_i - <x_i, mean positive> / t

    Candidates are the other embeddings, or all of `ref_emb`. The numerator is linear in the keys: sums per label, no
    pass, no mask. Anchors without a positive are left out (0 with `reduction="none"`); none at all gives 0.

    >>> x = torch.ones(3, 1)
    >>> supcon_loss(x, torch.tensor([0, 0, 1]))  # two anchors with one positive among two candidates: log 2
    tensor(0.6931)
    """
    processes = processes_of(group)
    with processes.checks():
        _checks.check_reduction(reduction)
        _check_labels("embeddings", embeddings, "labels", labels)
        if (ref_emb is None) != (ref_labels is None):
            raise ShapeError("ref_emb and ref_labels belong together: give both or neither.")
        if ref_emb is not None and ref_labels is not None:
            _check_labels("ref_emb", ref_emb, "ref_labels", ref_labels)
        x = candidates.prepare("embeddings", embeddings, True)
        scale = candidates.resolve_scale(temperature, None, len(x), x.dtype)
        if ref_emb is None or ref_labels is None:
            keys, key_labels, support = x, labels, supports.not_self()
        else:
            keys, key_labels, support = candidates.prepare("ref_emb", ref_emb, True), ref_labels, None
        _checks.check_device(("embeddings", "labels", "ref_labels"), (x, labels, key_labels))
        processes.probe(x, keys, scale)
    given = {"embeddings": embeddings, "ref_emb": ref_emb}
    options = (reduction, return_stats, ref_emb is None)
    processes = candidates.agree(processes, "supcon_loss", given, scale, options, (len(x), len(keys)))
    state = processes.sums(x, keys, scale, support=support, kind=1, statistics=return_stats).state
    total, count = _label_sums(x, labels, keys, key_labels, processes)
    if ref_emb is None:
        total, count = total - x.to(total.dtype), count - 1
    has = count > 0
    positive = scale * (x.to(total.dtype) * total).sum(-1) / count.clamp(min=1)
    level = torch.where(state.empty(), positive, state.log_partition())
    rows = torch.where(has, level - positive, torch.zeros_like(positive))
    loss = processes.reduce(rows, reduction, has.sum().to(rows.dtype)).to(loss_dtype(embeddings))
    if not return_stats:
        return loss
    bank = candidates.of_other_labels(keys, labels.long(), key_labels.long(), 0.0, processes, 1)
    return loss, _many_positives(state, rows, count, bank, x, scale)


def _many_positives(
    state: State, rows: Tensor, count: Tensor, bank: candidates.Bank, x: Tensor, scale: float | Tensor
) -> LabelStats:
    """An anchor is right if its best candidate is no negative."""
    with torch.no_grad():
        negatives = bank.state(x, scale)
        right = (count > 0) & ((negatives.max_score() < state.max_score()) | negatives.empty())
        confidence = state.confidence()
        norm = torch.linalg.vector_norm(x.to(rows.dtype), dim=-1)
    push = negatives.count, width_of(negatives), per_row(scale, rows), norm
    return LabelStats(*state.stats(), right, confidence, rows, count, *push)  # type: ignore[call-arg]


def _label_sums(
    x: Tensor, labels: Tensor, keys: Tensor, key_labels: Tensor, processes: Processes
) -> tuple[Tensor, Tensor]:
    """For each anchor the sum and the number of the keys with its label; O((n + m) dim)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    labels, key_labels = labels.long().contiguous(), key_labels.long().contiguous()
    every = processes.gather_rows(key_labels, 1)
    # sums go to the place where a label first comes; while tracing nobody knows how many differ, and every key has one
    known = torch.cat(every).sort()[0] if torch.compiler.is_compiling() else torch.cat(every).unique()
    if len(known) > max(processes.sizes[1]):  # more sums than a rank has keys: they go round in blocks
        return _label_sums_round(processes, x, labels, keys, every)
    of_key = torch.searchsorted(known, key_labels)
    sums = keys.new_zeros(len(known), keys.shape[-1], dtype=dtype).index_add(0, of_key, keys.to(dtype))
    counts = torch.zeros(len(known), dtype=dtype, device=x.device).index_add(
        0, of_key, torch.ones_like(of_key, dtype=dtype)
    )
    if not len(known):
        return torch.zeros_like(x, dtype=dtype), counts.new_zeros(len(x))
    sums, counts = processes.pooled(sums), processes.added(counts)
    at = torch.searchsorted(known, labels).clamp(max=len(known) - 1)
    there = known[at] == labels
    return sums[at] * there[:, None], counts[at] * there


def _label_sums_round(
    processes: Processes, x: Tensor, labels: Tensor, keys: Tensor, every: list[Tensor]
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
