"""Is there an optimal entropy: has retrieval under known noise a best scale, and does theory find it?

m of n keys are relevant. Their scores are Gaussian around a margin, those of the others around 0, all with the same
standard deviation. Each relevant value is 1 plus noise, each other value is noise alone. The output should be 1.

    error(scale) = (1 - P)^2 + noise^2 S          P = sum of p over the relevant keys,  S = sum of p^2
    P ~ m a / (m a + n - m),   S ~ e^{(scale sd)^2} (m a^2 + n - m) / (m a + n - m)^2,        a = e^{scale margin}

A small scale averages what is irrelevant too, a large one trusts a single noisy key. Expected: the error has its least
value between the ends; the scale that is best in theory costs at most a tenth more than the one that is best in the
simulation; with noisier values the best entropy is higher (more averaging).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

import partita
from partita.lab.figure import Figure, Panel
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, interval
from partita_studies.experiments._claims import above, below, weigh
from partita_studies.experiments._series import note, only, series

MARGIN, DEVIATION = 2.0, 0.5
SCALES = [0.25 * k for k in range(33)]  # 0 to 8
NOISES = (0.3, 1.0, 3.0)
NEAR = 0.1  # so much more than the least error is as good


def predicted(scale: Tensor, n: int, m: int, noise: float) -> Tensor:
    """The error of the annealed theory: sums replaced by their means."""
    top = (scale * MARGIN).exp()
    whole = m * top + n - m
    spread = ((scale * DEVIATION) ** 2).exp() * (m * top**2 + n - m) / whole**2
    return (1 - m * top / whole) ** 2 + noise**2 * spread.clamp(max=1.0)


def run(settings: Settings, seed: int) -> Iterable[Row]:
    n, noise, trials = int(settings["n"]), float(settings["noise"]), int(settings["trials"])
    m = max(2, n // 16)
    source = torch.Generator().manual_seed(7919 * seed + n)
    scores = DEVIATION * torch.randn(trials, n, generator=source, dtype=torch.float64)
    scores[:, :m] += MARGIN
    values = noise * torch.randn(trials, n, generator=source, dtype=torch.float64)
    values[:, :m] += 1.0
    scales = torch.tensor(SCALES, dtype=torch.float64)
    theory = predicted(scales, n, m, noise)
    for scale, expected in zip(SCALES, theory.tolist(), strict=True):
        # one row per trial: its scores are inner products of a number with n numbers
        p = partita.Gibbs(torch.ones(trials, 1, 1, dtype=torch.float64), scores[..., None], scale=scale)
        out = p.expectation(values[..., None])[..., 0, 0]
        yield {
            "n": n,
            "noise": noise,
            "seed": seed,
            "scale": scale,
            "error": float((out - 1).square().mean()),
            "predicted": expected,
            "entropy": float(p.entropy().mean()),
        }


def _best(rows: list[Row], column: str) -> Row:
    return min(rows, key=lambda row: float(row[column]))


def judge(rows: list[Row]) -> Verdict:
    inside, costs = [], []
    entropies: dict[tuple[int, float], list[float]] = {}
    scales: dict[tuple[int, float], list[tuple[float, float]]] = {}
    cases = sorted({(row["n"], row["noise"]) for row in rows})
    for n, noise in cases:
        here = only(rows, n=n, noise=noise)
        for seed in sorted({row["seed"] for row in here}):
            own = only(here, seed=seed)
            best, guess = _best(own, "error"), _best(own, "predicted")
            ends = min(own[0]["error"], own[-1]["error"])
            inside.append(ends / best["error"])
            costs.append(guess["error"] / best["error"])
            entropies.setdefault((n, noise), []).append(best["entropy"])
            scales.setdefault((n, noise), []).append((best["scale"], guess["scale"]))
    longest = max(n for n, _ in cases)
    noises = sorted({noise for _, noise in cases})
    rise = interval(b - a for a, b in zip(entropies[longest, noises[0]], entropies[longest, noises[-1]], strict=True))
    cost = interval(costs)
    claims = [
        above("the best scale lies between the ends", interval(inside), 1.05),
        below("theory's scale is as good as the best", cost, 1 + NEAR),
        above("noisier values want more entropy", rise, 0.0),
    ]
    worst = max(costs)
    levels = ", ".join(
        f"{sum(entropies[longest, noise]) / len(entropies[longest, noise]):.2f} nats at noise {noise}"
        for noise in noises
    )
    pairs = ", ".join(
        f"{sum(a for a, _ in found) / len(found):.2f} and {sum(b for _, b in found) / len(found):.2f} at noise {noise}"
        for noise in noises
        for found in [scales[longest, noise]]
    )
    return weigh(
        claims,
        f"The better end errs {interval(inside)} times as much as the best scale; theory's scale errs {cost} times as "
        f"much (worst {worst:.2f}); best entropy at n = {longest} (log n = {math.log(longest):.2f}): {levels}; "
        f"best scale there and theory's: {pairs}.",
    )


def figure(rows: list[Row]) -> Figure:
    longest = max(row["n"] for row in rows)
    panels = []
    for noise in sorted({row["noise"] for row in rows}):
        here = only(rows, n=longest, noise=noise)
        lines = [series(here, "measured", "scale", "error"), series(here, "theory", "scale", "predicted", "theory")]
        panels.append(Panel(f"Is there a best scale at noise {noise}?", "scale", "squared error", lines, log_y=True))
    return Figure(EXPERIMENT.question, panels, note(rows) + f"; n = {longest}")


EXPERIMENT = Experiment(
    name="optimal_entropy",
    question="Is there an optimal entropy: has retrieval under known noise a best scale, and does theory find it?",
    expected="The error is least between the ends, theory's best scale costs at most a tenth more, and noisier values "
    "want a higher entropy.",
    ids=("M-ROB-2", "M-ENT-4", "M-SCL-12"),
    sizes={
        "tiny": Size(grid(n=[32, 128], noise=list(NOISES), trials=[64]), seeds=2, seconds=0.05),
        "quick": Size(grid(n=[64, 256, 1024], noise=list(NOISES), trials=[512]), seeds=4, seconds=0.6),
        "full": Size(grid(n=[64, 256, 1024, 4096], noise=list(NOISES), trials=[2048]), seeds=8, seconds=8.0),
    },
    run=run,
    judge=judge,
    figure=figure,
)
