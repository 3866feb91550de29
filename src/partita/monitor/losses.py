"""The output side: what a loss shows of its own distribution over classes or candidates.

Every number comes from the loss itself, called with return_stats=True after the call that the user made; a classifier
for `ROWS` evenly spaced rows at most. Numbers stay on the device until the step is over.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import partita
from partita.adapters.metric_learning import pair_loss
from partita.adapters.sentence_transformers import ranking_loss
from partita.contrastive import alignment, uniformity
from partita.monitor.measure import evenly
from partita.monitor.record import weighted_mean
from partita.nn.attention import picked_up

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
) -> Numbers:
    """F.cross_entropy and partita's, of logits that exist; targets 0, 1, 2, ... are read as a contrastive loss."""
    if isinstance(scale, Tensor) and scale.numel() > 1:  # one per row: multiplied in before rows are picked
        last = 1 if input.dim() > 1 else 0
        input, scale = (scale * input.movedim(last, -1)).movedim(-1, last), 1.0
    logits, chosen = _picked(input, target)
    classes = logits.shape[1]
    if chosen.is_floating_point():
        return _soft(partita.cross_entropy(logits, chosen, scale=scale, reduction="none", return_stats=True), classes)
    stats: Any = partita.cross_entropy(logits, chosen, ignore_index=ignore_index, scale=scale, return_stats=True)[1]
    out = _classified(stats, classes)
    n = target.numel()
    if input.dim() == 2 and 1 < n <= classes <= 4 * n and bool((target == torch.arange(n, device=target.device)).all()):
        rest = logits.scatter(1, chosen[:, None], -torch.inf)
        others: Any = partita.cross_entropy(rest, (chosen + 1) % classes, scale=scale, return_stats=True)[1]
        out |= _bound(out, stats.visible) | {
            "effective_negatives": others.entropy.exp().double().mean(),
            "positive_score": (stats.log_partition - stats.nll).double().mean(),
        }
    return out


