"""Losses for clean labels, for labels of which a share is random, and for classes of which half are rarer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from partita.losses import cross_entropy, focal_loss, mae_loss, mse_loss
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._digits import NEEDS, fit, network, read_out, split
from partita_theory.figure import Panel
from partita_theory.results import Interval, Row, lines, mean_by, only, paired
from partita_theory.verdict import Verdict, above, alike, below, weigh

SAME = 0.01  # accuracies this near count as alike


def _weighted(z: Tensor, y: Tensor) -> Any:
    return cross_entropy(z, y, weight=1 / y.bincount(minlength=10).clamp(min=1))


LOSSES: dict[str, Callable[..., Any]] = {
    "cross entropy": cross_entropy,
    "smoothed": functools.partial(cross_entropy, label_smoothing=0.1),
    "weighted": _weighted,
    "focal": focal_loss,
    "squared": mse_loss,
    "absolute": mae_loss,
}


def trouble(x: Tensor, y: Tensor, noise: float, rarity: float, seed: int) -> tuple[Tensor, Tensor]:
    """A share `noise` of the labels replaced by random ones; classes 5 to 9 kept with probability 1 / rarity."""
    source = torch.Generator().manual_seed(seed)
    keep = torch.rand(len(y), generator=source) < torch.where(y < 5, 1.0, 1.0 / rarity)
    wrong = torch.rand(len(y), generator=source) < noise
    labels = torch.where(wrong, torch.randint(10, y.shape, generator=source), y)
    return x[keep], labels[keep]


def measure(seed: int, loss: str, noise: float, rarity: float, steps: int) -> Iterable[Row]:
    data, model = split(seed), network(seed)
    fit(model, *trouble(data.x, data.y, noise, rarity, seed), LOSSES[loss], steps)
    found, stats = read_out(model, data.x_test, data.y_test)
    recall = [stats.correct[data.y_test == c].float().mean().item() for c in range(10)]
    more = {"rare_recall": sum(recall[5:]) / 5, "common_recall": sum(recall[:5]) / 5, "worst_recall": min(recall)}
    yield {**found, **more, **{f"recall_{c}": value for c, value in enumerate(recall)}}


def judge(rows: list[Row]) -> Verdict:
    most_noise, rarest = max(r["noise"] for r in rows), max(r["rarity"] for r in rows)
    clean, rare = only(rows, noise=0.0, rarity=1.0), only(rows, noise=0.0, rarity=rarest)
    noisy = only(rows, noise=most_noise, rarity=1.0)

    def against(found: list[Row], value: str, loss: str) -> Interval:
        return paired(found, value, "loss", loss, "cross entropy")

    def table(found: list[Row], value: str) -> str:
        means = mean_by(found, value, "loss")
        return ", ".join(f"{name} {means[name]:.3f}" for name in LOSSES)

    claims = [
        alike("clean labels: focal is like cross entropy", against(clean, "accuracy", "focal"), SAME),
        alike("clean labels: squared is like cross entropy", against(clean, "accuracy", "squared"), SAME),
        below("clean labels: the absolute error lags", against(clean, "accuracy", "absolute")),
        above("wrong labels: the absolute error wins", against(noisy, "accuracy", "absolute")),
        below("wrong labels: focal loses", against(noisy, "accuracy", "focal")),
        above("rare classes: weights help", against(rare, "rare_recall", "weighted")),
        below("rare classes: squared error harms", against(rare, "rare_recall", "squared")),
        below("rare classes: absolute error harms", against(rare, "rare_recall", "absolute")),
        above("smoothing costs calibration", against(clean, "calibration_error", "smoothed")),
    ]
    says = (
        f"accuracy, clean: {table(clean, 'accuracy')}; {most_noise:.0%} random labels: {table(noisy, 'accuracy')}; "
        f"recall of classes {rarest:g} times rarer: {table(rare, 'rare_recall')}; calibration error, clean: "
        f"{table(clean, 'calibration_error')}."
    )
    return weigh(claims, says)


def panels(rows: list[Row]) -> list[Panel]:
    noise, rarity = only(rows, rarity=1.0), only(rows, noise=0.0)
    shown = ("cross entropy", "focal", "squared", "absolute")
    accuracy = lines(noise, "noise", "accuracy", "loss", shown)
    error = lines(noise, "noise", "calibration_error", "loss", (*shown, "smoothed"))
    recall = lines(rarity, "rarity", "rare_recall", "loss", (*shown, "weighted"))
    x, rare = "share of random labels", f"times rarer, up to {max(r['rarity'] for r in rows):g}"
    return [
        Panel("Wrong labels", x, "held-out accuracy", accuracy),
        Panel("Wrong labels, calibration", x, "expected calibration error", error),
        Panel("Rare classes", rare, "recall of classes 5 to 9", recall, log_x=True),
    ]


def _size(noise: list[float], rarity: list[float], steps: int, seeds: int, seconds: float) -> Size:
    """One trouble at a time."""
    names = list(LOSSES)
    settings = grid(loss=names, noise=noise, rarity=1.0, steps=steps)
    return Size(settings + grid(loss=names, noise=0.0, rarity=rarity, steps=steps), seeds, seconds)


EXPERIMENT = experiment(
    __name__,
    question="Which loss for which trouble: clean labels, wrong labels, rare classes?",
    expected="Clean labels: no matter, but absolute error lags. Wrong labels: absolute error wins, focal loses. "
    "Rare classes: weights help, squared and absolute error harm. Smoothing costs calibration.",
    ids=("M-LOSS-1", "M-LOSS-5", "M-LOSS-7", "M-LOSS-8", "M-LOSS-9", "M-LOSS-10"),
    tiny=_size([0.0, 0.4], [25.0], 15, 2, 0.05),
    quick=_size([0.0, 0.2, 0.4], [5.0, 25.0], 150, 5, 0.25),
    full=_size([0.0, 0.1, 0.2, 0.4, 0.6], [5.0, 10.0, 25.0, 50.0], 400, 20, 0.7),
    needs=NEEDS,
)
