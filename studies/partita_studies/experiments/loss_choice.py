"""Which loss for which trouble: clean labels, wrong labels, rare classes?

Expected: with clean labels focal and squared error are as accurate as cross entropy (to 0.01) and the absolute error
lags. With 40 % random labels, trained to the end, the absolute error beats cross entropy and focal loss is beaten by
it. With half of the classes 25 times rarer, inverse-frequency weights raise the recall of the rare ones, and squared
and absolute error lower it. Label smoothing costs calibration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from partita.lab.figure import Figure, Line, Panel
from partita.losses import cross_entropy, focal_loss, mae_loss, mse_loss
from partita_studies.experiment import Experiment, Interval, Row, Settings, Size, Verdict, grid, mean_by, paired
from partita_studies.experiments._claims import above, alike, below, weigh
from partita_studies.experiments._digits import NEEDS, fit, network, read_out, split
from partita_studies.experiments._series import note, only, series

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


def run(settings: Settings, seed: int) -> Iterable[Row]:
    data, model = split(seed), network(seed)
    x, y = trouble(data.x, data.y, float(settings["noise"]), float(settings["rarity"]), seed)
    fit(model, x, y, LOSSES[str(settings["loss"])], int(settings["steps"]))
    found, stats = read_out(model, data.x_test, data.y_test)
    recall = [stats.correct[data.y_test == c].float().mean().item() for c in range(10)]
    yield {
        **settings,
        "seed": seed,
        **found,
        "rare_recall": sum(recall[5:]) / 5,
        "common_recall": sum(recall[:5]) / 5,
        "worst_recall": min(recall),
        **{f"recall_{c}": value for c, value in enumerate(recall)},
    }


def _against(rows: list[Row], value: str, loss: str) -> Interval:
    return paired(rows, value, "loss", loss, "cross entropy")


def judge(rows: list[Row]) -> Verdict:
    most_noise, rarest = max(r["noise"] for r in rows), max(r["rarity"] for r in rows)
    clean, rare = only(rows, noise=0.0, rarity=1.0), only(rows, noise=0.0, rarity=rarest)
    noisy = only(rows, noise=most_noise, rarity=1.0)
    acc, hit = mean_by(noisy, "accuracy", "loss"), mean_by(rare, "rare_recall", "loss")
    plain, error = mean_by(clean, "accuracy", "loss"), mean_by(clean, "calibration_error", "loss")
    claims = [
        *(
            alike(f"clean labels: {name} is like cross entropy", _against(clean, "accuracy", name), SAME)
            for name in ("focal", "squared")
        ),
        below("clean labels: the absolute error lags", _against(clean, "accuracy", "absolute")),
        above("wrong labels: the absolute error wins", _against(noisy, "accuracy", "absolute")),
        below("wrong labels: focal loses", _against(noisy, "accuracy", "focal")),
        above("rare classes: weights help", _against(rare, "rare_recall", "weighted")),
        *(
            below(f"rare classes: {name} error harms", _against(rare, "rare_recall", name))
            for name in ("squared", "absolute")
        ),
        above("smoothing costs calibration", _against(clean, "calibration_error", "smoothed")),
    ]

    def table(found: dict[tuple[str, ...], Interval]) -> str:
        return ", ".join(f"{name} {found[name,].mean:.3f}" for name in LOSSES)

    says = (
        f"accuracy, clean: {table(plain)}; {most_noise:.0%} random labels: {table(acc)}; recall of classes {rarest:g} "
        f"times rarer: {table(hit)}; calibration error, clean: {table(error)}."
    )
    return weigh(claims, says)


def figure(rows: list[Row]) -> Figure:
    rarest = max(r["rarity"] for r in rows)
    noise, rarity = only(rows, rarity=1.0), only(rows, noise=0.0)
    shown = ("cross entropy", "focal", "squared", "absolute")

    def lines(found: list[Row], x: str, y: str, names: Iterable[str]) -> list[Line]:
        return [series(only(found, loss=name), name, x, y) for name in names]

    panels = [
        Panel("Wrong labels", "share of random labels", "held-out accuracy", lines(noise, "noise", "accuracy", shown)),
        Panel(
            "Wrong labels, calibration",
            "share of random labels",
            "expected calibration error",
            lines(noise, "noise", "calibration_error", (*shown, "smoothed")),
        ),
        Panel(
            "Rare classes",
            f"times rarer, up to {rarest:g}",
            "recall of classes 5 to 9",
            lines(rarity, "rarity", "rare_recall", (*shown, "weighted")),
            log_x=True,
        ),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


def _size(noise: Iterable[float], rarity: Iterable[float], steps: int, seeds: int, seconds: float) -> Size:
    """One trouble at a time."""
    settings = [*grid(loss=list(LOSSES), noise=list(noise), rarity=[1.0], steps=[steps])]
    settings += grid(loss=list(LOSSES), noise=[0.0], rarity=list(rarity), steps=[steps])
    return Size(settings, seeds, seconds)


EXPERIMENT = Experiment(
    name="loss_choice",
    question="Which loss for which trouble: clean labels, wrong labels, rare classes?",
    expected="Clean labels: no matter, but absolute error lags. Wrong labels: absolute error wins, focal loses. "
    "Rare classes: weights help, squared and absolute error harm. Smoothing costs calibration.",
    ids=("M-LOSS-1", "M-LOSS-5", "M-LOSS-7", "M-LOSS-8", "M-LOSS-9", "M-LOSS-10"),
    sizes={
        "tiny": _size([0.0, 0.4], [25.0], 15, 2, 0.05),
        "quick": _size([0.0, 0.2, 0.4], [5.0, 25.0], 150, 5, 0.25),
        "full": _size([0.0, 0.1, 0.2, 0.4, 0.6], [5.0, 10.0, 25.0, 50.0], 400, 20, 0.7),
    },
    run=run,
    judge=judge,
    figure=figure,
    needs=NEEDS,
)