def _picked(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A few rows of logits, classes in dimension 1 as torch has them, and their targets."""
    if input.dim() == 1:
        input, target = input[None], target[None]
    classes = input.shape[1]
    rows = _few(input.numel() // max(1, classes), classes, input.device)

    def pick(x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.index_select(0, rows)
        inner = math.prod(x.shape[2:])  # (N, C, d1, ...): the row of flat index r is at [n, :, rest]
        return x.flatten(2)[rows // inner, :, rows % inner]

    return pick(input), pick(target) if target.is_floating_point() else target.flatten().index_select(0, rows)


def _soft(found: Any, classes: int) -> Numbers:
    """Class probabilities for a target: no class is the right one, so there is nothing to calibrate."""
    rows, stats = found
    out = _classified(stats, classes) | {"loss": _mean(rows, rows.isfinite())}
    return {name: number for name, number in out.items() if name not in ("accuracy", "bins")}


def _classified(stats: Any, classes: int) -> Numbers:
    """Rows that were ignored see no class."""
    return _summary(stats, stats.visible > 0) | {"type": "classification", "classes": classes}


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
) -> Numbers:
    """partita.linear_cross_entropy, for some of its rows; row r predicts the target `shift` places on."""
    lead, classes, outputs = input.shape[:-1], linear_weight.shape[0], linear_weight.shape[1:-1]
    if shift:
        place = input.dim() - 2
        input, target = input[..., :-shift, :], target.narrow(place, shift, target.shape[place] - shift)
        lead = input.shape[:-1]
    n = math.prod(lead)
    rows = _few(n, classes * math.prod(outputs), input.device)
    query = input.reshape(n, input.shape[-1]).index_select(0, rows)
    goal = target.reshape(n, *target.shape[len(lead) :]).index_select(0, rows)
    if isinstance(scale, Tensor) and scale.dim():
        if shift and scale.shape[-1] == lead[-1] + shift:
            scale = scale[..., :-shift]
        scale = scale.expand(*lead, *outputs).reshape(n, *outputs).index_select(0, rows)
    found: Any = partita.linear_cross_entropy(
        query, linear_weight, goal, scale=scale, **options, reduction="none", return_stats=True
    )
    return _soft(found, classes) if goal.is_floating_point() else _classified(found[1], classes)


def classifier(loss: Callable[..., Any]) -> Callable[..., Numbers]:
    """Another loss of logits: its own value, and the cross entropy of the same rows for their distribution."""
    signature = inspect.signature(loss)

    def numbers(*args: Any, **options: Any) -> Numbers:
        given = signature.bind(*args, **options).arguments
        (first, input), (second, target) = list(given.items())[:2]
        index = given.get("ignore_index", -100)
        logits, chosen = _picked(input, target)
        rows = loss(**{**given, first: logits, second: chosen, "reduction": "none"})
        if given.get("on") == "logits":  # no softmax: a regression
            return value(rows)
        kept = rows.isfinite() if chosen.is_floating_point() else rows.isfinite() & (chosen != index)
        return cross_entropy(input, target, ignore_index=index) | {"loss": _mean(rows, kept)}

    return numbers


def contrastive(
    loss: Callable[..., Any], sides: Callable[..., Any] | None = None, *, as_returned: bool = False, **fixed: Any
) -> Callable[..., Numbers]:
    """A contrastive loss; `sides` gives its anchors and positives, `as_returned` records the loss as it is.

    With several positives for each anchor the loss is their mean, and an anchor without one is left out.
    """

    def numbers(*args: Any, **options: Any) -> Numbers:
        value, stats = loss(*args, **{**options, **fixed, "return_stats": True})
        out = _contrast(stats, stats.positives > 0 if hasattr(stats, "positives") else None)
        if as_returned and isinstance(value, Tensor) and not value.dim():  # a reducer gives anything
            out["loss"] = value.double()
        return out if sides is None else out | _sphere(*sides(*args, **options))

    return numbers


def first_two(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Anchors and positives where they are the first two arguments."""
    signature = inspect.signature(loss)
    return lambda *args, **options: list(signature.bind(*args, **options).arguments.values())[:2]


def _query_and_document(query: Tensor, documents: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return query, documents[0]


def sigmoid(image: Tensor, text: Tensor, *args: Any, **options: Any) -> Numbers:
    """SigLIP judges every pair by itself: there is no distribution, only the loss and how the vectors are spread."""
    rows = partita.siglip_loss(image, text, *args, **{**options, "reduction": "none"})
    query, key = (torch.linalg.vector_norm(x.double(), dim=-1).mean() for x in (image, text))
    about = {"candidates": len(text), "norm_query": query, "norm_key": key}
    return value(rows, "contrastive") | about | _sphere(image, text)


def value(loss: Tensor, kind: str = "value") -> Numbers:
    """A loss without a distribution over classes or candidates, as it was returned: the number, or the mean of rows."""
    good = loss.isfinite()
    return {"type": kind, "loss": _mean(loss, good), "rows": good.sum(), "nonfinite": (~good).sum()}


@dataclass(frozen=True)
class Face:
    """What the record calls a loss, and what reads its numbers off its arguments, or off what it returned."""

    name: str
    read: Callable[..., Numbers]
    returned: bool = False


_PAIRS = partita.info_nce_loss, partita.clip_loss, partita.nt_xent_loss
_RETURNED = (
    *(partita.attention_divergence, partita.distillation_loss, partita.linear_distillation_loss, partita.joint_loss),
    *(partita.gaussian_nll_loss, partita.laplace_nll_loss, partita.nce_loss),
)
FACES: dict[Callable[..., Any], Face] = {
    torch.nn.functional.cross_entropy: Face("cross_entropy", cross_entropy),
    partita.cross_entropy: Face("cross_entropy", cross_entropy),
    partita.linear_cross_entropy: Face("linear_cross_entropy", linear),
    **{f: Face(f.__name__, classifier(f)) for f in (partita.focal_loss, partita.brier_loss, partita.mae_loss)},
    **{f: Face(f.__name__, contrastive(f, first_two(f))) for f in _PAIRS},
    partita.supcon_loss: Face("supcon_loss", contrastive(partita.supcon_loss)),
    partita.siglip_loss: Face("siglip_loss", sigmoid),
    pair_loss: Face("pair_loss", contrastive(pair_loss, as_returned=True)),
    ranking_loss: Face("MultipleNegativesRankingLoss", contrastive(ranking_loss, _query_and_document, remember=None)),
    **{f: Face(f.__name__, value, returned=True) for f in _RETURNED},
    picked_up: Face("entropy_loss", functools.partial(value, kind="penalty"), returned=True),
}


def _few(count: int, width: int, device: torch.device) -> Tensor:
    wanted = max(1, min(count, ROWS, CELLS // max(1, width)))
    return evenly(count, wanted, 0.5, device)


def _mean(x: Tensor, counted: Tensor) -> Tensor:
    """Over the rows that count; NaN where none does."""
    return torch.where(counted, x.double(), 0.0).sum() / counted.sum()


def _summary(stats: Any, valid: Tensor) -> Numbers:
    """Means over the rows that count."""
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
    """How close pairs are and how spread out the rest, on the sphere, for at most `SPHERE` anchors."""
    few = evenly(len(anchor), min(len(anchor), SPHERE), 0.5, anchor.device)
    anchor, positive = anchor.index_select(0, few), positive.index_select(0, few)
    spread = uniformity(anchor).double() if len(anchor) > 1 else torch.tensor(math.nan)
    return {"alignment": alignment(anchor, positive).double(), "uniformity": spread}


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
