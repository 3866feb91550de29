"""How far does H = log n - (scale * sigma)^2 / 2 reach for Gaussian scores, and what comes after it?

Expected: the law holds well below the transition scale * sigma = sqrt(2 log n), the better the longer the row; it is
already off by a few per cent at 0.6 of it and useless at it. Beyond, a few keys carry the row: its entropy follows the
Poisson-Dirichlet law psi(1) - psi(1 - m), m = b_n / (scale * sigma), and hardly knows n.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch

from partita.lab.figure import Figure, Line, Panel
from partita.theory.information import entropy
from partita.theory.sharpness import (
    condensation_sharpness,
    condensed_entropy,
    extreme_location,
    frozen_index,
    gaussian_entropy,
)
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by
from partita_studies.experiments._series import note, only, series

NEAR = 0.10  # the law counts as true while its gap to log n is right to this fraction
FROZEN = 0.25  # the condensed law is asymptotic: so near to its entropy counts as agreement
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)


def run(settings: Settings, seed: int) -> Iterable[Row]:
    n, draws = int(settings["n"]), int(settings["draws"])
    source = torch.Generator().manual_seed(1000 * seed + n)
    scores = torch.randn(draws, n, generator=source, dtype=torch.float64)
    limit = float(condensation_sharpness(n))
    for ratio in RATIOS:
        sharpness = ratio * limit
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # to go where the law warns is the point here
            law, corrected = (float(gaussian_entropy(n, sharpness, finite=finite)) for finite in (False, True))
        measured = float(entropy(sharpness * scores).mean())
        row = {
            **settings,
            "seed": seed,
            "ratio": ratio,
            "sharpness": sharpness,
            "entropy": measured,
            "law": law,
            "gap_ratio": (math.log(n) - measured) / (math.log(n) - law),
        }
        if math.exp(sharpness**2) < n:  # each of these two exists on one side only
            row["corrected"] = corrected
        if sharpness > float(extreme_location(n)):
            row["frozen"] = float(condensed_entropy(frozen_index(n, sharpness)))
        yield row


def judge(rows: list[Row]) -> Verdict:
    ratios = sorted({row["ratio"] for row in rows})
    lengths = sorted({row["n"] for row in rows})
    gap = mean_by(rows, "gap_ratio", "n", "ratio")
    reach = 0.0
    for ratio in ratios:
        if max(abs(gap[n, ratio].mean - 1) for n in lengths) > NEAR:
            break
        reach = ratio
    at = mean_by(rows, "entropy", "n", "ratio")
    far = [row for row in rows if row["ratio"] >= 2 and "frozen" in row]
    means = mean_by(far, "frozen", "n", "ratio")
    off = max((abs(at[key].mean / value.mean - 1) for key, value in means.items()), default=math.inf)
    growth = max((abs(at[lengths[-1], r].mean - at[lengths[0], r].mean) for r in ratios if r >= 2), default=math.inf)
    long = lengths[-1]
    says = (
        f"the gap to log n is within {NEAR:.0%} of (scale sigma)^2/2 up to {reach:g} sqrt(2 log n); at n = {long} it "
        f"is {', '.join(f'{gap[long, r].mean:.3f} of it at {r:g}' for r in ratios if r in (0.5, 0.6, 0.8, 1.0, 2.0))}. "
        f"Past twice the transition the condensed law is within {off:.0%}, and H changes by at most {growth:.2f} nats "
        f"between n = {lengths[0]} and {long}."
    )
    settled = off <= FROZEN and growth <= 0.5
    if reach < 0.3 or not settled:
        return Verdict("does not hold", says)
    if reach >= 1.0:
        return Verdict("holds", says)
    return Verdict("holds within", says, f"scale * sigma <= {reach:g} sqrt(2 log n), n = {lengths[0]} to {long}")


def figure(rows: list[Row]) -> Figure:
    lengths = sorted({row["n"] for row in rows})
    ratios = sorted({row["ratio"] for row in rows})
    gaps = [series(only(rows, n=n), f"n = {n}", "ratio", "gap_ratio") for n in lengths[-5:]]
    long = only(rows, n=lengths[-1])
    laws = [
        series([r for r in long if r["ratio"] <= 1], "log n - (scale sigma)^2/2", "ratio", "law", "theory"),
        series([r for r in long if r["ratio"] >= 1.25 and "frozen" in r], "condensed", "ratio", "frozen", "theory"),
    ]
    panels = [
        Panel(
            "How much of the predicted gap is there",
            "scale sigma / sqrt(2 log n)",
            "(log n - H) / predicted",
            [*gaps, Line("the law", [ratios[0], ratios[-1]], [1.0, 1.0], kind="theory")],
        ),
        Panel(
            f"Entropy at n = {lengths[-1]}",
            "scale sigma / sqrt(2 log n)",
            "entropy (nats)",
            [series(long, "measured", "ratio", "entropy"), *laws],
        ),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="condensation",
    question="How far does H = log n - (scale sigma)^2 / 2 reach for Gaussian scores, and what comes after it?",
    expected="True well below scale sigma = sqrt(2 log n), off by a few per cent at 0.6 of it, useless at it; beyond, "
    "a few keys carry the row and its entropy hardly knows n.",
    ids=("M-SCL-11", "M-SCL-12", "M-SCL-13", "M-INF-3"),
    sizes={
        "tiny": Size(grid(n=[64, 512], draws=[64]), seeds=2, seconds=0.05),
        "quick": Size(grid(n=[256, 4096, 65536], draws=[64]), seeds=5, seconds=0.7),
        "full": Size(grid(n=[2**8, 2**12, 2**16], draws=[64]) + grid(n=[2**20], draws=[16]), seeds=20, seconds=2.5),
    },
    run=run,
    judge=judge,
    figure=figure,
)
