"""The loss that fits the noise: squared error under Gaussian noise, absolute error under Laplace noise.

    gaussian, laplace   noise that is drawn, of standard deviation 1, on the ten real features of 442 patients
    diabetes            what those patients' targets really were: residuals about as heavy as Gaussian ones
    pixels              a pixel of a photograph from its three neighbours: residuals heavier than Laplace ones

A linear model and one scale are fitted by `gaussian_nll_loss` and by `laplace_nll_loss` (M-LOSS-10). Where the noise is
drawn the truth is known, and `excess` is the mean squared distance of the prediction from it, by that of a
least-squares fit in theory, parameters / rows.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from partita.losses import gaussian_nll_loss, laplace_nll_loss
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._training import descend
from partita_theory.figure import Panel
from partita_theory.results import Row, interval, lines, only, paired
from partita_theory.verdict import Verdict, above, alike, below, weigh

LOSSES: dict[str, Callable[..., Tensor]] = {"squared": gaussian_nll_loss, "absolute": laplace_nll_loss}
DRAWN = {"gaussian": math.pi / 2, "laplace": 0.5}  # excess of the absolute error by that of the squared one, in theory
TRUE_SCALE = {("gaussian", "squared"): 1.0, ("laplace", "absolute"): 0.5**0.5}  # of noise of standard deviation 1
REAL = {"diabetes": "squared", "pixels": "absolute"}  # which loss should be the better likelihood
NEAR, CLOSE = 0.25, 0.1  # of the log of a ratio of excesses; of a scale, as a share of it
TEST = 140


class Data(NamedTuple):
    """Features with a column of ones, targets, and what the targets are without noise, if that is known."""

    x: Tensor
    y: Tensor
    clean: Tensor | None


@functools.cache
def _patients() -> Data:
    found = importlib.import_module("sklearn.datasets").load_diabetes()
    return _fitted(_features(torch.tensor(found.data)), torch.tensor(found.target).double())


@functools.cache
def _photograph() -> Data:
    pixels = importlib.import_module("sklearn.datasets").load_sample_image("china.jpg")
    grey = torch.tensor(pixels).double().mean(-1) / 255
    near = torch.stack([grey[1:, :-1], grey[:-1, 1:], grey[:-1, :-1]], -1).reshape(-1, 3)
    return _fitted(_features(near), grey[1:, 1:].reshape(-1))


def _features(x: Tensor) -> Tensor:
    """Uncorrelated features of variance 1, so that one learning rate suits them all, and a column of ones."""
    x = x.double() - x.double().mean(0)
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    return torch.cat([x @ vectors / values.sqrt(), torch.ones(len(x), 1, dtype=torch.float64)], 1)


def _fitted(x: Tensor, y: Tensor) -> Data:
    """Targets, and what least squares makes of them, in units of the residual; once, so that no bit of it varies."""
    fit = x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    unit = (y - fit).square().mean().sqrt()
    return Data(x, y / unit, fit / unit)


def draw(noise: str, seed: int) -> Data:
    """Rows in an order of the seed's own; real targets, or what least squares makes of them and drawn noise."""
    source = torch.Generator().manual_seed(seed)
    x, y, fit = _photograph() if noise == "pixels" else _patients()
    assert fit is not None
    order = torch.randperm(len(x), generator=source)[:2048]
    x, y, fit = x[order], y[order], fit[order]
    if noise in REAL:
        return Data(x, y, None)
    if noise == "gaussian":
        return Data(x, fit + torch.randn(len(x), generator=source, dtype=x.dtype), fit)
    u = torch.rand(len(x), generator=source, dtype=x.dtype) - 0.5
    return Data(x, fit - u.sign() * torch.log1p(-2 * u.abs()) * 0.5**0.5, fit)


