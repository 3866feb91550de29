"""The bound log N - loss, read off a trained InfoNCE critic, against information that is known.

Correlated Gaussians have -dim/2 log(1 - correlation^2) nats. A critic that can express their density ratio is trained
with `info_nce_loss` and read with N candidates, one positive and N - 1 independent ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from partita.contrastive import info_nce_loss
from partita_theory.experiment import Size, experiment, geometric
from partita_theory.experiments._training import descend
from partita_theory.figure import Panel
from partita_theory.information import gaussian_information, mutual_information_bound
from partita_theory.results import Row, distinct, mean_by, only, series, theory
from partita_theory.verdict import Verdict, settle

ERRORS = 3.0  # standard errors above the truth that count as exceeding it: there are some twenty comparisons
ROOM = 3.0  # nats by which the truth must exceed log N before the bound is expected to sit at log N
SLACK = 0.5  # nats below log N that count as sitting there (M-INC-2)
CASES = ((1, 0.5), (8, 0.6), (4, 0.8), (8, 0.95), (12, 0.97))  # 0.14, 1.79, 2.04, 9.31 and 16.99 nats


class Critic(torch.nn.Module):
    """<A f(x), B f(y)> with f = (x, x^2, 1): the log density ratio of Gaussians is among these."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        start = torch.diag(torch.tensor([0.5] * dim + [0.1] * dim + [1.0]))
        self.query, self.key = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())

    def forward(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        q, k = (torch.cat([z, z.square(), torch.ones(len(z), 1)], -1) for z in (x, y))
        return torch.as_tensor(info_nce_loss(q @ self.query, k @ self.key, temperature=1.0, normalize=False, **options))


def draw(n: int, dim: int, correlation: float, source: torch.Generator) -> tuple[Tensor, Tensor]:
    x, noise = torch.randn(2, n, dim, generator=source)
    return x, correlation * x + math.sqrt(1 - correlation**2) * noise


def measure(
    seed: int, dim: int, correlation: float, steps: int, largest: int, batches: int, rows: int, dense: int
) -> Iterable[Row]:
    source = torch.Generator().manual_seed(seed)
    critic = Critic(dim)

    def loss(n: int = 256) -> Tensor:
        found: Tensor = critic(*draw(n, dim, correlation, source))
        return found

    list(descend(torch.optim.Adam(critic.parameters()), steps, loss, lambda step: 0.03 * (1 - step / steps)))
    for n in geometric(64, largest, 2 if dense else 4):
        # Rows of one batch share their candidates, so that batches, not rows, are independent.
        count = max(batches, rows // n)
        with torch.no_grad():
            losses = torch.stack([loss(n) for _ in range(count)])
        bound = mutual_information_bound(losses, n)
        yield {
            "n": n,
            "truth": gaussian_information(correlation, dim).item(),
            "cap": bound.cap.item(),
            "bound": bound.value.item(),
            "error": losses.std().item() / math.sqrt(count),
        }


def judge(rows: list[Row]) -> Verdict:
    bound, error, truths, caps = (
        mean_by(rows, column, "dim", "correlation", "n") for column in ("bound", "error", "truth", "cap")
    )
    worst, over, at_cap, short, near = -math.inf, [], 0, [], []
    for key, value in bound.items():
        # Over seeds the errors are independent; their mean size over sqrt(seeds) is the error of the mean.
        spread = error[key].mean / math.sqrt(value.count)
        truth, cap = truths[key].mean, caps[key].mean
        excess = (value.mean - min(truth, cap)) / max(spread, 1e-12)
        worst = max(worst, excess)
        if excess > ERRORS:
            over.append(key)
        if truth > cap + ROOM:
            if cap - value.mean < SLACK:
                at_cap += 1
            else:
                short.append(key)
        elif cap > truth + ROOM:
            near.append(truth - value.mean)
    says = (
        f"{len(bound)} settings: the largest excess over the truth is {worst:.1f} standard errors of the mean; "
        f"{at_cap} of {at_cap + len(short)} settings whose truth is {ROOM:g} nats beyond log N are within {SLACK} of "
        f"log N; with as much room above the truth it is {max(near, default=math.nan):.3f} nats short at most."
    )
    if over:
        says += f" Exceeded at (dim, correlation, N) = {over}."
    within = f"never exceeded; saturation missing at (dim, correlation, N) = {short}"
    return settle(says, holds=not over and at_cap > 0, whole=not short, within=within)


def panels(rows: list[Row]) -> list[Panel]:
    lines, sizes = [], distinct(rows, "n")
    for truth, dim, correlation in sorted({(row["truth"], row["dim"], row["correlation"]) for row in rows}):
        label = f"{truth:.2f} nats"
        lines.append(series(only(rows, dim=dim, correlation=correlation), label, "n", "bound"))
        if truth < math.log(sizes[-1]) + 1:
            lines.append(theory(label, sizes, truth))
    lines.append(theory("log N", sizes, math.log))
    return [Panel("The bound, and what is there (dashed)", "candidates N", "nats", lines, log_x=True)]


def _size(cases: Iterable[tuple[int, float]], seeds: int, seconds: float, **numbers: int) -> Size:
    return Size([{"dim": dim, "correlation": rho, **numbers} for dim, rho in cases], seeds, seconds)


EXPERIMENT = experiment(
    __name__,
    question="Does the bound read off a trained InfoNCE critic stay below the information that is there?",
    expected="It never exceeds the truth by more than its error, sits at log N where the truth is larger, and comes "
    "near the truth where log N leaves room.",
    ids=("M-INC-1", "M-INC-2", "M-RMK-5"),
    tiny=_size([(1, 0.5), (12, 0.97)], 2, 0.4, steps=30, largest=256, batches=4, rows=512, dense=0),
    quick=_size(CASES, 3, 2.5, steps=300, largest=4096, batches=8, rows=16384, dense=0),
    full=_size(CASES, 10, 12.0, steps=600, largest=8192, batches=24, rows=65536, dense=1),
)
