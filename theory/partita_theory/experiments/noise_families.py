"""The closed forms of E[e^noise] and cv^2 for Gaussian, uniform and Laplace noise, against simulation (M-ROB-3).

Plain sampling stops being a check for Laplace noise at b = 1/2, where the variance of e^noise becomes infinite: its own
error estimate is then wrong, and its mean falls short; there the tail is sampled by importance. The typical error of a
spread-out row falls like n^-min(1/2, 1 - b), not at all for b >= 1 (M-ROB-4). Close to a change of regime (b = 1/2 and
b = 1) logarithms hide the power for any n that can be drawn, so that the fitted exponent may be further off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from partita_theory.experiment import Settings, Size, experiment
from partita_theory.figure import Panel
from partita_theory.results import Row, columns, distinct, lines, only, points, series, slope_by_seed, theory
from partita_theory.robustness import GaussianNoise, LaplaceNoise, Noise, UniformNoise, laplace_error_exponent
from partita_theory.verdict import Verdict, alike, fact, weigh

FAR = 4.5  # of some hundred comparisons none should be this many standard errors off
CHANGES, DISTANCE = (0.5, 1.0), 0.15  # b where the variance and the mean of e^noise cease to exist, and what is close
NEAR, ROUGH = 0.05, 0.15  # how near an exponent must be to its prediction, away from these and close to them
FAMILIES = {"gaussian": GaussianNoise, "uniform": UniformNoise, "laplace": LaplaceNoise}


def moment(noise: Noise, power: int, draws: int, source: torch.Generator) -> tuple[float, float]:
    """E[e^(power noise)] and its standard error; for Laplace noise by importance, so that the error is finite.

    The positive half of the law is drawn from an exponential of rate 3/4 of what e^(power x) leaves of its tail: the
    ratio of the densities is then bounded.
    """
    if not isinstance(noise, LaplaceNoise):
        return _mean(torch.exp(power * noise.sample(draws, generator=source)))
    left = 1 / noise.b - power
    x = -torch.rand(draws, generator=source, dtype=torch.float64).log() / (0.75 * left)
    above = torch.exp(-0.25 * left * x) / (0.75 * left) / (2 * noise.b)
    y = -noise.b * torch.rand(draws, generator=source, dtype=torch.float64).log()
    below = torch.exp(-power * y) / 2
    return _mean(above + below)


def _mean(x: Tensor) -> tuple[float, float]:
    return float(x.mean()), float(x.std()) / len(x) ** 0.5


def measure(seed: int, family: str, width: float, draws: int, rows: int, lengths: list[int]) -> Iterable[Row]:
    source = torch.Generator().manual_seed(1000 * seed + round(100 * width))
    noise: Noise = FAMILIES[family](width)
    row: Row = {"n": 0}
    if family != "laplace" or width < 1:
        exact = float(noise.exponential_moment())
        plain, plain_error = _mean(torch.exp(noise.sample(draws, generator=source)))
        first, first_error = moment(noise, 1, draws, source)
        row |= {"exact": exact, "plain": plain / exact, "plain_z": (plain - exact) / plain_error}
        row |= {"mean": first / exact, "mean_z": (first - exact) / first_error}
        if family != "laplace" or width < 0.5:
            second, second_error = moment(noise, 2, draws, source)
            found = second / first**2 - 1
            error = math.hypot(second_error / first**2, 2 * second * first_error / first**3)
            row |= {"cv2_exact": float(noise.cv2()), "cv2": found, "cv2_z": (found - float(noise.cv2())) / error}
    yield row
    for n in lengths:
        # uniform attention over values +1 and -1: the output is 0 without noise, its quartiles are its typical size
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(n // 2)
        out = torch.cat([torch.softmax(noise.sample(50, n, generator=source), -1) @ signs for _ in range(rows // 50)])
        low, high = torch.quantile(out, torch.tensor([0.25, 0.75], dtype=torch.float64))
        yield {"n": n, "spread": float(high - low), "log": math.log(float(high - low))}


def judge(rows: list[Row]) -> Verdict:
    moments = [row for row in rows if "exact" in row]
    scores = [abs(row[z]) for row in moments for z in ("mean_z", "cv2_z") if z in row]
    heavy = [row for row in moments if row["family"] == "laplace" and row["width"] >= 0.5]
    light = [abs(row["plain_z"]) for row in moments if row not in heavy]
    wrong = sum(abs(row["plain_z"]) > 3 for row in heavy)
    last = max((row["width"] for row in heavy), default=math.nan)
    short = sorted(row["plain"] for row in heavy if row["width"] == last)
    found, claims = [], [fact("the closed forms of all moments", max(scores) <= FAR and max(light) <= FAR)]
    for family, width in dict.fromkeys((row["family"], row["width"]) for row in rows):
        expected = laplace_error_exponent(width) if family == "laplace" else -0.5
        got = slope_by_seed([r for r in only(rows, family=family, width=width) if r["n"]], "n", "log")
        close = family == "laplace" and min(abs(width - at) for at in CHANGES) < DISTANCE
        claims.append(alike(f"the exponent of {family} {width:g}", got - expected, ROUGH if close else NEAR))
        if family == "laplace":
            found.append(f"{got.mean:.2f} +- {got.half:.2f} at b = {width:g} (expected {expected:.2f})")
    evidence = (
        f"{len(scores)} moments, the worst {max(scores):.1f} standard errors off; plain sampling: worst "
        f"{max(light):.1f} where the variance exists, beyond 3 in {wrong} of {len(heavy)} runs with b >= 1/2"
        + (f", {short[len(short) // 2]:.2f} of the true mean at b = {last:g}" if short else "")
        + f". Exponents of the typical error: {', '.join(found)}."
    )
    return weigh(claims, evidence)


def panels(rows: list[Row]) -> list[Panel]:
    laplace = only(rows, family="laplace")
    inside, drawn = [row for row in laplace if "exact" in row], [row for row in rows if row["n"]]
    widths = distinct(laplace, "width")
    chosen = sorted({widths[0], *widths[len(widths) // 2 :: 2][:2], widths[-1]})
    left = lines(only(drawn, family="laplace"), "n", "spread", "width", chosen, "b = {:g}")
    for family, width in (("gaussian", 0.5), ("uniform", 1.5)):
        left.append(series(only(drawn, family=family, width=width), family, "n", "spread", "context"))
    ratios = columns(inside, "width", {"by importance": "mean"})
    ratios += [
        points(inside, "plain sampling", "width", "plain"),
        theory("closed form", distinct(inside, "width"), 1.0),
    ]
    return [
        Panel("Laplace noise: simulated over exact mean of e^noise", "b", "ratio", ratios),
        Panel("What is left of the noise", "keys", "interquartile range", left, log_x=True, log_y=True),
    ]


def _settings(draws: int, rows: int, lengths: list[int], laplace: list[float]) -> list[Settings]:
    widths = {"gaussian": [0.25, 0.5, 0.8], "uniform": [0.5, 1.5, 4.0], "laplace": laplace}
    common = {"draws": draws, "rows": rows, "lengths": lengths}
    return [{"family": f, "width": w, **common} for f, ws in widths.items() for w in ws]


WIDTHS = [0.1, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.97, 1.2, 2.0]
EXPERIMENT = experiment(
    __name__,
    question="Do the closed forms for Gaussian, uniform and Laplace noise agree with simulation, up to b close to 1?",
    expected="Within the error of the simulation wherever they exist; plain sampling is no check for b >= 1/2; the "
    "typical error falls like n^-min(1/2, 1 - b), to 0.05 in the exponent (0.15 close to b = 1/2 and 1).",
    ids=("M-ROB-3", "M-ROB-4"),
    tiny=Size(_settings(4000, 100, [64, 512], [0.3, 0.7, 1.2]), seeds=2, seconds=0.02),
    quick=Size(_settings(400_000, 1000, [128, 512, 2048, 8192], WIDTHS), seeds=3, seconds=0.3),
    full=Size(_settings(4_000_000, 2000, [256, 1024, 4096, 16384, 65536], WIDTHS), seeds=8, seconds=4.0),
)