def fit(x: Tensor, y: Tensor, loss: Callable[..., Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Weights and scale that minimise the loss, from zero weights and the targets' own deviation."""
    weight = torch.zeros(x.shape[1], dtype=x.dtype, requires_grad=True)
    level = y.std().log().clone().requires_grad_()
    optimizer = torch.optim.Adam([weight, level], lr=0.1)
    # an absolute error has a kink at its best, hence the falling rate
    list(descend(optimizer, steps, lambda: loss(x @ weight, y, level.exp()), lambda step: 0.1 * (1 - step / steps)))
    return weight.detach(), level.detach().exp()


def measure(seed: int, noise: str, n: int, steps: int) -> Iterable[Row]:
    data = draw(noise, seed)
    x, y = data.x[TEST:][:n], data.y[TEST:][:n]
    for name, loss in LOSSES.items():
        weight, scale = fit(x, y, loss, steps)
        row: Row = {"loss": name, "scale": scale.item()}
        row["nll"] = loss(data.x[:TEST] @ weight, data.y[:TEST], scale).item()
        if data.clean is not None:
            row["excess"] = float((data.x @ weight - data.clean).square().mean() * n / x.shape[1])
            row["log_excess"] = math.log(row["excess"])
        yield row


def judge(rows: list[Row]) -> Verdict:
    most = max(row["n"] for row in rows)
    rows = only(rows, n=most)
    claims, says = [], []
    for noise, theory in DRAWN.items():
        ratio = paired(only(rows, noise=noise), "log_excess", "loss", "absolute", "squared")
        side = above if theory > 1 else below
        claims.append(side(f"{noise} noise: the absolute error errs {'more' if theory > 1 else 'less'}", ratio))
        claims.append(alike(f"{noise} noise: as much as in theory", ratio - math.log(theory), NEAR))
        says.append(f"{noise} noise: excess of the absolute error {math.exp(ratio.mean):.2f} of the squared one's "
                    f"({math.exp(ratio.low):.2f} to {math.exp(ratio.high):.2f}; theory {theory:.2f})")  # fmt: skip
    for (noise, loss), true in TRUE_SCALE.items():
        scale = interval(row["scale"] / true for row in only(rows, noise=noise, loss=loss))
        claims.append(alike(f"the scale of {noise} noise is found", scale - 1.0, CLOSE))
        says.append(f"scale found {scale} of the true one")
    for noise, best in {"gaussian": "squared", "laplace": "absolute", **REAL}.items():
        other = "absolute" if best == "squared" else "squared"
        gain = paired(only(rows, noise=noise), "nll", "loss", other, best)
        claims.append(above(f"{noise}: the likelihood of the {best} error is the better one", gain))
        says.append(f"{noise}: nll of the other loss less that of the {best} error {gain}")
    return weigh(claims, f"{most} rows. " + "; ".join(says) + ".")


def panels(rows: list[Row]) -> list[Panel]:
    def drawn(noise: str, title: str, y: str, label: str) -> Panel:
        return Panel(title, "rows", label, lines(only(rows, noise=noise), "n", y, "loss", LOSSES), log_x=True)

    return [
        *(drawn(noise, f"Which loss errs less under {noise} noise?", "excess", "excess") for noise in DRAWN),
        *(drawn(noise, f"Which likelihood suits the {noise}?", "nll", "held-out nll") for noise in REAL),
    ]


NOISES = [*DRAWN, *REAL]
EXPERIMENT = experiment(
    __name__,
    question="Does the loss that fits the noise find more: squared error under Gaussian, absolute error under Laplace "
    "noise?",
    expected="Under Gaussian noise the absolute error errs pi/2 times as much as the squared one, under Laplace noise "
    "half as much; the learned scale is the noise's within a tenth; the likelihood of the right kind is better, on "
    "real noise too (Gaussian for patients, Laplace for pixels).",
    ids=("M-LOSS-10", "M-LOSS-4"),
    tiny=Size(grid(noise=NOISES, n=[40, 80], steps=20), seeds=2, seconds=0.05),
    quick=Size(grid(noise=NOISES, n=[100, 300], steps=300), seeds=8, seconds=0.4),
    full=Size(grid(noise=NOISES, n=[75, 150, 300], steps=500), seeds=24, seconds=0.7),
    needs=("sklearn", "PIL"),
)
