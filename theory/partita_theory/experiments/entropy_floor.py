"""The least entropy of cosine scores at temperature t, n keys: H_floor(n, 2/t), that of two-level rows (M-INF-2).

Keys that are +query and -query reach it; for many keys it is log n - D*(2/t), D* = 0.4745 at t = 1. Random directions
stay near log n - 1/(2 t^2 d) (M-INF-3), and Gaussian scores of the same size know no such floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

import partita
from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.information import entropy, entropy_floor, floor_gap
from partita_theory.results import Row, columns, distinct, lines, only, theory
from partita_theory.verdict import Verdict, settle

DIM = 16
ROUNDING = 1e-9
NEAR = 0.01  # nats: so near to the floor a descent has found it, and so near to it log n - D* is the floor


def measure(seed: int, n: int, temperature: float, steps: int) -> Iterable[Row]:
    t = temperature
    source = torch.Generator().manual_seed(1000 * seed + n)  # the same keys at every temperature

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    query = torch.nn.functional.normalize(randn(4, DIM), dim=-1)
    key = torch.nn.functional.normalize(randn(n, DIM), dim=-1)
    law = partita.Gibbs(query, key, scale=1 / t).entropy()
    yield {
        "log_n": math.log(n),
        "floor": float(entropy_floor(n, t)),
        "many_keys": math.log(n) - float(floor_gap(2 / t)),
        "random": float(law.mean()),
        "least": float(law.min()),
        "typical": math.log(n) - 1 / (2 * t * t * DIM),
        "poles": poles(query[0], n, t),
        "descent": descent(n, t, randn(8, n), steps) if n <= 64 else math.nan,
        "gaussian": float(entropy(randn(4, n) / t).mean()),
    }


def poles(query: torch.Tensor, n: int, t: float) -> float:
    """The entropy of the best row of k keys at +query and the others at -query, streamed."""
    w = 2 / t
    share = (w / -math.expm1(-w) - 1) / math.expm1(w)
    found = math.inf
    for k in {min(n, max(1, math.floor(n * share) + step)) for step in (0, 1)}:
        key = torch.where(torch.arange(n)[:, None] < k, query, -query)
        found = min(found, float(partita.Gibbs(query[None], key, scale=1 / t).entropy()))
    return found


def descent(n: int, t: float, start: torch.Tensor, steps: int) -> float:
    """The least entropy that a descent on scores in [-1, 1] finds from several starts."""
    # starts lean to one side or the other, so that different numbers of keys end on top; a sine reaches +1 and -1
    x = 0.5 * start + torch.linspace(-1.4, 0.6, len(start), dtype=torch.float64)[:, None]
    for step in range(steps):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (g,) = torch.autograd.grad(entropy(torch.sin(x) / t).sum(), x)
        x = x - 0.3 * (1 - step / steps) * g / g.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return float(entropy(torch.sin(x.detach()) / t).min())


def judge(rows: list[Row]) -> Verdict:
    below = max(row["floor"] - min(row["least"], row["poles"]) for row in rows)
    poles = max(abs(row["poles"] - row["floor"]) for row in rows)
    tried = [row for row in rows if math.isfinite(row["descent"])]
    beaten = max((row["floor"] - row["descent"] for row in tried), default=-math.inf)
    gaps: dict[tuple[int, float], float] = {}  # of the best start of any seed: a descent may end in a local minimum
    for row in tried:
        key = (row["n"], row["temperature"])
        gaps[key] = min(gaps.get(key, math.inf), row["descent"] - row["floor"])
    found = sum(gap <= NEAR for gap in gaps.values())
    many = sum(abs(row["many_keys"] - row["floor"]) <= NEAR for row in rows)
    free = sum(row["gaussian"] < row["floor"] for row in rows)
    gap = max((abs(row["log_n"] - row["floor"]) for row in only(rows, temperature=1)), default=math.nan)
    evidence = (
        f"no row is below its floor by more than {max(0.0, below):.0e} nats, no descent by more than "
        f"{max(0.0, beaten):.0e}; +query and -query keys are within {poles:.0e} of it, {found} of {len(gaps)} descents "
        f"within {NEAR}; log n - D* is the floor within {NEAR} in {many} of {len(rows)} rows (at t = 1 it is up to "
        f"{gap:.4f} below log n); Gaussian scores fall below it in {free} of {len(rows)}."
    )
    kept = below <= ROUNDING and beaten <= ROUNDING and poles <= 1e-8
    return settle(evidence, whole=kept and free > 0 and found >= 0.75 * len(gaps))


def panels(rows: list[Row]) -> list[Panel]:
    lengths, at = distinct(rows, "n"), distinct(rows, "temperature")
    short, long = only(rows, n=lengths[0]), only(rows, n=lengths[-1])
    x, y = "temperature", "entropy (nats)"
    drawn = {"random directions": "random", "Gaussian scores": "gaussian"}
    ends = [columns(own, x, drawn) + columns(own, x, {"floor": "floor"}, "theory") for own in (long, short)]
    ends[0].append(theory("log n", [at[0], at[-1]], math.log(lengths[-1])))
    tried = [row for row in short if math.isfinite(row["descent"])]
    ends[1] += columns(tried, x, {"descent on the keys": "descent"})
    floors = lines(rows, "n", "floor", "temperature", (1.0, 0.5, at[0]), "floor, t = {:g}")
    floors += columns(only(rows, temperature=1.0), "n", {"log n - 0.4745": "many_keys"}, "theory")
    return [
        Panel(f"Cosine scores, n = {lengths[-1]}", x, y, ends[0], log_x=True),
        Panel(f"Nothing goes below, n = {lengths[0]}", x, y, ends[1], log_x=True),
        Panel(f"The floor against length at temperatures {at[0]:g}, 0.5 and 1", "keys", y, floors, log_x=True),
    ]


AT = [0.05, 0.07, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0]
EXPERIMENT = experiment(
    __name__,
    question="How low can entropy fall when scores are bounded, and how low does it fall?",
    expected="Never below the floor of two-level rows; keys at +query and -query reach it; log n - 0.4745 at "
    "temperature 1; Gaussian scores fall below.",
    ids=("M-INF-1", "M-INF-2", "M-INF-3", "M-TMP-2", "M-INC-6"),
    tiny=Size(grid(n=[16, 256], temperature=[0.1, 0.3, 1.0], steps=50), seeds=2, seconds=0.05),
    quick=Size(grid(n=[16, 64, 1024, 65536], temperature=AT, steps=400), seeds=3, seconds=0.08),
    full=Size(grid(n=[16, 64, 256, 1024, 4096, 65536], temperature=AT, steps=3000), seeds=10, seconds=0.5),
)
