"""Losses in the call form of pytorch-metric-learning: (embeddings, labels, indices_tuple, ref_emb, ref_labels)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from partita._checks import check_positive
from partita._torch_function import overridable
from partita.collective import ALONE
from partita.contrastive import LabelStats, sort_by_label
from partita.contrastive.candidates import Anchors
from partita.contrastive.readout import label_stats
from partita.contrastive.views import label_rows
from partita.engine import State
from partita.errors import ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.precision import no_autocast, product
from partita.rows import in_row_blocks
from partita.score import Distance, Score

__all__ = ["NTXentLoss", "SupConLoss", "pair_loss"]


class _Loss(nn.Module):
    kind: str

    def __init__(self, temperature: float, distance: Any, reducer: Any, others: dict[str, Any]):
        super().__init__()
        check_positive("temperature", temperature)
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueRangeError(
                f"{self.kind} takes temperature, distance and reducer, and not {', '.join(given)}. "
                f"Use pytorch_metric_learning's own loss for those."
            )
        _score_of(distance)
        if reducer is not None and not callable(reducer):
            raise ValueRangeError(
                f"reducer must be one of pytorch_metric_learning.reducers, or None; got {type(reducer).__name__}."
            )
        self.temperature, self.distance, self.reducer = temperature, distance, reducer

    def forward(
        self,
        embeddings: Tensor,  # (n, dim)
        labels: Tensor | None = None,  # (n,)
        indices_tuple: Sequence[Tensor] | None = None,  # (a, p, n), or (a, p) and (a, n) in a row
        ref_emb: Tensor | None = None,  # (m, dim)
        ref_labels: Tensor | None = None,  # (m,)
    ) -> Any:
        return pair_loss(
            embeddings, labels, indices_tuple, ref_emb, ref_labels, kind=self.kind, temperature=self.temperature,
            distance=self.distance, reducer=self.reducer,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


class SupConLoss(_Loss):
    """Supervised contrast; equal to ``pytorch_metric_learning.losses.SupConLoss()`` with its defaults.

    The mean is over the anchors whose loss is not 0. With mined tuples an anchor's candidates are the pairs that the
    miner gave, each counted once. Without any positive or any negative in the whole batch the loss is 0, as there.

    distance: `CosineSimilarity`, `DotProductSimilarity` or `LpDistance` of that package; any other is refused.
    reducer: one of that package's; it gets the loss of each anchor.
    """

    kind = "SupConLoss"

    def __init__(self, temperature: float = 0.1, *, distance: Any = None, reducer: Any = None, **others: Any):
        super().__init__(temperature, distance, reducer, others)


class NTXentLoss(_Loss):
    """Every positive pair against its anchor's negatives; equal to ``pytorch_metric_learning.losses.NTXentLoss()``.

        loss_ap = -log( exp(s_ap / t) / ( exp(s_ap / t) + sum_{n: other label} exp(s_an / t) ) ),     mean over pairs

    Negatives stream (keys sorted by label); only the positive pairs are listed. With mined tuples both are the miner's
    lists, a pair that is in them twice counts twice, as there.

    distance: as for `SupConLoss`.
    reducer: one of that package's; it gets the loss of each positive pair.
    """

    kind = "NTXentLoss"

    def __init__(self, temperature: float = 0.07, *, distance: Any = None, reducer: Any = None, **others: Any):
        super().__init__(temperature, distance, reducer, others)


class _Power:
    """The power of an inner product, or minus that of a distance."""

    per_pair = 1

    def __init__(self, distance: Distance | None, power: float):
        self.distance, self.power = distance, power

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        if self.distance is None:
            return product(query, key.mT) ** self.power
        return -((-self.distance(query, key)) ** self.power)


def _score_of(distance: Any) -> Score | None:
    """What the engine scores with, of vectors that are normalised already; None is the inner product."""
    if distance is None:
        return None
    home, name = type(distance).__module__, type(distance).__name__
    inner = name in ("CosineSimilarity", "DotProductSimilarity")
    if not home.startswith("pytorch_metric_learning.distances.") or not (inner or name == "LpDistance"):
        raise ValueRangeError(
            f"distance must be CosineSimilarity, DotProductSimilarity or LpDistance of "
            f"pytorch_metric_learning.distances, or None; got {name}. Use that package's own loss for others."
        )
    score = None if inner else Distance(distance.p)
    return score if distance.power == 1 else _Power(score, distance.power)


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
    distance: Any = None,
    reducer: Any = None,
    return_stats: bool = False,
) -> Any:
    """What the modules above compute. return_stats: also a `LabelStats` of each anchor among its candidates."""
    if embeddings.dim() != 2 or (labels is not None and tuple(labels.shape) != (len(embeddings),)):
        raise ShapeError("embeddings must be (n, dim) and labels (n,).")
    itself = ref_emb is None
    keys = embeddings if ref_emb is None else ref_emb
    pairs = None if indices_tuple is None else _pairs(indices_tuple, len(embeddings), len(keys))
    if pairs is None and labels is None:
        raise ShapeError("embeddings must be (n, dim) and labels (n,): without labels, give mined tuples.")
    if pairs is None and itself != (ref_labels is None):
        raise ShapeError("ref_emb and ref_labels belong together: give both or neither.")
    once = kind == "SupConLoss"
    unit = functools.partial(normalize, dim=-1) if distance is None else distance.maybe_normalize
    x = unit(embeddings)
    among = _Candidates(x, x if itself else unit(keys), itself, 1.0 / temperature, _score_of(distance), return_stats)
    if pairs is not None:
        losses, indices, stats = among.mined(pairs, once)
    else:
        assert labels is not None
        labels = labels.to(x.device)
        losses, indices, stats = among.labelled(labels, labels if ref_labels is None else ref_labels.to(x.device), once)
    loss = _reduced(losses, indices, once, reducer, embeddings, labels)
    return (loss, stats) if return_stats else loss


def _reduced(losses: Tensor, indices: Any, once: bool, reducer: Any, embeddings: Tensor, labels: Tensor | None) -> Any:
    """The mean over all pairs, over the anchors whose loss is not 0, or what the package's reducer makes of them."""
    found: dict[str, Any] = {"losses": losses, "indices": indices, "reduction_type": "element" if once else "pos_pair"}
    if not len(losses):
        found = {"losses": 0, "indices": None, "reduction_type": "already_reduced"}
    if reducer is not None:
        out = reducer({"loss": found}, embeddings, labels)
        return out.to(embeddings.dtype) if isinstance(out, Tensor) else out
    if not len(losses):
        return (0.0 * embeddings).sum()
    return (losses.sum() / (losses > 0).sum().clamp(min=1) if once else losses.mean()).to(embeddings.dtype)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Anchors and what they are compared with. Losses are one per anchor (`once`), or one per positive pair."""

    x: Tensor  # (n, dim)
    keys: Tensor  # (m, dim)
    itself: bool  # the keys are the anchors
    scale: float
    score: Score | None
    return_stats: bool

    def labelled(self, labels: Tensor, key_labels: Tensor, once: bool) -> tuple[Tensor, Any, LabelStats | None]:
        """Positives are all pairs of a label; negatives stream."""
        x, keys, scale, stats = self.x, self.keys, self.scale, None
        if once or self.return_stats:
            anchors = Anchors(x, scale, ALONE.check_same("pair_loss", (len(x), len(keys)), {}), self.score)
            reads = {"itself": self.itself, "stats": self.return_stats}
            rows, count, stats = label_rows(anchors, labels, keys, key_labels, **reads)
            if once:
                own = count.long().sum()
                compared = _compared(own, len(x) * (len(keys) - self.itself) - own)
                return torch.where(compared, rows, 0.0), torch.arange(len(x), device=x.device), stats
        order, others = sort_by_label(labels, key_labels)
        count = others.last - others.first
        far = Gibbs(x, keys[order], scale=scale, support=others, score=self.score).reduce(statistics=False).state
        # anchor a has the keys first_a, ..., last_a - 1 of its own label
        anchor = torch.repeat_interleave(torch.arange(len(x), device=x.device), count)
        key = order[others.first[anchor] + _place(count)]
        if self.itself:
            anchor, key = (t[key != anchor] for t in (anchor, key))
        each = -logsigmoid(self.scores(anchor, key) - far.log_partition()[anchor])
        found = torch.tensor(len(anchor), device=x.device)
        return torch.where(_compared(found, (len(keys) - count).sum()), each, 0.0), (anchor, key), stats

    def mined(self, pairs: tuple[Tensor, ...], once: bool) -> tuple[Tensor, Any, LabelStats | None]:
        """Of listed pairs: one score each, and one row of scores per anchor, as long as its longest list."""
        x, stats = self.x, None
        a, p, b, m = pairs
        nothing = not len(a) or not len(b) or max(len(a), len(b)) == 1
        if once:
            (a, p), (b, m) = _each_once(a, p, len(self.keys)), _each_once(b, m, len(self.keys))
        positive, negative = self.scores(a, p), self.scores(b, m)
        near, far = _state(positive, a, len(x)), _state(negative, b, len(x))
        indices: Any
        if once:
            whole = near.merge(far)
            mean = torch.zeros_like(near.mass).index_add(0, a, positive) / near.count.clamp(min=1)
            losses = torch.where(near.empty(), 0.0, torch.where(near.empty(), mean, whole.log_partition()) - mean)
            rows, indices = losses, torch.arange(len(x), device=x.device)
        else:
            losses, indices = -logsigmoid(positive - far.log_partition()[a]), (a, p)
            rows = torch.zeros_like(near.mass).index_add(0, a, losses.detach()) / near.count.clamp(min=1)
        if self.return_stats:
            with torch.no_grad():
                right = ~near.empty() & (near.peak >= far.peak)
                stats = label_stats(near.merge(far), far, right, rows.detach(), near.count, x, self.scale)
        return (losses[:0] if nothing else losses), indices, stats

    def scores(self, one: Tensor, other: Tensor) -> Tensor:
        """scale * score(x_i, key_j) of listed pairs; the vectors of a few are gathered at a time."""
        dtype = torch.promote_types(self.x.dtype, torch.float32)

        def few(i: Tensor, j: Tensor, left: Tensor, right: Tensor) -> Tensor:
            if self.score is None:
                return (left[i] * right[j]).sum(-1)
            with no_autocast(left):
                return self.score(left[i, None], right[j, None])[:, 0, 0]

        vectors = [self.x.to(dtype), self.keys.to(dtype)]
        return self.scale * in_row_blocks(few, [one, other], vectors, self.x.shape[-1])


def _compared(positive: Tensor, negative: Tensor) -> Tensor:
    """Whether there are positive pairs, negative pairs, and two of one kind: with less the loss is 0, as there."""
    return (positive > 0) & (negative > 0) & ((positive > 1) | (negative > 1))


def _place(count: Tensor) -> Tensor:
    """0, 1, ..., count_0 - 1, 0, 1, ..., count_1 - 1, ..."""
    first = torch.repeat_interleave(count.cumsum(0) - count, count)
    return torch.arange(len(first), device=count.device) - first


# ---- mined tuples --------------------------------------------------------------------------------------------------


def _pairs(given: Sequence[Tensor], n: int, m: int) -> tuple[Tensor, ...]:
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


def _each_once(one: Tensor, other: Tensor, width: int) -> tuple[Tensor, Tensor]:
    code = torch.unique(one * width + other)
    return code // width, code % width


def _state(score: Tensor, anchor: Tensor, n: int) -> State:
    """The sums of each anchor over its listed pairs."""
    anchor, order = anchor.sort(stable=True)
    count = torch.bincount(anchor, minlength=n)
    table = score.new_full((n, max(1, int(count.max()) if n else 1)), -torch.inf)
    return State.of(table.index_put((anchor, _place(count)), score[order]))
