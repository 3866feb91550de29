"""The output side: what a loss's distribution over classes or candidates looks like.

At most `ROWS` evenly spaced rows of a call are looked at. Numbers stay on the device until the step is over.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partita import Gibbs
from partita.contrastive import alignment, uniformity
from partita.monitor.probes import spread

ROWS = 1024
CELLS = 4_000_000  # scores looked at in one call
BINS = 10
SPHERE = 256  # vectors whose distances are looked at
Numbers = dict[str, Any]


def _few(count: int, width: int, device: torch.device) -> Tensor:
    wanted = max(1, min(count, ROWS, CELLS // max(1, width)))
    return spread(count, wanted, 0.5, device)


def _scores(scores: Tensor) -> Gibbs:
    """Finished scores as a distribution: they are the bias of an empty product."""
    zero = scores.new_zeros(1, 1)
    return Gibbs(zero.expand(scores.shape[0], 1), zero.expand(scores.shape[1], 1), bias=scores)


def _rows(scores: Tensor, target: Tensor, valid: Tensor) -> Numbers:
    """Statistics of explicit scores (rows, classes) with a target index each."""
    scores = scores.float()
    stats = _scores(scores).stats()
    nll = stats.log_partition - scores.gather(1, target[:, None])[:, 0]
    confidence = (stats.max_score - stats.log_partition).exp()
    right = (scores.argmax(1) == target).to(nll.dtype)
    return _summary(nll, stats.entropy, confidence, right, stats.log_partition, stats.max_score, valid)


def _summary(
    nll: Tensor, entropy: Tensor, confidence: Tensor, right: Tensor, log_z: Tensor, peak: Tensor, valid: Tensor
) -> Numbers:
    finite = torch.isfinite(nll) & torch.isfinite(entropy)
    good = valid & finite
    count = good.sum()

    def mean(x: Tensor) -> Tensor:
        return torch.where(good, x, 0.0).sum() / torch.where(count > 0, count, torch.nan)

    bin_ = (confidence.nan_to_num(0.0) * BINS).long().clamp(0, BINS - 1)
    bins = torch.stack(
        [
            torch.bincount(bin_, torch.where(good, x, 0.0).double(), minlength=BINS)
            for x in (good.double(), confidence.double(), right.double())
        ]
    )
    return {
        "loss": mean(nll),
        "entropy": mean(entropy),
        "confidence": mean(confidence),
        "accuracy": mean(right),
        "log_partition": mean(log_z),
        "max_score": torch.where(good, peak, -torch.inf).max(),
        "rows": count,
        "nonfinite": (valid & ~finite).sum(),
        "bins": bins,
    }


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    *_: Any,
    **__: Any,
) -> Numbers | None:
    """F.cross_entropy on explicit logits; targets equal to 0, 1, 2, ... are read as a contrastive loss."""
    if target.is_floating_point():
        return None  # soft targets: there is no row that is right
    if input.dim() == 1:
        input, target = input[None], target[None]
    classes = input.shape[1]
    rows = _few(target.numel(), classes, input.device)
    if input.dim() == 2:
        scores = input.index_select(0, rows)
    else:  # (N, C, d1, ...): the row of flat index r lies at [n, :, rest]
        inner = math.prod(target.shape[1:])
        scores = input.flatten(2)[rows // inner, :, rows % inner]
    chosen = target.flatten().index_select(0, rows)
    valid = chosen != ignore_index
    out = _rows(scores, chosen.clamp(0, classes - 1), valid)
    out |= {"type": "classification", "classes": classes}
    n = target.numel()
    if input.dim() == 2 and 1 < n <= classes <= 4 * n and bool((target == torch.arange(n, device=target.device)).all()):
        out |= _contrast(scores, chosen, out["loss"])
    return out


def linear(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    scale: Any = 1.0,
    softcap: float | None = None,
    **_: Any,
) -> Numbers:
    """partita.linear_cross_entropy: statistics without its logits."""
    flat, goal = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    rows = _few(goal.numel(), linear_weight.shape[0], input.device)
    query, goal = flat.index_select(0, rows), goal.index_select(0, rows)
    if isinstance(scale, Tensor) and scale.numel() > 1:
        scale = scale.reshape(-1).index_select(0, rows)
    valid = goal != ignore_index
    goal = goal.clamp(0, linear_weight.shape[0] - 1)
    bias = None if linear_bias is None else linear_bias[None]
    gibbs = Gibbs(query, linear_weight, scale=scale, bias=bias, softcap=softcap, cap_bias=softcap is not None)
    stats, nll = gibbs.stats(), gibbs.nll(goal)
    right = (gibbs.target_rank(goal) == 0).to(nll.dtype)
    confidence = (stats.max_score - stats.log_partition).exp()
    out = _summary(nll, stats.entropy, confidence, right, stats.log_partition, stats.max_score, valid)
    return out | {"type": "classification", "classes": linear_weight.shape[0]}


def _contrast(scores: Tensor, positive: Tensor, loss: Tensor) -> Numbers:
    """Candidates, effective negatives (the positive left out), and the bound log N - loss with its cap."""
    scores = scores.float()
    seen = (~scores.isneginf()).sum(1).double().mean()
    rest = scores.scatter(1, positive[:, None], -torch.inf)
    width = _scores(rest).effective_width()
    return {
        "type": "contrastive",
        "candidates": seen,
        "effective_negatives": width[torch.isfinite(width)].double().mean(),
        "cap": seen.log(),
        "bound": seen.log() - loss,
        "positive_score": scores.gather(1, positive[:, None]).double().mean(),
    }


def _sphere(anchor: Tensor, positive: Tensor) -> Numbers:
    """How close pairs are and how far apart the rest, on normalised vectors of at most `SPHERE` anchors."""
    few = spread(len(anchor), min(len(anchor), SPHERE), 0.5, anchor.device)
    anchor, positive = anchor.index_select(0, few), positive.index_select(0, few)
    apart = uniformity(anchor).double() if len(anchor) > 1 else torch.tensor(math.nan)
    return {"alignment": alignment(anchor, positive).double(), "uniformity": apart}


def _pairs(
    query: Tensor, key: Tensor, scale: Any, positive: Tensor, rows: Tensor, hidden: Tensor | None = None
) -> Numbers:
    """Scores of sampled anchors against all candidates, and the norms of both sides as they enter the scores."""
    query, key = query.float(), key.float()
    scores = query.index_select(0, rows) @ key.T * scale
    if hidden is not None:
        scores = scores.scatter(1, hidden[:, None], -torch.inf)
    out = _rows(scores, positive, torch.ones_like(positive, dtype=torch.bool))
    norms = {"norm_query": query.norm(dim=-1).mean(), "norm_key": key.norm(dim=-1).mean()}
    return (
        out
        | _contrast(scores, positive, out["loss"])
        | norms
        | _sphere(query.index_select(0, rows), key.index_select(0, positive))
        | {"scale": torch.as_tensor(scale, dtype=torch.float64), "classes": None}
    )


def info_nce(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    *,
    temperature: Any = 0.07,
    negative_mode: str = "unpaired",
    normalize: bool = True,
    **_: Any,
) -> Numbers:
    def side(x: Tensor) -> Tensor:
        return F.normalize(x.float(), dim=-1) if normalize else x.float()

    scale = 1.0 / temperature
    anchor, positive = side(query), side(positive_key)
    if negative_keys is None:
        rows = _few(len(anchor), len(positive), query.device)
        return _pairs(anchor, positive, scale, rows, rows)
    negative = side(negative_keys)
    count = negative.shape[-2]
    rows = _few(len(anchor), count + 1, query.device)
    anchor, positive = anchor.index_select(0, rows), positive.index_select(0, rows)
    other = (
        anchor @ negative.T
        if negative_mode == "unpaired"
        else (anchor[:, None] * negative.index_select(0, rows)).sum(-1)
    )
    scores = torch.cat([(anchor * positive).sum(-1, keepdim=True), other], 1) * scale
    zero = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    out = _rows(scores, zero, zero == 0)
    norms = {"norm_query": anchor.norm(dim=-1).mean(), "norm_key": positive.norm(dim=-1).mean()}
    norms |= _sphere(anchor, positive)
    return out | _contrast(scores, zero, out["loss"]) | norms | {"scale": torch.as_tensor(scale, dtype=torch.float64)}


def clip(image_features: Tensor, text_features: Tensor, logit_scale: Any, logit_bias: Any = None, **_: Any) -> Numbers:
    scale = logit_scale.detach().float() if isinstance(logit_scale, Tensor) else logit_scale
    rows = _few(len(image_features), len(text_features), image_features.device)
    return _pairs(
        image_features, text_features, scale, rows, rows
    )  # a bias shared by all candidates changes nothing here


def nt_xent(out0: Tensor, out1: Tensor, *, temperature: Any = 0.5, **_: Any) -> Numbers:
    both = F.normalize(torch.cat([out0, out1]).float(), dim=-1)
    rows = _few(len(both), len(both), both.device)
    return _pairs(both, both, 1.0 / temperature, (rows + len(out0)) % len(both), rows, hidden=rows)


def supcon(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: Any = 0.1,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    **_: Any,
) -> Numbers:
    """Many positives: the loss is the mean over an anchor's positives; its negatives are the other labels."""
    anchor = F.normalize(embeddings.float(), dim=-1)
    other = anchor if ref_emb is None else F.normalize(ref_emb.float(), dim=-1)
    kinds = labels if ref_labels is None else ref_labels
    rows = _few(len(anchor), len(other), anchor.device)
    scores = anchor.index_select(0, rows) @ other.T / temperature
    if ref_emb is None:
        scores = scores.scatter(1, rows[:, None], -torch.inf)
    same = labels.index_select(0, rows)[:, None] == kinds[None, :]
    positive = same & ~scores.isneginf()
    count = positive.sum(1)
    stats = _scores(scores).stats()
    mean = torch.where(positive, scores, 0.0).sum(1) / count.clamp(min=1)
    best = positive.gather(1, scores.argmax(1, keepdim=True))[:, 0].to(mean.dtype)
    out = _summary(
        stats.log_partition - mean,
        stats.entropy,
        (stats.max_score - stats.log_partition).exp(),
        best,
        stats.log_partition,
        stats.max_score,
        count > 0,
    )
    width = _scores(scores.masked_fill(same, -torch.inf)).effective_width()
    negatives = (~same & ~scores.isneginf()).sum(1).double().mean()
    scale = torch.as_tensor(1.0 / temperature, dtype=torch.float64)
    return out | {
        "type": "contrastive",
        "candidates": negatives + 1,
        "effective_negatives": width.double().mean(),
        "scale": scale,
        "norm_query": anchor.norm(dim=-1).mean(),
    }


