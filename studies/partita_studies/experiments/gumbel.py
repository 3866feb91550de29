"""What does the temperature of Gumbel-softmax buy: how near to one-hot, how biased, how noisy a gradient?

A loss f of the sample, with values c_i at the corners of the simplex; the exact gradient by the logits is that of
sum_i p_i c_i. Between the corners f is linear (<c, y>), quadratic (<c, y^2>) or cubic (<c, y^3>).

    relaxed            gradient of f(y)                        y = softmax((logits + g) / t)
    straight through   f' at one_hot(argmax y), times dy       the sample is a corner, the slope is not its own

Expected: the argmax follows softmax(logits) at every t, the mean of y only as t -> 0. Near t = 0 samples are one-hot,
the variance of both gradients grows like 1/t, and the relaxed gradient loses its bias for every f. Straight-through
loses it for linear and quadratic f (averaging the slopes at both ends of an edge is exact there), but not for a cubic
one: it is left with half the gradient too much.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from partita.lab.figure import Figure, Line, Panel
from partita.theory.geometry import softmax_vjp, total_variation
from partita.theory.selection import gumbel_noise, gumbel_softmax, straight_through
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by
from partita_studies.experiments._series import note, only, series, slope

POWERS = {"linear": 1, "quadratic": 2, "cubic": 3}
ESTIMATORS = ("relaxed", "straight-through")
UNBIASED = 0.1  # of the gradient's length, beyond twice the standard error
LOW = 0.1  # temperatures up to here count as the limit


def run(settings: Settings, seed: int) -> Iterable[Row]:
    temperature, draws, n = float(settings["temperature"]), int(settings["draws"]), 8
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=source, dtype=torch.float64)
    cost = torch.randn(n, generator=source, dtype=torch.float64)
    p = torch.softmax(logits, -1)
    exact = softmax_vjp(p, cost)
    each = logits.expand(draws, n).clone().requires_grad_()
    y = gumbel_softmax(each, temperature, gumbel_noise(draws, n, generator=source))
    counts = torch.bincount(y.detach().argmax(-1), minlength=n) / draws
    common = {
        **settings,
        "seed": seed,
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
    cold = min(row["temperature"] for row in rows)
    warm = max(row["temperature"] for row in rows)
    law = max(value.mean for value in mean_by(rows, "argmax_off", "temperature").values())
    chance = max(value.mean for value in mean_by(rows, "argmax_error", "temperature").values())
    mean = mean_by(rows, "mean_off", "temperature")
    largest = mean_by(rows, "largest", "temperature")
    bias = mean_by(only(rows, temperature=cold), "bias", "shape", "estimator")
    noise = mean_by(only(rows, temperature=cold), "bias_error", "shape", "estimator")
    along = mean_by(only(rows, temperature=cold), "along", "shape", "estimator")
    clean = {key: bias[key].mean <= UNBIASED + 2 * noise[key].mean for key in bias}
    low = [r for r in only(rows, shape="linear", estimator="relaxed") if r["temperature"] <= LOW * 2]
    points = mean_by(low, "variance", "temperature")
    logs = torch.tensor([[key[0], value.mean] for key, value in points.items()]).log().tolist()
    growth = slope([a for a, _ in logs], [b for _, b in logs])
    parts = ", ".join(
        f"{shape} {estimator} {bias[shape, estimator].mean:.2f} (noise {noise[shape, estimator].mean:.2f})"
        for shape, estimator in bias
    )
    says = (
        f"Argmax off softmax(logits) by {law:.4f} in total variation at most (chance {chance:.4f}); mean of y off by "
        f"{mean[warm,].mean:.3f} at t = {warm:g}, {mean[cold,].mean:.4f} at {cold:g}; largest weight "
        f"{largest[warm,].mean:.2f} and {largest[cold,].mean:.3f}. Bias of the gradient at {cold:g}, of its length: "
        f"{parts}. The cubic straight-through gradient is {along['cubic', 'straight-through'].mean:.2f} times "
        f"the exact one along it; the variance goes like t^{growth:.2f}."
    )
    exact_law = law <= 3 * chance
    limit = mean[cold,].mean < mean[warm,].mean / 5 and largest[cold,].mean > 0.95
    expected = {key: key != ("cubic", "straight-through") for key in clean}
    if not (exact_law and limit):
        return Verdict("does not hold", says)
    if clean == expected and -1.4 < growth < -0.6:
        return Verdict("holds", says)
    agree = [f"{shape} {estimator}" for (shape, estimator), good in clean.items() if good == expected[shape, estimator]]
    return Verdict("holds within", says, f"the laws of the sample, and of the gradients: {', '.join(agree) or 'none'}")


def _of(rows: list[Row], shape: str, estimator: str) -> list[Row]:
    return only(rows, shape=shape, estimator=estimator)


def figure(rows: list[Row]) -> Figure:
    def lines(name: str) -> list[Line]:
        through = [series(_of(rows, s, "straight-through"), f"{s}, straight", "temperature", name) for s in POWERS]
        return through + [
            series(_of(rows, s, "relaxed"), f"{s}, relaxed", "temperature", name, "context") for s in POWERS
        ]

    one = only(rows, shape="linear", estimator="relaxed")
    panels = [
        Panel(
            "How near to one-hot",
            "temperature",
            "largest weight",
            [series(one, "mean", "temperature", "largest")],
            True,
        ),
        Panel(
            "Distance from softmax(logits)",
            "temperature",
            "total variation",
            [
                series(one, "mean of y", "temperature", "mean_off"),
                series(one, "argmax of y", "temperature", "argmax_off"),
                series(one, "chance", "temperature", "argmax_error", "theory"),
            ],
            log_x=True,
            log_y=True,
        ),
        Panel("Bias of the gradient", "temperature", "of its length", lines("bias"), log_x=True, log_y=True),
        Panel("Variance of the gradient", "temperature", "of its length squared", lines("variance"), True, True),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="gumbel",
    question="What does the temperature of Gumbel-softmax buy: how near to one-hot, how biased, how noisy a gradient?",
    expected="The argmax is exact at every t, the mean of y only as t -> 0; the variance of the gradient grows like "
    "1/t; the relaxed gradient loses its bias, straight-through only for losses up to quadratic.",
    ids=("M-SPA-2", "M-SPA-3", "M-GIB-3"),
    sizes={
        "tiny": Size(grid(temperature=[0.1, 0.2, 1.0], draws=[2000]), seeds=2, seconds=0.05),
        "quick": Size(grid(temperature=[0.05, 0.1, 0.2, 0.5, 1.0, 2.0], draws=[200_000]), seeds=5, seconds=0.4),
        "full": Size(
            grid(temperature=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0], draws=[1_000_000]), seeds=20, seconds=3.5
        ),
    },
    run=run,
    judge=judge,
    figure=figure,
)
