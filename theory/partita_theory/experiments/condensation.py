"""Gaussian scores from flat to frozen: scale * sigma up to three times the transition sqrt(2 log n).

Below it H = log n - (scale sigma)^2 / 2. Beyond, a few keys carry the row: its entropy follows the Poisson-Dirichlet
law psi(1) - psi(1 - m), m = b_n / (scale * sigma).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch

from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.information import entropy
from partita_theory.results import Row, columns, distinct, lines, mean_by, only, said, theory
from partita_theory.sharpness import condensation_sharpness as transition
from partita_theory.sharpness import condensed_entropy, extreme_location, frozen_index, gaussian_entropy
from partita_theory.verdict import Verdict, settle

NEAR = 0.10  # the law counts as true while its gap to log n is right to this fraction
FROZEN = 0.25  # the condensed law is asymptotic: so near to its entropy counts as agreement
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)


def measure(seed: int, n: int, draws: int) -> Iterable[Row]:
    source = torch.Generator().manual_seed(1000 * seed + n)
    scores = torch.randn(draws, n, generator=source, dtype=torch.float64)
    for ratio in RATIOS:
        sharpness = ratio * float(transition(n))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # to go where the law warns is the point here
            law, corrected = (float(gaussian_entropy(n, sharpness, finite=finite)) for finite in (False, True))
        measured = float(entropy(sharpness * scores).mean())
        row: Row = {"ratio": ratio, "sharpness": sharpness, "entropy": measured, "law": law}
        row["gap_ratio"] = (math.log(n) - measured) / (math.log(n) - law)
        if math.exp(sharpness**2) < n:  # each of these two exists on one side only
            row["corrected"] = corrected
        if sharpness > float(extreme_location(n)):
            row["frozen"] = float(condensed_entropy(frozen_index(n, sharpness)))
        yield row


def judge(rows: list[Row]) -> Verdict:
    ratios, lengths = distinct(rows, "ratio"), distinct(rows, "n")
    gap = mean_by(rows, "gap_ratio", "n", "ratio")
    reach = 0.0
    for ratio in ratios:
        if max(abs(gap[n, ratio].mean - 1) for n in lengths) > NEAR:
            break
        reach = ratio
    at = mean_by(rows, "entropy", "n", "ratio")
    means = mean_by([row for row in rows if row["ratio"] >= 2 and "frozen" in row], "frozen", "n", "ratio")
    off = max((abs(at[key].mean / value.mean - 1) for key, value in means.items()), default=math.inf)
    short, long = lengths[0], lengths[-1]
    growth = max((abs(at[long, r].mean - at[short, r].mean) for r in ratios if r >= 2), default=math.inf)
    some = {r: gap[long, r] for r in ratios if r in (0.5, 0.6, 0.8, 1.0, 2.0)}
    says = (
        f"the gap to log n is within {NEAR:.0%} of (scale sigma)^2/2 up to {reach:g} sqrt(2 log n); at n = {long} it "
        f"is {said(some, '{1:.3f} of it at {0:g}')}. Past twice the transition the condensed law is within {off:.0%}, "
        f"and H changes by at most {growth:.2f} nats between n = {short} and {long}."
    )
    settled = off <= FROZEN and growth <= 0.5
    within = f"scale * sigma <= {reach:g} sqrt(2 log n), n = {short} to {long}"
    return settle(says, holds=reach >= 0.3 and settled, whole=reach >= 1.0, within=within)


def panels(rows: list[Row]) -> list[Panel]:
    lengths, ratios = distinct(rows, "n"), distinct(rows, "ratio")
    x = "scale sigma / sqrt(2 log n)"
    gaps = [*lines(rows, "ratio", "gap_ratio", "n", lengths[-5:], "n = {}"), theory("the law", ratios, 1.0)]
    long = only(rows, n=lengths[-1])
    near = [row for row in long if row["ratio"] <= 1]
    far = [row for row in long if row["ratio"] >= 1.25 and "frozen" in row]
    entropies = columns(long, "ratio", {"measured": "entropy"})
    entropies += columns(near, "ratio", {"log n - (scale sigma)^2/2": "law"}, "theory")
    entropies += columns(far, "ratio", {"condensed": "frozen"}, "theory")
    return [
        Panel("How much of the predicted gap is there", x, "(log n - H) / predicted", gaps),
        Panel(f"Entropy at n = {lengths[-1]}", x, "entropy (nats)", entropies),
    ]


EXPERIMENT = experiment(
    __name__,
    question="How far does H = log n - (scale sigma)^2 / 2 reach for Gaussian scores, and what comes after it?",
    expected="True well below scale sigma = sqrt(2 log n), off by a few per cent at 0.6 of it, useless at it; beyond, "
    "a few keys carry the row and its entropy hardly knows n.",
    ids=("M-SCL-11", "M-SCL-12", "M-SCL-13", "M-INF-3"),
    tiny=Size(grid(n=[64, 512], draws=64), seeds=2, seconds=0.05),
    quick=Size(grid(n=[256, 4096, 65536], draws=64), seeds=5, seconds=0.7),
    full=Size(grid(n=[2**8, 2**12, 2**16], draws=64) + grid(n=2**20, draws=16), seeds=20, seconds=2.5),
)
