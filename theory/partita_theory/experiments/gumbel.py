"""The temperature of Gumbel-softmax: how near to one-hot the sample, how biased and how noisy the gradient.

A loss f of the sample, with values c_i at the corners of the simplex; the exact gradient by the logits is that of
sum_i p_i c_i. Between the corners f is linear (<c, y>), quadratic (<c, y^2>) or cubic (<c, y^3>).

    relaxed            gradient of f(y)                        y = softmax((logits + g) / t)
    straight through   f' at one_hot(argmax y), times dy       the sample is a corner, the slope is not its own

Straight-through averages the slopes at both ends of an edge, which is exact for linear and quadratic f; a cubic one is
left with half the gradient too much.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Line, Panel
from partita_theory.geometry import softmax_vjp, total_variation
from partita_theory.results import Row, columns, lines, mean_by, only, slope
from partita_theory.selection import gumbel_noise, gumbel_softmax, straight_through
from partita_theory.verdict import Verdict, settle

POWERS = {"linear": 1, "quadratic": 2, "cubic": 3}
ESTIMATORS = ("relaxed", "straight-through")
UNBIASED = 0.1  # of the gradient's length, beyond twice the standard error
LOW = 0.1  # temperatures up to here count as the limit


def measure(seed: int, temperature: float, draws: int) -> Iterable[Row]:
    n = 8
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=source, dtype=torch.float64)
    cost = torch.randn(n, generator=source, dtype=torch.float64)
    p = torch.softmax(logits, -1)
    exact = softmax_vjp(p, cost)
    each = logits.expand(draws, n).clone().requires_grad_()
    y = gumbel_softmax(each, temperature, gumbel_noise(draws, n, generator=source))
    counts = torch.bincount(y.detach().argmax(-1), minlength=n) / draws
    common = {
        "largest": float(y.detach().amax(-1).mean()),
        "argmax_off": float(total_variation(counts.double(), p)),
        "argmax_error": float((p * (1 - p) / draws).sqrt().sum() / 2),  # expected size of that by chance alone
        "mean_off": float(total_variation(y.detach().mean(0), p)),
    }
    for shape, power in POWERS.items():
        for estimator in ESTIMATORS:
            sample = y if estimator == "relaxed" else straight_through(y)
            (grad,) = torch.autograd.grad((cost * sample**power).sum(), each, retain_graph=True)
            error = grad.mean(0) - exact
            variance = grad.var(0).sum()
            yield {
                **common,
                "shape": shape,
                "estimator": estimator,
                "bias": float(error.norm() / exact.norm()),
                # the length of the error that noise alone would leave
                "bias_error": float((variance / draws).sqrt() / exact.norm()),
                "along": float(grad.mean(0) @ exact / exact.square().sum()),
                "variance": float(variance / exact.square().sum()),
            }


def judge(rows: list[Row]) -> Verdict:
    law, chance = (
        max(v.mean for v in mean_by(rows, y, "temperature").values()) for y in ("argmax_off", "argmax_error")
    )
    mean, largest = (mean_by(rows, y, "temperature") for y in ("mean_off", "largest"))
    cold, warm = min(mean), max(mean)
    at = only(rows, temperature=cold)
    bias, noise, along = (mean_by(at, y, "shape", "estimator") for y in ("bias", "bias_error", "along"))
    clean = {key: bias[key].mean <= UNBIASED + 2 * noise[key].mean for key in bias}
    low = [r for r in only(rows, shape="linear", estimator="relaxed") if r["temperature"] <= LOW * 2]
    logs = torch.tensor([[t, value.mean] for t, value in mean_by(low, "variance", "temperature").items()]).log()
    growth = slope(*logs.T.tolist())
    parts = ", ".join(f"{key[0]} {key[1]} {bias[key]:.2f} (noise {noise[key]:.2f})" for key in bias)
    says = (
        f"Argmax off softmax(logits) by {law:.4f} in total variation at most (chance {chance:.4f}); mean of y off by "
        f"{mean[warm]:.3f} at t = {warm:g}, {mean[cold]:.4f} at {cold:g}; largest weight {largest[warm]:.2f} and "
        f"{largest[cold]:.3f}. Bias of the gradient at {cold:g}, of its length: {parts}. The cubic straight-through "
        f"gradient is {along['cubic', 'straight-through']:.2f} times the exact one along it; the variance goes like "
        f"t^{growth:.2f}."
    )
    limit = mean[cold].mean < mean[warm].mean / 5 and largest[cold].mean > 0.95
    agree = [f"{key[0]} {key[1]}" for key in clean if clean[key] == (key != ("cubic", "straight-through"))]
    within = f"the laws of the sample, and of the gradients: {', '.join(agree) or 'none'}"
    whole = len(agree) == len(clean) and -1.4 < growth < -0.6
    return settle(says, holds=law <= 3 * chance and limit, whole=whole, within=within)


def panels(rows: list[Row]) -> list[Panel]:
    x = "temperature"
    relaxed, through = (only(rows, estimator=estimator) for estimator in ESTIMATORS)

    def both(y: str) -> list[Line]:
        straight = lines(through, x, y, "shape", POWERS, "{}, straight")
        return straight + lines(relaxed, x, y, "shape", POWERS, "{}, relaxed", "context")

    one = only(relaxed, shape="linear")
    far = columns(one, x, {"mean of y": "mean_off", "argmax of y": "argmax_off"})
    far += columns(one, x, {"chance": "argmax_error"}, "theory")
    return [
        Panel("How near to one-hot", x, "largest weight", columns(one, x, {"mean": "largest"}), log_x=True),
        Panel("Distance from softmax(logits)", x, "total variation", far, log_x=True, log_y=True),
        Panel("Bias of the gradient", x, "of its length", both("bias"), log_x=True, log_y=True),
        Panel("Variance of the gradient", x, "of its length squared", both("variance"), log_x=True, log_y=True),
    ]


QUICK, FULL = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0], [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
EXPERIMENT = experiment(
    __name__,
    question="What does the temperature of Gumbel-softmax buy: how near to one-hot, how biased, how noisy a gradient?",
    expected="The argmax is exact at every t, the mean of y only as t -> 0; the variance of the gradient grows like "
    "1/t; the relaxed gradient loses its bias, straight-through only for losses up to quadratic.",
    ids=("M-SPA-2", "M-SPA-3", "M-GIB-3"),
    tiny=Size(grid(temperature=[0.1, 0.2, 1.0], draws=2000), seeds=2, seconds=0.05),
    quick=Size(grid(temperature=QUICK, draws=200_000), seeds=5, seconds=0.4),
    full=Size(grid(temperature=FULL, draws=1_000_000), seeds=20, seconds=3.5),
)
