"""Independent noise on the scores of a row, and what is left of it in the output of attention.

For rows whose weight is spread out the bias is -cv^2 sum p^2 (v - out), of order 1/n, and the standard deviation
cv sqrt(sum p^2 (v - out)^2), of order 1/sqrt(n) (M-ROB-2); what counts is n_eff = 1/sum p^2: two tied keys among many
never cancel. Noise that the whole row shares cancels exactly (M-ROB-5).

The bias is far below the fluctuation, so it is measured with a control variate: by the exact identity (M-ROB-1) the
linear part sum p w (v - out), w = e^noise / E[e^noise] - 1, has mean 0 and carries nearly all of the fluctuation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, distinct, lines, note, only, slope_by_seed
from partita_theory.robustness import GaussianNoise, noise_bias, noise_covariance
from partita_theory.verdict import Verdict, settle

NOISE = GaussianNoise(0.5)
SPREAD = ("grid", "random")  # rows whose weight is spread over many keys
CHUNK = 2**17  # numbers drawn at once
NEAR = 0.05  # a prediction so near to what is measured counts as right, an exponent so near as the order


def row_of(kind: str, n: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scores (n,) and values (n, 1); the values follow the scores, or there would be no bias to see."""
    if kind == "grid":
        s = torch.linspace(-1, 1, n, dtype=torch.float64)
        return s, s[:, None].clone()
    if kind == "random":
        s = 0.5 * torch.randn(n, generator=source, dtype=torch.float64)
        return s, (s + 0.25 * torch.randn(n, generator=source, dtype=torch.float64))[:, None]
    s, v = torch.full((n,), -40.0, dtype=torch.float64), torch.zeros(n, 1, dtype=torch.float64)
    s[:2], v[0], v[1] = 0.0, 1.0, -1.0
    return s, v


def measure(seed: int, row: str, n: int, budget: int) -> Iterable[Row]:
    source = torch.Generator().manual_seed(1000 * seed + n)
    s, v = row_of(row, n, source)
    p = torch.softmax(s, -1)
    out = p @ v
    moved, rest = [], []
    draws = min(budget // n, 50_000)
    size = max(1, min(draws, CHUNK // n))
    for _ in range(math.ceil(draws / size)):
        e = NOISE.sample(size, n, generator=source)
        change = torch.softmax(s + e, -1) @ v - out
        linear = (p * torch.expm1(e - NOISE.exponential_moment().log())) @ (v - out)
        moved.append(change)
        rest.append(change - linear)
    common = torch.softmax(s + NOISE.sample(8, 1, generator=source), -1) @ v - out
    change, bias = torch.cat(moved), torch.cat(rest)
    predicted = float(noise_bias(p, v, NOISE.cv2()))
    yield {
        "n_eff": float(1 / p.square().sum()),
        "bias": float(bias.mean()),
        "bias_error": float(bias.std() / len(bias) ** 0.5),
        "bias_size": abs(float(bias.mean())),
        "bias_predicted": predicted,
        "bias_predicted_size": abs(predicted),
        "sd": float(change.std()),
        "sd_error": float(change.std()) / (2 * len(change)) ** 0.5,
        "sd_predicted": float(noise_covariance(p, v, NOISE.cv2()).sqrt()),
        "common": float(common.abs().max()),
    }


def _off(rows: list[Row], name: str) -> float:
    """How far the prediction is from what is measured, less what two standard errors of the simulation explain."""
    measured, predicted = (sum(row[k] for row in rows) for k in (name, f"{name}_predicted"))
    error = math.sqrt(sum(row[f"{name}_error"] ** 2 for row in rows))
    return float(max(0.0, abs(measured - predicted) - 2 * error) / abs(predicted))


def judge(rows: list[Row]) -> Verdict:
    orders, off, lengths = {}, {}, distinct(rows, "n")
    for kind in SPREAD:
        long = [row for row in rows if row["row"] == kind and row["n"] >= 64]
        orders[kind] = [slope_by_seed(long, "n", name, log_y=True).mean for name in ("bias_size", "sd")]
        for n in lengths:
            here = only(rows, row=kind, n=n)
            off[kind, n] = max(_off(here, "bias"), _off(here, "sd"))
    tie = slope_by_seed(only(rows, row="tie"), "n", "sd", log_y=True).mean
    good = [n for n in lengths if all(off[kind, m] <= NEAR for kind in SPREAD for m in lengths if m >= n)]
    orders_said = "; ".join(f"{k}: bias n^{bias:.3f}, sd n^{sd:.3f}" for k, (bias, sd) in orders.items())
    common = max(row["common"] for row in rows)
    evidence = (
        f"{orders_said} (expected -1 and -0.5); leading order off by {max(off[k, lengths[0]] for k in SPREAD):.1%} at "
        f"n = {lengths[0]} and {max(off[k, lengths[-1]] for k in SPREAD):.1%} at {lengths[-1]}, beyond two standard "
        f"errors; two tied keys: sd n^{tie:.3f}; noise shared by the row moves the output by {common:.0e}."
    )
    right = all(abs(bias + 1) <= NEAR and abs(sd + 0.5) <= NEAR for bias, sd in orders.values())
    holds = right and bool(good) and abs(tie) <= NEAR and common < 1e-12
    within = f"n >= {good[0]} (leading order within {NEAR:.0%})" if good else ""
    return settle(evidence, holds=holds, whole=good == lengths, within=within)


def panels(rows: list[Row]) -> list[Panel]:
    bias, sd = [], lines(rows, "n", "sd", "row", SPREAD) + lines(rows, "n", "sd", "row", ["tie"], "two tied keys")
    for kind in SPREAD:
        bias += lines(rows, "n", "bias_size", "row", [kind])
        bias += lines(rows, "n", "bias_predicted_size", "row", [kind], kind="theory")
    sd += lines(rows, "n", "sd_predicted", "row", SPREAD, kind="theory")
    title = "The fluctuation falls like 1/sqrt(n)"
    return [
        Panel("The bias falls like 1/n", "keys", "size of the bias", bias, log_x=True, log_y=True),
        Panel(title, "keys", "standard deviation", sd, log_x=True, log_y=True),
    ]


ROWS = [*SPREAD, "tie"]
EXPERIMENT = experiment(
    __name__,
    question="How fast does independent noise on the scores cancel in the output of attention?",
    expected="Bias of order 1/n and standard deviation of order 1/sqrt(n) with the predicted factors for spread-out "
    "rows; no cancellation for two tied keys, whatever n.",
    ids=("M-ROB-1", "M-ROB-2", "M-ROB-5", "M-ENT-4"),
    tiny=Size(grid(row=ROWS, n=[16, 64, 256], budget=2**17), seeds=2, seconds=0.02),
    quick=Size(grid(row=ROWS, n=[16, 64, 256, 1024, 4096], budget=2**23), seeds=4, seconds=0.25),
    full=Size(grid(row=ROWS, n=[4**k for k in range(2, 9)], budget=2**27), seeds=8, seconds=2.5),
    note=lambda rows: note(rows) + "; dashed: leading order",
)
