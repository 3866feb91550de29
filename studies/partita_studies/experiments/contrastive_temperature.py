"""What does the temperature do in contrastive training on real sentence pairs?

A small encoder learns which verse of one translation belongs to which of another, at one fixed temperature. It is
read on held-out pairs, before and after, at the temperature it was trained with; which temperature is best is chosen on
other held-out pairs.

Expected, of the trained encoder (of embeddings that are given it is an identity): the lower the temperature, the
larger the share of the hardest negative and the fewer negatives push at all (exp H). Retrieval is best in between: a
temperature near 1 leaves the embeddings crowded (uniformity nearer to 0 than at the best temperature), a very low one
looks at one negative at a time and learns worse, but does not crowd them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from partita.contrastive import ContrastStats, alignment, info_nce_loss, uniformity
from partita.lab.figure import Figure, Line, Panel
from partita.metrics import top_k_accuracy
from partita_studies.experiment import Experiment, Interval, Row, Settings, Size, Verdict, grid, mean_by, paired
from partita_studies.experiments._claims import above, below, weigh
from partita_studies.experiments._series import note, only, series
from partita_studies.experiments._verses import NEEDS, Encoder, pairs, take

CROWDED = 0.5  # of uniformity, above that of the best temperature


def run(settings: Settings, seed: int) -> Iterable[Row]:
    temperature, batch = float(settings["temperature"]), int(settings["batch"])
    source = torch.Generator().manual_seed(seed)
    left, right = pairs()
    order = torch.randperm(len(left.ends), generator=source)
    test, tune, train = order.tensor_split([int(settings["test"]), 2 * int(settings["test"])])
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
    tuned = measure(model, tune, temperature)["recall"]
    yield {**settings, "seed": seed, "when": "after", **measure(model, test, temperature), "tuned": tuned}


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
    given = mean_by(only(rows, when="before"), "hardest_share", "temperature")
    tuned = mean_by(after, "tuned", "temperature")  # the best one is chosen on other pairs than it is judged by
    best = max(at[1:-1] or at[:1], key=lambda t: tuned[t,].mean)
    steps = list(itertools.pairwise(at))
    gain = {t: paired(after, "recall", "temperature", best, t) for t in (at[0], at[-1])}
    crowd = {t: paired(after, "uniformity", "temperature", t, best) for t in (at[0], at[-1])}

    def listed(found: dict[tuple[Any, ...], Interval], digits: int) -> str:
        return ", ".join(f"{found[t,].mean:.{digits}f}" for t in at)

    says = (
        f"temperatures {', '.join(f'{t:g}' for t in at)}, held-out pairs: share of the hardest negative at the start "
        f"{listed(given, 2)}, after {listed(share, 2)}; effective negatives {listed(width, 0)}; recall at 1 "
        f"{listed(recall, 3)}; uniformity {listed(even, 2)}. Best inside: {best:g}, in recall ahead of the coldest by "
        f"{gain[at[0]]}, of the hottest by {gain[at[-1]]}."
    )
    claims = [
        *(
            above(f"more focus at {a:g} than at {b:g}", paired(after, "hardest_share", "temperature", a, b))
            for a, b in steps
        ),
        *(
            below(f"fewer push at {a:g} than at {b:g}", paired(after, "effective_negatives", "temperature", a, b))
            for a, b in steps
        ),
        above("too hot retrieves worse", gain[at[-1]]),
        above("too cold retrieves worse", gain[at[0]]),
        above("too hot is crowded", crowd[at[-1]], CROWDED),
        below("too cold is not", crowd[at[0]], CROWDED),
    ]
    return weigh(claims, says)


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
    expected="After training, the lower the temperature the more the hardest negative takes of the push; a high one "
    "leaves the embeddings crowded, a low one does not; retrieval is best in between.",
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
