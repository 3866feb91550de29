"""Retrieval under known noise: the scale that is best in a simulation, and the one that theory finds.

m of n keys are relevant. Their scores are Gaussian around a margin, those of the others around 0, all with the same
standard deviation. Each relevant value is 1 plus noise, each other value is noise alone. The output should be 1.

    error(scale) = (1 - P)^2 + noise^2 S          P = sum of p over the relevant keys,  S = sum of p^2
    P ~ m a / (m a + n - m),   S ~ e^{(scale sd)^2} (m a^2 + n - m) / (m a + n - m)^2,        a = e^{scale margin}

A small scale averages what is irrelevant too, a large one trusts a single noisy key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

import partita
from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, columns, distinct, interval, mean_by, note, only, paired, said
from partita_theory.verdict import Verdict, above, below, weigh

MARGIN, DEVIATION = 2.0, 0.5
SCALES = [0.25 * k for k in range(33)]  # 0 to 8
NOISES = [0.3, 1.0, 3.0]
NEAR = 0.1  # so much more than the least error is as good


def predicted(scale: Tensor, n: int, m: int, noise: float) -> Tensor:
    """The error of the annealed theory: sums replaced by their means."""
    top = (scale * MARGIN).exp()
    whole = m * top + n - m
    spread = ((scale * DEVIATION) ** 2).exp() * (m * top**2 + n - m) / whole**2
    return (1 - m * top / whole) ** 2 + noise**2 * spread.clamp(max=1.0)


def measure(seed: int, n: int, noise: float, trials: int) -> Iterable[Row]:
    m = max(2, n // 16)
    source = torch.Generator().manual_seed(7919 * seed + n)
    scores = DEVIATION * torch.randn(trials, n, generator=source, dtype=torch.float64)
    scores[:, :m] += MARGIN
    values = noise * torch.randn(trials, n, generator=source, dtype=torch.float64)
    values[:, :m] += 1.0
    theory = predicted(torch.tensor(SCALES, dtype=torch.float64), n, m, noise)
    for scale, expected in zip(SCALES, theory.tolist(), strict=True):
        # one row per trial: its scores are inner products of a number with n numbers
        p = partita.Gibbs(torch.ones(trials, 1, 1, dtype=torch.float64), scores[..., None], scale=scale)
        error = float((p.expectation(values[..., None])[..., 0, 0] - 1).square().mean())
        yield {"scale": scale, "error": error, "predicted": expected, "entropy": float(p.entropy().mean())}


def best(own: list[Row]) -> Row:
    """Of the scales of one seed: the one that errs least, the one that theory would choose, and what they cost."""
    found, guess = (min(own, key=lambda row: float(row[column])) for column in ("error", "predicted"))
    ends = min(own[0]["error"], own[-1]["error"])
    return {**found, "ends": ends / found["error"], "cost": guess["error"] / found["error"], "guess": guess["scale"]}


def judge(rows: list[Row]) -> Verdict:
    runs: dict[tuple[int, float, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["n"], row["noise"], row["seed"])):
        runs.setdefault((row["n"], row["noise"], row["seed"]), []).append(row)
    found = [best(own) for own in runs.values()]
    longest, noises = max(row["n"] for row in rows), distinct(rows, "noise")
    last = only(found, n=longest)
    inside, cost = (interval(row[y] for row in found) for y in ("ends", "cost"))
    claims = [
        above("the best scale lies between the ends", inside, 1.05),
        below("theory's scale is as good as the best", cost, 1 + NEAR),
        above("noisier values want more entropy", paired(last, "entropy", "noise", noises[-1], noises[0]), 0.0),
    ]
    levels, scales, guesses = (mean_by(last, y, "noise") for y in ("entropy", "scale", "guess"))
    pairs = ", ".join(f"{scales[noise]:.2f} and {guesses[noise]:.2f} at noise {noise}" for noise in noises)
    return weigh(
        claims,
        f"The better end errs {inside} times as much as the best scale; theory's scale errs {cost} times as much "
        f"(worst {max(row['cost'] for row in found):.2f}); best entropy at n = {longest} (log n = "
        f"{math.log(longest):.2f}): {said(levels, '{1:.2f} nats at noise {0}')}; best scale there and "
        f"theory's: {pairs}.",
    )


def panels(rows: list[Row]) -> list[Panel]:
    last, found = only(rows, n=max(row["n"] for row in rows)), []
    for noise in distinct(rows, "noise"):
        here = only(last, noise=noise)
        lines = columns(here, "scale", {"measured": "error"})
        lines += columns(here, "scale", {"theory": "predicted"}, "theory")
        found.append(Panel(f"Is there a best scale at noise {noise}?", "scale", "squared error", lines, log_y=True))
    return found


EXPERIMENT = experiment(
    __name__,
    question="Is there an optimal entropy: has retrieval under known noise a best scale, and does theory find it?",
    expected="The error is least between the ends, theory's best scale costs at most a tenth more, and noisier values "
    "want a higher entropy.",
    ids=("M-ROB-2", "M-ENT-4", "M-SCL-12"),
    tiny=Size(grid(n=[32, 128], noise=NOISES, trials=64), seeds=2, seconds=0.05),
    quick=Size(grid(n=[64, 256, 1024], noise=NOISES, trials=512), seeds=4, seconds=0.6),
    full=Size(grid(n=[64, 256, 1024, 4096], noise=NOISES, trials=2048), seeds=8, seconds=8.0),
    note=lambda rows: f"{note(rows)}; n = {max(row['n'] for row in rows)}",
)
