"""Squared error on the probabilities of a digits classifier, against cross entropy.

Two starts: a fresh network, and one that is surely wrong (trained first on the labels moved by one). Each loss may
choose its best learning rate, so that a smaller gradient alone is no handicap; it chooses on rows set aside for that,
and is judged by others.

That cross entropy is convex in the logits and squared error is not, that squared error keeps 2/10 of the gradient by
the logits at a fresh start and next to nothing at a surely wrong one, are closed forms: they are checked first, and if
one is off nothing else counts. To recover is an accuracy of 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.losses import cross_entropy, mse_loss
from partita_theory import geometry
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._digits import NEEDS, fit, network, read_out, split
from partita_theory.figure import Panel
from partita_theory.results import Interval, Row, distinct, lines, mean_by, only, paired
from partita_theory.verdict import Verdict, above, alike, below, weigh

LOSSES: dict[str, Callable[..., Any]] = {"cross entropy": cross_entropy, "squared error": mse_loss}
SAME = 0.01  # accuracies this near count as equal
FADED = 0.1  # attenuation below which a start counts as saturated
RECOVERED = 0.5  # held-out accuracy above which a network counts as having recovered


def measure(seed: int, loss: str, start: str, rate: float, steps: int) -> Iterable[Row]:
    data, model = split(seed), network(seed)
    if start == "wrong":
        fit(model, data.x, (data.y + 1) % 10, cross_entropy, 150)
    with torch.no_grad():
        logits = model(data.x).double()
    y = F.one_hot(data.y, 10).double()
    attenuation, hessian = 1.0, geometry.cross_entropy_hessian_logits(logits.softmax(-1))
    if loss == "squared error":
        hessian = geometry.softmax_squared_error_hessian(logits, y)
        attenuation = geometry.gradient_attenuation(logits, y).median().item()
    curvature = geometry.curvature_summary(hessian)
    at_start = {
        "gradient": _gradient(model, data.x, data.y, loss),
        "attenuation": attenuation,
        "smallest_curvature": curvature.smallest.min().item(),
        "convex_rows": curvature.convex.float().mean().item(),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    done = 0
    for step in (0, *sorted({steps // 16, steps // 8, steps // 4, steps // 2, steps})):
        fit(model, data.x, data.y, LOSSES[loss], step - done, optimizer)
        done = step
        found, _ = read_out(model, data.x_test, data.y_test)
        tuned, _ = read_out(model, data.x_tune, data.y_tune)
        # A rate too large for a loss may end in nan, which is no accuracy at all.
        nll = found["nll"] if math.isfinite(found["nll"]) else 1e9
        yield {**at_start, "step": step, "accuracy": found["accuracy"], "nll": nll, "tuned": tuned["accuracy"]}


def _gradient(model: torch.nn.Module, x: Tensor, y: Tensor, name: str) -> float:
    """Length of the gradient by all parameters."""
    grads = torch.autograd.grad(LOSSES[name](model(x), y), list(model.parameters()))
    return math.sqrt(sum(g.double().square().sum().item() for g in grads))


def best(rows: list[Row]) -> list[Row]:
    """The rows of each loss and start at the rate that ends best on average, on the rows set aside for choosing."""
    last = max(row["step"] for row in rows)
    ends = mean_by(only(rows, step=last), "tuned", "loss", "start", "rate")
    chosen: dict[tuple[str, str], tuple[float, float]] = {}
    for (loss, start, rate), value in ends.items():
        chosen[loss, start] = max(chosen.get((loss, start), (-1.0, 0.0)), (value.mean, rate))
    return [row for row in rows if chosen[row["loss"], row["start"]][1] == row["rate"]]


def _lead(rows: list[Row], start: str) -> Interval:
    return paired(only(rows, start=start), "accuracy", "loss", "cross entropy", "squared error")


def judge(rows: list[Row]) -> Verdict:
    last = max(row["step"] for row in rows)
    at, start = best(rows), only(rows, step=0)
    ends, early = only(at, step=last), only(at, step=distinct(rows, "step")[1])
    toll = mean_by(only(start, loss="squared error"), "attenuation", "start")
    curve = {loss: min(row["smallest_curvature"] for row in only(start, loss=loss)) for loss in LOSSES}
    slope, accuracy = mean_by(start, "gradient", "loss", "start"), mean_by(ends, "accuracy", "loss", "start")
    fresh, wrong, quick = _lead(ends, "fresh"), _lead(ends, "wrong"), _lead(early, "fresh")
    ratio = slope["squared error", "fresh"].mean / slope["cross entropy", "fresh"].mean
    says = (
        f"gradient by logits kept by squared error: {toll['fresh']:.3f} of it at a fresh start, {toll['wrong']:.1e} "
        f"(median row) when surely wrong; by all parameters at a fresh start {ratio:.3f} of cross entropy's. Smallest "
        f"curvature {curve['cross entropy']:.1e} against {curve['squared error']:.2f}. At each loss's best rate, "
        f"accuracy after {last} steps from fresh {accuracy['cross entropy', 'fresh']} against "
        f"{accuracy['squared error', 'fresh']} (lead {fresh}; after {early[0]['step']} steps {quick}), from surely "
        f"wrong {accuracy['cross entropy', 'wrong']} against {accuracy['squared error', 'wrong']} (lead {wrong})."
    )
    shape = curve["cross entropy"] > -1e-9 and curve["squared error"] < -0.01
    if not (shape and abs(toll["fresh"].mean - 0.2) < 0.02 and toll["wrong"].mean < FADED):
        return Verdict("does not hold", says + " Gradient or curvature are not what the closed forms say.")
    claims = [
        alike("a fresh start ends alike", fresh, SAME),
        above("from a surely wrong start cross entropy ends ahead", wrong),
        below("squared error does not recover", accuracy["squared error", "wrong"], RECOVERED),
    ]
    return weigh(claims, says)


def panels(rows: list[Row]) -> list[Panel]:
    at, last = best(rows), max(row["step"] for row in rows)
    x, y = "steps (each loss at its best rate)", "held-out accuracy"
    fresh, wrong = (lines(only(at, start=start), "step", "accuracy", "loss", LOSSES) for start in ("fresh", "wrong"))
    ends = [{**row, "from": f"{row['loss']}, {row['start']}"} for row in only(rows, step=last)]
    by_rate = lines(ends, "rate", "accuracy", "from", [f"{loss}, {s}" for loss in LOSSES for s in ("fresh", "wrong")])
    return [
        Panel("Fresh start", x, y, fresh),
        Panel("Surely wrong at the start", x, y, wrong),
        Panel(f"After {last} steps, by learning rate", "learning rate", y, by_rate, log_x=True),
    ]


_BOTH = {"loss": list(LOSSES), "start": ["fresh", "wrong"]}
EXPERIMENT = experiment(
    __name__,
    question="What does squared error on probabilities cost a classifier, against cross entropy?",
    expected="Nothing from a fresh start at its own best rate (0.01 in accuracy); from a surely wrong one "
    "cross entropy ends ahead and squared error does not recover.",
    ids=("M-LOSS-2", "M-LOSS-3", "M-LOSS-5", "M-LOSS-6", "M-DER-7"),
    tiny=Size(grid(**_BOTH, rate=0.3, steps=16), seeds=2, seconds=0.1),
    quick=Size(grid(**_BOTH, rate=[0.1, 0.3, 1.0, 3.0], steps=256), seeds=5, seconds=0.5),
    full=Size(grid(**_BOTH, rate=[0.03, 0.1, 0.3, 1.0, 3.0, 10.0], steps=1024), seeds=10, seconds=1.6),
    needs=NEEDS,
)
