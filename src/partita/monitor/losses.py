"""The output side: what a loss says of its own distribution over classes or candidates.

Every number comes from the loss itself, asked with return_stats=True beside the call that the user made. A classifier
is asked about `ROWS` evenly spaced rows at most. Numbers stay on the device until the step is over.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import partita
from partita.adapters.metric_learning import pair_loss
from partita.adapters.sentence_transformers import ranking_loss
from partita.contrastive import alignment, uniformity
from partita.monitor.measure import evenly
from partita.monitor.merge import weighted_mean

ROWS = 1024
CELLS = 4_000_000  # logits looked at in one call
BINS = 10
SPHERE = 256  # vectors whose distances are looked at
Numbers = dict[str, Any]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    *_: Any,
    scale: Any = 1.0,
    **__: Any,
) -> Numbers | None:
    """F.cross_entropy and partita's, of logits that exist; targets 0, 1, 2, ... are read as a contrastive loss."""
    if target.is_floating_point():
        return None  # soft targets: there is no row that is right
    if input.dim() == 1:
        input, target = input[None], target[None]
    n, classes = target.numel(), input.shape[1]
    if isinstance(scale, Tensor) and scale.numel() > 1:  # one per row: multiplied in before rows are picked
        input, scale = (scale * input.movedim(1, -1)).movedim(-1, 1), 1.0
    rows = _few(n, classes, input.device)
    if input.dim() == 2:
        logits = input.index_select(0, rows)
    else:  # (N, C, d1, ...): the row of flat index r lies at [n, :, rest]
        inner = math.prod(target.shape[1:])
        logits = input.flatten(2)[rows // inner, :, rows % inner]
    chosen = target.flatten().index_select(0, rows)
    stats: Any = partita.cross_entropy(logits, chosen, ignore_index=ignore_index, scale=scale, return_stats=True)[1]
    out = _summary(stats, stats.visible > 0) | {"type": "classification", "classes": classes}
    diagonal = input.dim() == 2 and 1 < n <= classes <= 4 * n
    if diagonal and bool((target == torch.arange(n, device=target.device)).all()):
        rest = logits.scatter(1, chosen[:, None], -torch.inf)
        others: Any = partita.cross_entropy(rest, (chosen + 1) % classes, scale=scale, return_stats=True)[1]
        out |= _bound(out, stats.visible) | {
            "effective_negatives": others.entropy.exp().double().mean(),
            "positive_score": (stats.log_partition - stats.nll).double().mean(),
        }
    return out


def linear(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    shift: int = 0,
    scale: Any = 1.0,
    sample_weight: Any = None,
    reduction: str = "mean",
    return_stats: bool = False,
    **options: Any,
) -> Numbers | None:
    """partita.linear_cross_entropy, asked about some of its rows; row r predicts the target `shift` places on."""
    if target.is_floating_point():
        return None
    lead, outputs = input.shape[:-1], linear_weight.shape[1:-1]
    if shift:
        input, target = input[..., :-shift, :], target[..., shift:]
        lead = input.shape[:-1]
    n = math.prod(lead)
    rows = _few(n, linear_weight.shape[0] * math.prod(outputs), input.device)
    query = input.reshape(n, input.shape[-1]).index_select(0, rows)
    goal = target.reshape(n, *outputs).index_select(0, rows)
    if isinstance(scale, Tensor) and scale.dim():
        if shift and scale.shape[-1] == lead[-1] + shift:
            scale = scale[..., :-shift]
        scale = scale.expand(*lead, *outputs).reshape(n, *outputs).index_select(0, rows)
    stats: Any = partita.linear_cross_entropy(query, linear_weight, goal, scale=scale, return_stats=True, **options)[1]
    return _summary(stats, stats.visible > 0) | {"type": "classification", "classes": linear_weight.shape[0]}


def pairs(loss: Callable[..., Any]) -> Callable[..., Numbers]:
    """A contrastive loss of two sides, anchors and positives: the first two arguments."""
    signature = inspect.signature(loss)

    def numbers(*args: Any, **options: Any) -> Numbers:
        stats: Any = loss(*args, **{**options, "return_stats": True})[1]
        first, second, *_ = signature.bind(*args, **options).arguments.values()
        return _contrast(stats) | _sphere(first, second)

    return numbers


def supcon(*args: Any, **options: Any) -> Numbers:
    """Many positives: the loss is the mean over an anchor's positives; its negatives are the other labels."""
    stats: Any = partita.supcon_loss(*args, **{**options, "return_stats": True})[1]
    return _contrast(stats, stats.positives > 0)


def ranking(query: Tensor, docs: Any, *args: Any, **options: Any) -> Numbers:
    """The loss of the sentence-transformers adapter."""
    stats: Any = ranking_loss(query, docs, *args, **{**options, "remember": None, "return_stats": True})[1]
    return _contrast(stats) | _sphere(query, docs[0])


def mined(*args: Any, **options: Any) -> Numbers:
    """The losses of the pytorch-metric-learning adapter: statistics of the anchors, and the loss as it is."""
    loss, stats = pair_loss(*args, **{**options, "return_stats": True})
    named: Any = stats
    return _contrast(named, named.positives > 0) | {"loss": loss.double()}


def sigmoid(image: Tensor, text: Tensor, *args: Any, **options: Any) -> Numbers:
    """SigLIP asks about every pair by itself: there is no distribution, only the loss and where the vectors lie."""
    rows = partita.siglip_loss(image, text, *args, **{**options, "reduction": "none"})
    good = rows.isfinite()
    lengths = [torch.linalg.vector_norm(x.double(), dim=-1).mean() for x in (image, text)]
    return {
        "type": "contrastive",
        "loss": _mean(rows, good),
        "candidates": len(text),
        "norm_query": lengths[0],
        "norm_key": lengths[1],
        "rows": good.sum(),
        "nonfinite": (~good).sum(),
    } | _sphere(image, text)


def penalty(total: Tensor) -> Numbers:
    """The entropy penalties of all layers together: a number beside the losses, of no distribution."""
    return {"type": "penalty", "loss": total.double(), "rows": 1, "nonfinite": (~total.isfinite()).sum()}


FACES: dict[Callable[..., Any], tuple[str, Callable[..., Numbers | None]]] = {
    torch.nn.functional.cross_entropy: ("cross_entropy", cross_entropy),
    partita.cross_entropy: ("cross_entropy", cross_entropy),
    partita.linear_cross_entropy: ("linear_cross_entropy", linear),
    partita.info_nce_loss: ("info_nce_loss", pairs(partita.info_nce_loss)),
    partita.clip_loss: ("clip_loss", pairs(partita.clip_loss)),
    partita.nt_xent_loss: ("nt_xent_loss", pairs(partita.nt_xent_loss)),
    partita.supcon_loss: ("supcon_loss", supcon),
    partita.siglip_loss: ("siglip_loss", sigmoid),
    pair_loss: ("pair_loss", mined),
    ranking_loss: ("MultipleNegativesRankingLoss", ranking),
}


def _few(count: int, width: int, device: torch.device) -> Tensor:
    wanted = max(1, min(count, ROWS, CELLS // max(1, width)))
    return evenly(count, wanted, 0.5, device)


def _mean(x: Tensor, counted: Tensor) -> Tensor:
    """Over the rows that count; NaN where none does."""
    return torch.where(counted, x.double(), 0.0).sum() / counted.sum()


def _summary(stats: Any, valid: Tensor) -> Numbers:
    """Means over the rows that count; rows that were ignored see no class."""
    finite = torch.isfinite(stats.nll) & torch.isfinite(stats.entropy)
    good = valid & finite
    confidence, right = stats.confidence, stats.correct
    bin_ = (confidence.nan_to_num(0.0) * BINS).long().clamp(0, BINS - 1).flatten()
    columns = [torch.where(good, x.double(), 0.0).flatten() for x in (good, confidence, right)]
    return {
        "loss": _mean(stats.nll, good),
        "entropy": _mean(stats.entropy, good),
        "confidence": _mean(confidence, good),
        "accuracy": _mean(right, good),
        "log_partition": _mean(stats.log_partition, good),
        "max_score": torch.where(good, stats.max_score, -torch.inf).max() if good.numel() else torch.tensor(-torch.inf),
        "rows": good.sum(),
        "nonfinite": (valid & ~finite).sum(),
        "bins": torch.stack([torch.bincount(bin_, x, minlength=BINS) for x in columns]),
    }


def _bound(out: Numbers, candidates: Tensor) -> Numbers:
    """Mutual information is at least log N - loss, and the bound cannot exceed log N."""
    seen = candidates.double().mean()
    return {"type": "contrastive", "candidates": seen, "cap": seen.log(), "bound": seen.log() - out["loss"]}


def _contrast(stats: Any, valid: Tensor | None = None) -> Numbers:
    """Candidates, effective negatives, norms of the vectors in the scores; the bound where there is one positive."""
    valid = torch.ones_like(stats.nll, dtype=torch.bool) if valid is None else valid
    out = _summary(stats, valid)
    out |= {
        "type": "contrastive",
        "classes": None,
        "candidates": _mean(stats.negatives, valid) + 1,
        "effective_negatives": _mean(stats.effective_negatives, valid),
        "scale": _mean(stats.scale, valid),
        "norm_query": _mean(stats.query_norm, valid),
    }
    if hasattr(stats, "positive_similarity"):
        out |= _bound(out, stats.visible)
        score = stats.log_partition - stats.nll
        out |= {"positive_score": _mean(score, valid), "norm_key": _mean(stats.key_norm, valid)}
    return out


def _sphere(anchor: Tensor, positive: Tensor) -> Numbers:
    """How close pairs are and how far apart the rest, on the sphere, for at most `SPHERE` anchors."""
    few = evenly(len(anchor), min(len(anchor), SPHERE), 0.5, anchor.device)
    anchor, positive = anchor.index_select(0, few), positive.index_select(0, few)
    apart = uniformity(anchor).double() if len(anchor) > 1 else torch.tensor(math.nan)
    return {"alignment": alignment(anchor, positive).double(), "uniformity": apart}


def finish(numbers: list[Numbers], step: int, name: str) -> dict[str, Any]:
    """Several calls of one step -> one row; means are weighted by their rows."""
    out: dict[str, Any] = {"step": step, "name": name}
    weights = [float(n["rows"]) for n in numbers]
    total = sum(weights)
    for key in dict.fromkeys(k for n in numbers for k in n):
        values = [n.get(key) for n in numbers]
        if key == "bins":
            sums = sum(v for v in values if v is not None).tolist()
            out["bins"] = [[c, s / c if c else None, r / c if c else None] for c, s, r in zip(*sums, strict=True)]
            off = sum(abs(s - r) for _, s, r in zip(*sums, strict=True))
            out["calibration_error"] = off / total if total else None
        elif isinstance(values[0], str) or values[0] is None:
            out[key] = values[0]
        elif key in ("rows", "nonfinite"):
            out[key] = int(sum(float(v) for v in values if v is not None))
        elif key == "max_score":
            out[key] = max(float(v) for v in values if v is not None)
        else:
            out[key] = weighted_mean([math.nan if v is None else float(v) for v in values], weights)
    return out
