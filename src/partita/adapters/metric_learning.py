"""Losses in the call form of pytorch-metric-learning: (embeddings, labels, indices_tuple, ref_emb, ref_labels)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from partita._checks import check_positive
from partita._overrides import overridable
from partita.contrastive import LabelStats, sort_by_label, supcon_loss
from partita.contrastive.readout import per_row, width_of
from partita.engine import State, Stats
from partita.errors import ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.rows import in_row_blocks

__all__ = ["NTXentLoss", "SupConLoss", "pair_loss"]


class _Loss(nn.Module):
    kind: str

    def __init__(self, temperature: float, others: dict[str, Any]):
        super().__init__()
        check_positive("temperature", temperature)
        asked = [name for name, value in others.items() if value is not None]
        if asked:
            raise ValueRangeError(
                f"{self.kind} takes a temperature; {', '.join(asked)} would need the n x n matrix of distances or a "
                f"loss of each pair, which are not made here. Use pytorch_metric_learning's own for those."
            )
        self.temperature = temperature

    def forward(
        self,
        embeddings: Tensor,  # (n, dim)
        labels: Tensor | None = None,  # (n,)
        indices_tuple: Sequence[Tensor] | None = None,  # (a, p, n), or (a, p) and (a, n) in a row
        ref_emb: Tensor | None = None,  # (m, dim)
        ref_labels: Tensor | None = None,  # (m,)
    ) -> Tensor:
        out = pair_loss(
            embeddings, labels, indices_tuple, ref_emb, ref_labels, kind=self.kind, temperature=self.temperature
        )
        assert isinstance(out, Tensor)
        return out

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


class SupConLoss(_Loss):
    """Supervised contrast; equal to ``pytorch_metric_learning.losses.SupConLoss()`` with its defaults.

    With mined tuples an anchor's candidates are the pairs that the miner gave, each counted once.
    """

    kind = "SupConLoss"

    def __init__(self, temperature: float = 0.1, **others: Any):
        super().__init__(temperature, others)


class NTXentLoss(_Loss):
    """Every positive pair against its anchor's negatives; equal to ``pytorch_metric_learning.losses.NTXentLoss()``.

        loss_ap = -log( exp(s_ap / t) / ( exp(s_ap / t) + sum_{n: other label} exp(s_an / t) ) ),     mean over pairs

    Negatives stream (keys sorted by label); only the positive pairs are listed. With mined tuples both are the miner's
    lists, a pair that is in them twice counts twice, as there.
    """

    kind = "NTXentLoss"

    def __init__(self, temperature: float = 0.07, **others: Any):
        super().__init__(temperature, others)


@overridable
def pair_loss(
    embeddings: Tensor,  # (n, dim)
    labels: Tensor | None = None,  # (n,)
    indices_tuple: Sequence[Tensor] | None = None,
    ref_emb: Tensor | None = None,  # (m, dim)
    ref_labels: Tensor | None = None,  # (m,)
    *,
    kind: str,
    temperature: float,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Stats]:
    """What the modules above compute. return_stats: also a `LabelStats` of each anchor among its candidates."""
    if embeddings.dim() != 2 or (labels is not None and tuple(labels.shape) != (len(embeddings),)):
        raise ShapeError("embeddings must be (n, dim) and labels (n,).")
    if indices_tuple is not None:
        keys = embeddings if ref_emb is None else ref_emb
        pairs = _pairs(indices_tuple, len(embeddings), len(keys))
        x, keys = normalize(embeddings, dim=-1), normalize(keys, dim=-1)
        return _mined(x, keys, pairs, 1.0 / temperature, kind == "SupConLoss", return_stats)
    if labels is None:
        raise ShapeError("embeddings must be (n, dim) and labels (n,): without labels, give mined tuples.")
    if (ref_emb is None) != (ref_labels is None):
        raise ShapeError("ref_emb and ref_labels belong together: give both or neither.")
    given: dict[str, Any] = {"temperature": temperature, "ref_emb": ref_emb, "ref_labels": ref_labels}
    if kind == "SupConLoss":
        return supcon_loss(embeddings, labels, **given, return_stats=return_stats)
    loss = _nt_xent(embeddings, labels, ref_emb, ref_labels, 1.0 / temperature)
    if not return_stats:
        return loss
    return loss, supcon_loss(embeddings, labels, **given, return_stats=True)[1]  # type: ignore[return-value]


def _nt_xent(
    embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None, scale: float
) -> Tensor:
    x = normalize(embeddings, dim=-1)
    keys = x if ref_emb is None else normalize(ref_emb, dim=-1)
    key_labels = labels if ref_labels is None else ref_labels
    order, others = sort_by_label(labels, key_labels)
    keys = keys[order]
    count = others.last - others.first
    negatives = Gibbs(x, keys, scale=scale, support=others).reduce(statistics=False).state
    # anchor a has the keys first_a, ..., last_a - 1 of its own label
    anchor = torch.repeat_interleave(torch.arange(len(x), device=x.device), count)
    key = others.first[anchor] + _place(count)
    if ref_emb is None:
        apart = order[key] != anchor
        anchor, key = anchor[apart], key[apart]
    if not len(anchor) or bool((count == len(keys)).all()):
        return 0.0 * x.sum()
    score = scale * (x[anchor] * keys[key]).sum(-1)
    return -logsigmoid(score - negatives.log_partition()[anchor]).mean()


def _place(count: Tensor) -> Tensor:
    """0, 1, ..., count_0 - 1, 0, 1, ..., count_1 - 1, ..."""
    first = torch.repeat_interleave(count.cumsum(0) - count, count)
    return torch.arange(len(first), device=count.device) - first


# ---- mined tuples --------------------------------------------------------------------------------------------------


def _pairs(given: Sequence[Tensor], n: int, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Anchors and positives, anchors and negatives; triplets name their anchor once."""
    if not isinstance(given, (tuple, list)) or len(given) not in (3, 4):
        raise ValueRangeError(
            "indices_tuple must be what a miner gives: triplets (anchors, positives, negatives), or pairs (anchors, "
            "positives, anchors, negatives)."
        )
    a, p, *rest = (x.long() for x in given)
    a2, negative = rest if len(rest) == 2 else (a, rest[0])
    for name, one, other in (("positive", a, p), ("negative", a2, negative)):
        outside = one.numel() and not (int(one.min()) >= 0 and int(one.max()) < n)
        outside = outside or (other.numel() and not (int(other.min()) >= 0 and int(other.max()) < m))
        if one.shape != other.shape or one.dim() != 1 or outside:
            raise ShapeError(
                f"the {name} pairs of indices_tuple must be two lists of one length, anchors below {n} and partners "
                f"below {m}; got {tuple(one.shape)} and {tuple(other.shape)}."
            )
    return a, p, a2, negative


