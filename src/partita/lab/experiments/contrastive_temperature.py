"""What does the temperature do in contrastive training on real sentence pairs?

A small encoder learns which verse of one translation belongs to which of another, at one fixed temperature. It is
read on held-out pairs, before and after, at the temperature it was trained with.

Expected: the lower the temperature, the larger the share of the hardest negative and the fewer negatives push at all
(exp H). Retrieval is best in between: a temperature near 1 leaves the embeddings crowded (a uniformity near 0,
positives hardly closer than negatives), a very low one looks at one negative at a time and learns worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from partita.contrastive import ContrastStats, alignment, info_nce_loss, uniformity
from partita.lab.experiment import Experiment, Interval, Row, Settings, Size, Verdict, grid, mean_by, paired
from partita.lab.experiments._series import note, only, series
from partita.lab.experiments._verses import NEEDS, Encoder, pairs, take
from partita.lab.figure import Figure, Line, Panel
from partita.metrics import top_k_accuracy


def run(settings: Settings, seed: int) -> Iterable[Row]:
    temperature, batch = float(settings["temperature"]), int(settings["batch"])
    source = torch.Generator().manual_seed(seed)
    left, right = pairs()
    order = torch.randperm(len(left.ends), generator=source)
    test, train = order[: int(settings["test"])], order[int(settings["test"]) :]
    torch.manual_seed(seed)
    model = Encoder(int(settings["width"]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    yield {**settings, "seed": seed, "when": "before", **measure(model, test, temperature)}
    for _ in range(int(settings["steps"])):
        picked = train[torch.randint(len(train), (batch,), generator=source)]
        q, k = model(take(left, picked)), model(take(right, picked))
        loss = info_nce_loss(q, k, temperature=temperature, symmetric=True)
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    yield {**settings, "seed": seed, "when": "after", **measure(model, test, temperature)}


@torch.no_grad()
def measure(model: Encoder, which: Tensor, temperature: float) -> dict[str, float]:
    """What the held-out pairs say; recall and the geometry do not depend on the temperature, the rest does."""
    left, right = pairs()
    q, k = model(take(left, which)), model(take(right, which))
    _, stats = info_nce_loss(q, k, temperature=temperature, return_stats=True)
    assert isinstance(stats, ContrastStats)
    return {
        "recall": top_k_accuracy(stats, 1).item(),
        "hardest_share": stats.hardest_share.mean().item(),
        "effective_negatives": stats.effective_negatives.mean().item(),
        "positive_similarity": stats.positive_similarity.mean().item(),
        "negative_similarity": stats.negative_similarity.mean().item(),
        "alignment": alignment(q, k).item(),
        "uniformity": uniformity(torch.cat([q, k])).item(),
    }


def judge(rows: list[Row]) -> Verdict:
    after = only(rows, when="after")
    at = sorted({row["temperature"] for row in after})
    recall, share = mean_by(after, "recall", "temperature"), mean_by(after, "hardest_share", "temperature")
    width, even = mean_by(after, "effective_negatives", "temperature"), mean_by(after, "uniformity", "temperature")
    best = max(at, key=lambda t: recall[t,].mean)
    given = mean_by(only(rows, when="before"), "hardest_share", "temperature")  # the same embeddings at every one
    steps = list(itertools.pairwise(at))
    focused = all(given[a,].mean > given[b,].mean for a, b in steps)
    trained = all(share[a,].mean > share[b,].mean and width[a,].mean < width[b,].mean for a, b in steps)
    cold, hot = (paired(after, "recall", "temperature", best, t) for t in (at[0], at[-1]))
    crowded = even[at[-1],].mean - min(even[t,].mean for t in at)

    def listed(found: dict[tuple[Any, ...], Interval], digits: int) -> str:
        return ", ".join(f"{found[t,].mean:.{digits}f}" for t in at)

    says = (
        f"temperatures {', '.join(f'{t:g}' for t in at)}, held-out pairs: share of the hardest negative at the start "
        f"{listed(given, 2)}, after {listed(share, 2)}; effective negatives {listed(width, 0)}; recall at 1 "
        f"{listed(recall, 3)}; uniformity {listed(even, 2)}. Best at {best:g}: ahead of the coldest by {cold}, of the "
        f"hottest by {hot}."
    )
    if not focused:
        return Verdict("does not hold", says)
    parts = {
        "focus of given embeddings": True,
        "focus after training": trained,
        "too hot is worse": best != at[-1] and hot.low > 0,
        "too hot is crowded": crowded > 0.5,
        "too cold is worse": best != at[0] and cold.low > 0,
    }
    true = [name for name, held in parts.items() if held]
    return Verdict("holds", says) if len(true) == len(parts) else Verdict("holds within", says, "; ".join(true))


def figure(rows: list[Row]) -> Figure:
    def both(y: str) -> list[Line]:
        return [series(only(rows, when=when), f"{when} training", "temperature", y) for when in ("after", "before")]

    after = only(rows, when="after")
    panels = [
        Panel("Who pushes", "temperature", "share of the hardest negative", both("hardest_share"), log_x=True),
        Panel(
            "How many push",
            "temperature",
            "exp H of the negatives",
            both("effective_negatives"),
            log_x=True,
            log_y=True,
        ),
        Panel("Retrieval", "temperature", "recall at 1, held out", both("recall"), log_x=True),
        Panel(
            "Geometry",
            "temperature",
            "similarity",
            [series(after, f"{kind} pairs", "temperature", f"{kind}_similarity") for kind in ("positive", "negative")],
            log_x=True,
        ),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="contrastive_temperature",
    question="What does the temperature do in contrastive training on real sentence pairs?",
    expected="Low: the hardest negative takes the push. High: everything pushes alike and the embeddings stay crowded. "
    "Retrieval is best in between.",
    ids=("M-INC-7", "M-INC-6", "M-INC-3", "M-INF-2"),
    sizes={
        "tiny": Size(grid(temperature=[0.02, 1.0], steps=[2], batch=[32], width=[16], test=[64]), seeds=2, seconds=0.3),
        "quick": Size(
            grid(temperature=[0.005, 0.02, 0.05, 0.2, 1.0], steps=[80], batch=[256], width=[64], test=[2048]),
            seeds=5,
            seconds=2.0,
        ),
        "full": Size(
            grid(
                temperature=[0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0],
                steps=[400],
                batch=[512],
                width=[128],
                test=[4096],
            ),
            seeds=5,
            seconds=25.0,
        ),
    },
    run=run,
    judge=judge,
    figure=figure,
    needs=NEEDS,
)
