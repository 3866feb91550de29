"""Does the bound read off a trained InfoNCE critic stay below the information that is known to be there?

Correlated Gaussians have -dim/2 log(1 - correlation^2) nats. A critic that can express their density ratio is trained
with `info_nce_loss` and read with N candidates, one positive and N - 1 independent ones.

Expected: log N - loss never exceeds the truth by more than its error, for any N; it sits at its ceiling log N where
the truth is larger, and near the truth where there is room above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from partita.contrastive import info_nce_loss
from partita.lab.figure import Figure, Line, Panel
from partita.theory.information import gaussian_information, mutual_information_bound
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, mean_by
from partita_studies.experiments._series import note, only, series

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

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = (torch.cat([z, z.square(), torch.ones(len(z), 1)], -1) for z in (x, y))
        loss = info_nce_loss(q @ self.query, k @ self.key, temperature=1.0, normalize=False)
        assert isinstance(loss, Tensor)
        return loss


def draw(n: int, dim: int, correlation: float, source: torch.Generator) -> tuple[Tensor, Tensor]:
    x, noise = torch.randn(2, n, dim, generator=source)
    return x, correlation * x + math.sqrt(1 - correlation**2) * noise


def run(settings: Settings, seed: int) -> Iterable[Row]:
    dim, correlation, steps = int(settings["dim"]), float(settings["correlation"]), int(settings["steps"])
    source = torch.Generator().manual_seed(seed)
    critic = Critic(dim)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.03)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / steps)
        loss = critic(*draw(256, dim, correlation, source))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    truth = gaussian_information(correlation, dim).item()
    n = 64
    while n <= settings["largest"]:
        # Rows of one batch share their candidates, so that batches, not rows, are independent.
        with torch.no_grad():
            count = max(int(settings["batches"]), int(settings["rows"]) // n)
            losses = torch.stack([critic(*draw(n, dim, correlation, source)) for _ in range(count)])
        bound = mutual_information_bound(losses, n)
        yield {
            **settings,
            "seed": seed,
            "n": n,
            "truth": truth,
            "cap": bound.cap.item(),
            "bound": bound.value.item(),
            "error": losses.std().item() / math.sqrt(count),
        }
        n *= 2 if settings["dense"] else 4


def judge(rows: list[Row]) -> Verdict:
    bound, error = mean_by(rows, "bound", "dim", "correlation", "n"), mean_by(rows, "error", "dim", "correlation", "n")
    truth, cap = mean_by(rows, "truth", "dim", "correlation", "n"), mean_by(rows, "cap", "dim", "correlation", "n")
    worst, above, at_cap, short, near = -math.inf, [], 0, [], []
    for key, value in bound.items():
        # Over seeds the errors are independent; their mean size over sqrt(seeds) is the error of the mean.
        spread = error[key].mean / math.sqrt(value.count)
        excess = (value.mean - min(truth[key].mean, cap[key].mean)) / max(spread, 1e-12)
        worst = max(worst, excess)
        if excess > ERRORS:
            above.append(key)
        if truth[key].mean > cap[key].mean + ROOM:
            if cap[key].mean - value.mean < SLACK:
                at_cap += 1
            else:
                short.append(key)
        elif cap[key].mean > truth[key].mean + ROOM:
            near.append(truth[key].mean - value.mean)
    says = (
        f"{len(bound)} settings: the largest excess over the truth is {worst:.1f} standard errors of the mean; "
        f"{at_cap} of {at_cap + len(short)} settings whose truth is {ROOM:g} nats beyond log N are within {SLACK} of "
        f"log N; with as much room above the truth it is {max(near, default=math.nan):.3f} nats short at most."
    )
    if above or not at_cap:
        return Verdict("does not hold", says + (f" Exceeded at (dim, correlation, N) = {above}." if above else ""))
    if short:
        return Verdict("holds within", says, f"never exceeded; saturation missing at (dim, correlation, N) = {short}")
    return Verdict("holds", says)


def figure(rows: list[Row]) -> Figure:
    cases = sorted({(row["truth"], row["dim"], row["correlation"]) for row in rows})
    lines, sizes = [], sorted({row["n"] for row in rows})
    for truth, dim, correlation in cases:
        label = f"{truth:.2f} nats"
        lines.append(series(only(rows, dim=dim, correlation=correlation), label, "n", "bound"))
        if truth < math.log(sizes[-1]) + 1:
            lines.append(Line(label, [sizes[0], sizes[-1]], [truth, truth], kind="theory"))
    lines.append(Line("log N", sizes, [math.log(n) for n in sizes], kind="theory"))
    panel = Panel("The bound, and what is there (dashed)", "candidates N", "nats", lines, log_x=True)
    return Figure(EXPERIMENT.question, [panel], note(rows))


def _size(cases: Iterable[tuple[int, float]], seeds: int, seconds: float, **numbers: int) -> Size:
    return Size([{"dim": dim, "correlation": rho, **numbers} for dim, rho in cases], seeds, seconds)


EXPERIMENT = Experiment(
    name="mutual_information",
    question="Does the bound read off a trained InfoNCE critic stay below the information that is there?",
    expected="It never exceeds the truth by more than its error, sits at log N where the truth is larger, and comes "
    "near the truth where log N leaves room.",
    ids=("M-INC-1", "M-INC-2", "M-RMK-5"),
    sizes={
        "tiny": _size([(1, 0.5), (12, 0.97)], 2, 0.4, steps=30, largest=256, batches=4, rows=512, dense=0),
        "quick": _size(CASES, 3, 2.5, steps=300, largest=4096, batches=8, rows=16384, dense=0),
        "full": _size(CASES, 10, 12.0, steps=600, largest=8192, batches=24, rows=65536, dense=1),
    },
    run=run,
    judge=judge,
    figure=figure,
)