def _mined(
    x: Tensor, keys: Tensor, pairs: tuple[Tensor, Tensor, Tensor, Tensor], scale: float, once: bool, return_stats: bool
) -> Tensor | tuple[Tensor, Stats]:
    """The loss of listed pairs: one score each, and one row of scores per anchor, as long as its longest list."""
    a, p, b, m = pairs
    if once:
        (a, p), (b, m) = _each_once(a, p, len(keys)), _each_once(b, m, len(keys))
    positive, negative = (scale * _scores(x, keys, i, j) for i, j in ((a, p), (b, m)))
    near, far = _state(positive, a, len(x)), _state(negative, b, len(x))
    nothing = not len(a) or not len(b)
    if once:
        whole = near.merge(far)
        mean = torch.zeros_like(near.mass).index_add(0, a, positive) / near.count.clamp(min=1)
        rows = torch.where(near.empty(), 0.0, torch.where(near.empty(), mean, whole.log_partition()) - mean)
        loss = rows.sum() / (rows > 0).sum().clamp(min=1)  # those whose loss is 0 are not counted, as there
    else:
        each = -logsigmoid(positive - far.log_partition()[a])
        loss = each.mean() if len(each) else each.sum()
        rows = torch.zeros_like(near.mass).index_add(0, a, each.detach()) / near.count.clamp(min=1)
    loss = (0.0 * x.sum() if nothing else loss).to(x.dtype)
    return (loss, _read(near, far, rows, x, scale)) if return_stats else loss


def _each_once(one: Tensor, other: Tensor, width: int) -> tuple[Tensor, Tensor]:
    code = torch.unique(one * width + other)
    return code // width, code % width


def _scores(x: Tensor, keys: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """<x_i, key_j> of listed pairs; the vectors of a few are gathered at a time."""
    dtype = torch.promote_types(x.dtype, torch.float32)

    def few(i: Tensor, j: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return (left[i] * right[j]).sum(-1)

    return in_row_blocks(few, [one, other], [x.to(dtype), keys.to(dtype)], x.shape[-1])


def _state(score: Tensor, anchor: Tensor, n: int) -> State:
    """The sums of each anchor over its listed pairs."""
    anchor, order = anchor.sort(stable=True)
    count = torch.bincount(anchor, minlength=n)
    table = score.new_full((n, max(1, int(count.max()) if n else 1)), -torch.inf)
    return State.of(table.index_put((anchor, _place(count)), score[order]))


@torch.no_grad()
def _read(near: State, far: State, rows: Tensor, x: Tensor, scale: float) -> LabelStats:
    whole = near.merge(far)
    right = ~near.empty() & (near.peak >= far.peak)
    norm = torch.linalg.vector_norm(x.to(rows.dtype), dim=-1)
    push = far.count, width_of(far), per_row(scale, rows), norm
    return LabelStats(*whole.stats(), right, whole.confidence(), rows.detach(), near.count, *push)  # type: ignore[call-arg, unused-ignore]
