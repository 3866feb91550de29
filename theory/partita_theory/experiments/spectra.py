"""An attention matrix as a Markov operator: gap, rank and width as the scale moves.

At scale 0 every row is uniform: width n, effective rank 1, gap 1 (one step forgets). Throughout, |lambda_2| <=
Dobrushin's coefficient and stable rank <= sum_i exp(-H2_i).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import torch

from partita import Gibbs
from partita_theory import spectrum
from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.information import renyi_entropy
from partita_theory.results import Row, columns, distinct, mean_by, only, points, theory
from partita_theory.verdict import Verdict, settle

SHARPNESS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SLACK = 1e-7
FAR = 2.0  # a factor between width and rank that makes them different things


@torch.no_grad()
def measure(seed: int, n: int, dim: int) -> Iterable[Row]:
    source = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(n, dim, generator=source, dtype=torch.float64) for _ in range(2))
    for sharpness in SHARPNESS:
        scale = sharpness / math.sqrt(dim)
        law = Gibbs(query, key, scale=scale)
        matrix = law.probs()
        second = torch.linalg.eigvals(matrix).abs().sort(descending=True).values[1]
        gap = spectrum.spectral_gap(law, steps=24, generator=torch.Generator().manual_seed(seed))
        collision = renyi_entropy(query, key, scale=scale)
        width, rank = law.effective_width().mean(), spectrum.effective_rank(matrix)
        yield {
            "sharpness": sharpness,
            "width": float(width),
            "rank": float(rank),
            "factor": float(rank / width),
            "stable_rank": float(spectrum.stable_rank(matrix)),
            "stable_bound": float(spectrum.stable_rank_bound(collision)),
            "von_neumann": float(spectrum.von_neumann_entropy(matrix)),
            "entropy": float(law.entropy().mean()),
            "gap": float(1 - second),
            "gap_streaming": float(gap),
            "dobrushin": float(spectrum.dobrushin(matrix)),
            "second": float(second),
        }


def judge(rows: list[Row]) -> Verdict:
    shapes = list(dict.fromkeys((row["n"], row["dim"]) for row in rows))
    broken = sum(row["second"] > row["dobrushin"] + SLACK for row in rows)
    broken += sum(row["stable_rank"] > row["stable_bound"] * (1 + SLACK) for row in rows)
    monotone = True
    for n, dim in shapes:
        for seed in distinct(rows, "seed"):
            own = sorted(only(rows, n=n, dim=dim, seed=seed), key=lambda row: float(row["sharpness"]))
            pairs = list(pairwise(own))
            monotone &= all(b["width"] <= a["width"] and b["rank"] >= a["rank"] - 1e-6 for a, b in pairs)
            monotone &= own[-1]["gap"] < own[0]["gap"]
    factor = mean_by(rows, "factor", "n", "dim", "sharpness")
    near = sorted({key[2] for key, value in factor.items() if 1 / FAR <= value.mean <= FAR})
    least, most = min(v.mean for v in factor.values()), max(v.mean for v in factor.values())
    streaming = max(abs(row["gap"] - row["gap_streaming"]) for row in rows)
    n, dim = shapes[-1]
    width, rank, stable, gap = (
        mean_by(only(rows, n=n, dim=dim), y, "sharpness") for y in ("width", "rank", "stable_rank", "gap")
    )
    table = "; ".join(
        f"{s:g}: width {width[s]:.1f}, rank {rank[s]:.1f}, stable rank {stable[s]:.1f}, gap {gap[s]:.3f}"
        for s in (SHARPNESS[0], 1.0, 4.0, SHARPNESS[-1])
    )
    says = (
        f"n = {n}, dim = {dim}, by sharpness {table}. rank / exp(H) runs from "
        f"{least:.3f} to {most:.1f}; within a factor {FAR:g} only at sharpness "
        f"{', '.join(f'{s:g}' for s in near) or 'none'}. {broken} bounds broken in {len(rows)} matrices; the streamed "
        f"gap is off by at most {streaming:.1e}."
    )
    within = "the two ends and the bounds; width, rank or gap is not monotone between them"
    return settle(says, holds=not broken and least <= 1 / FAR and most >= FAR, whole=monotone, within=within)


def panels(rows: list[Row]) -> list[Panel]:
    n, dim = list(dict.fromkeys((row["n"], row["dim"]) for row in rows))[-1]
    own = only(rows, n=n, dim=dim)
    x, y = "scale * sigma", "sharpness"
    sizes = columns(own, y, {"width exp(H)": "width", "effective rank": "rank", "stable rank": "stable_rank"})
    sizes += columns(own, y, {"its bound": "stable_bound"}, "theory")
    second = columns(own, y, {"|lambda_2|": "second"}) + columns(own, y, {"Dobrushin": "dobrushin"}, "theory")
    entropies = columns(own, y, {"of a row": "entropy", "von Neumann": "von_neumann"})
    ranks = [points(own, "matrices", "width", "rank"), theory("if they were equal", [1.0, n], lambda width: width)]
    return [
        Panel(f"Width and rank, n = {n}", x, "keys, directions", sizes, log_x=True, log_y=True),
        Panel("Second eigenvalue", x, "modulus", second, log_x=True),
        Panel("Entropies", x, "nats", entropies, log_x=True),
        Panel("Rank against width", "width exp(H)", "effective rank", ranks, log_x=True, log_y=True),
    ]


EXPERIMENT = experiment(
    __name__,
    question="An attention matrix as a Markov operator: how do gap, rank and width move with the scale?",
    expected="Apart: width falls from n to 1 while the rank rises from 1 and the gap closes, so rank = exp(H) is false "
    "at both ends; Dobrushin's bound and the bound on the stable rank always hold.",
    ids=("M-SPE-1", "M-SPE-2", "M-SPE-3", "M-SPE-4", "M-ENT-4"),
    tiny=Size(grid(n=24, dim=16), seeds=2, seconds=0.2),
    quick=Size(grid(n=[64, 256], dim=[16, 64]), seeds=3, seconds=0.4),
    full=Size(grid(n=[64, 256, 1024], dim=[4, 16, 64]), seeds=5, seconds=7.0),
)
