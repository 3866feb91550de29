"""An attention matrix as a Markov operator: how do gap, rank and width move with the scale?

Expected: they move apart. At scale 0 every row is uniform: width n, effective rank 1, gap 1 (one step forgets). As the
scale rises the width falls to 1 while the rank rises, so "effective rank = exp(H)" is off by a large factor nearly
everywhere, in opposite directions at the two ends; the gap closes. What is true throughout: |lambda_2| <= Dobrushin's
coefficient and stable rank <= sum_i exp(-H2_i).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import torch

from partita import Gibbs
from partita.lab.figure import Figure, Line, Panel
from partita.theory.information import renyi_entropy
from partita.theory.spectrum import (
    dobrushin,
    effective_rank,
    spectral_gap,
    stable_rank,
    stable_rank_bound,
    von_neumann_entropy,
)
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by
from partita_studies.experiments._series import note, only, series

SHARPNESS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SLACK = 1e-7
FAR = 2.0  # a factor between width and rank that makes them different things


@torch.no_grad()
def run(settings: Settings, seed: int) -> Iterable[Row]:
    n, dim = int(settings["n"]), int(settings["dim"])
    source = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(n, dim, generator=source, dtype=torch.float64) for _ in range(2))
    for sharpness in SHARPNESS:
        scale = sharpness / math.sqrt(dim)
        law = Gibbs(query, key, scale=scale)
        matrix = law.probs()
        second = torch.linalg.eigvals(matrix).abs().sort(descending=True).values[1]
        gap = spectral_gap(law, steps=24, generator=torch.Generator().manual_seed(seed))
        collision = renyi_entropy(query, key, scale=scale)
        width = law.effective_width().mean()
        rank = effective_rank(matrix)
        yield {
            **settings,
            "seed": seed,
            "sharpness": sharpness,
            "width": float(width),
            "rank": float(rank),
            "factor": float(rank / width),
            "stable_rank": float(stable_rank(matrix)),
            "stable_bound": float(stable_rank_bound(collision)),
            "von_neumann": float(von_neumann_entropy(matrix)),
            "entropy": float(law.entropy().mean()),
            "gap": float(1 - second),
            "gap_streaming": float(gap),
            "dobrushin": float(dobrushin(matrix)),
            "second": float(second),
        }


def judge(rows: list[Row]) -> Verdict:
    shapes = list(dict.fromkeys((row["n"], row["dim"]) for row in rows))
    broken = sum(row["second"] > row["dobrushin"] + SLACK for row in rows)
    broken += sum(row["stable_rank"] > row["stable_bound"] * (1 + SLACK) for row in rows)
    monotone = True
    for n, dim in shapes:
        for seed in sorted({row["seed"] for row in rows}):
            own = sorted(only(rows, n=n, dim=dim, seed=seed), key=lambda row: float(row["sharpness"]))
            pairs = list(pairwise(own))
            monotone &= all(b["width"] <= a["width"] and b["rank"] >= a["rank"] - 1e-6 for a, b in pairs)
            monotone &= own[-1]["gap"] < own[0]["gap"]
    factor = mean_by(rows, "factor", "n", "dim", "sharpness")
    near = sorted({key[2] for key, value in factor.items() if 1 / FAR <= value.mean <= FAR})
    least, most = min(v.mean for v in factor.values()), max(v.mean for v in factor.values())
    streaming = max(abs(row["gap"] - row["gap_streaming"]) for row in rows)
    n, dim = shapes[-1]
    at = {
        name: mean_by(only(rows, n=n, dim=dim), name, "sharpness") for name in ("width", "rank", "gap", "stable_rank")
    }
    table = "; ".join(
        f"{s:g}: width {at['width'][s,].mean:.1f}, rank {at['rank'][s,].mean:.1f}, stable rank "
        f"{at['stable_rank'][s,].mean:.1f}, gap {at['gap'][s,].mean:.3f}"
        for s in (SHARPNESS[0], 1.0, 4.0, SHARPNESS[-1])
    )
    says = (
        f"n = {n}, dim = {dim}, by sharpness {table}. rank / exp(H) runs from "
        f"{least:.3f} to {most:.1f}; within a factor {FAR:g} only at sharpness "
        f"{', '.join(f'{s:g}' for s in near) or 'none'}. {broken} bounds broken in {len(rows)} matrices; the streamed "
        f"gap is off by at most {streaming:.1e}."
    )
    if broken or least > 1 / FAR or most < FAR:
        return Verdict("does not hold", says)
    if monotone:
        return Verdict("holds", says)
    return Verdict("holds within", says, "the two ends and the bounds; width, rank or gap is not monotone between them")


def figure(rows: list[Row]) -> Figure:
    n, dim = next(reversed(list(dict.fromkeys((row["n"], row["dim"]) for row in rows))))
    own = only(rows, n=n, dim=dim)
    x = "scale * sigma"
    panels = [
        Panel(
            f"Width and rank, n = {n}",
            x,
            "keys, directions",
            [
                series(own, "width exp(H)", "sharpness", "width"),
                series(own, "effective rank", "sharpness", "rank"),
                series(own, "stable rank", "sharpness", "stable_rank"),
                series(own, "its bound", "sharpness", "stable_bound", "theory"),
            ],
            log_x=True,
            log_y=True,
        ),
        Panel(
            "Second eigenvalue",
            x,
            "modulus",
            [
                series(own, "|lambda_2|", "sharpness", "second"),
                series(own, "Dobrushin", "sharpness", "dobrushin", "theory"),
            ],
            log_x=True,
        ),
        Panel(
            "Entropies",
            x,
            "nats",
            [series(own, "of a row", "sharpness", "entropy"), series(own, "von Neumann", "sharpness", "von_neumann")],
            log_x=True,
        ),
        Panel(
            "Rank against width",
            "width exp(H)",
            "effective rank",
            [
                Line("matrices", [r["width"] for r in own], [r["rank"] for r in own], kind="points"),
                Line("if they were equal", [1.0, float(n)], [1.0, float(n)], kind="theory"),
            ],
            log_x=True,
            log_y=True,
        ),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="spectra",
    question="An attention matrix as a Markov operator: how do gap, rank and width move with the scale?",
    expected="Apart: width falls from n to 1 while the rank rises from 1 and the gap closes, so rank = exp(H) is false "
    "at both ends; Dobrushin's bound and the bound on the stable rank always hold.",
    ids=("M-SPE-1", "M-SPE-2", "M-SPE-3", "M-SPE-4", "M-ENT-4"),
    sizes={
        "tiny": Size(grid(n=[24], dim=[16]), seeds=2, seconds=0.2),
        "quick": Size(grid(n=[64, 256], dim=[16, 64]), seeds=3, seconds=0.4),
        "full": Size(grid(n=[64, 256, 1024], dim=[4, 16, 64]), seeds=5, seconds=7.0),
    },
    run=run,
    judge=judge,
    figure=figure,
)