def finish(numbers: list[Numbers], step: int, name: str) -> dict[str, Any]:
    """Several calls of one step -> one row; means are weighted by their rows."""
    out: dict[str, Any] = {"step": step, "name": name}
    weights = [float(n["rows"]) for n in numbers]
    total = sum(weights)
    for key in dict.fromkeys(k for n in numbers for k in n):
        values = [n.get(key) for n in numbers]
        if key == "bins":
            sums = sum(v for v in values if v is not None)
            out["bins"] = [
                [c, s / c if c else None, r / c if c else None] for c, s, r in zip(*sums.tolist(), strict=True)
            ]
            out["calibration_error"] = (
                sum(abs(s - r) for _, s, r in zip(*sums.tolist(), strict=True)) / total if total else None
            )
        elif isinstance(values[0], str) or values[0] is None:
            out[key] = values[0]
        elif key in ("rows", "nonfinite"):
            out[key] = int(sum(float(v) for v in values if v is not None))
        elif key == "max_score":
            out[key] = max(float(v) for v in values if v is not None)
        else:
            pairs = [
                (float(v), w)
                for v, w in zip(values, weights, strict=True)
                if v is not None and math.isfinite(float(v)) and w > 0
            ]
            out[key] = sum(v * w for v, w in pairs) / sum(w for _, w in pairs) if pairs else math.nan
    return out
