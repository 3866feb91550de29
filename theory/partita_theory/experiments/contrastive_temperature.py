"""The temperature of contrastive training on real sentence pairs.

A small encoder learns which verse of one translation belongs to which of another, at one fixed temperature. It is read
on held-out pairs, before and after, at that temperature; which temperature is best is chosen on other held-out pairs.
Crowded is a uniformity nearer to 0 than at the best temperature.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from partita.contrastive import ContrastStats, alignment, info_nce_loss, uniformity
from partita.metrics import top_k_accuracy
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._training import descend
from partita_theory.experiments._verses import NEEDS, Encoder, pairs, take
from partita_theory.figure import Panel
from partita_theory.results import Row, columns, distinct, lines, mean_by, only, paired
from partita_theory.verdict import Verdict, above, below, weigh

CROWDED = 0.5  # of uniformity, above that of the best temperature


def measure(seed: int, temperature: float, steps: int, batch: int, width: int, test: int) -> Iterable[Row]:
    source = torch.Generator().manual_seed(seed)
    left, right = pairs()
    judging, tuning, training = torch.randperm(len(left.ends), generator=source).tensor_split([test, 2 * test])
    torch.manual_seed(seed)
    model = Encoder(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    yield {"when": "before", **read(model, judging, temperature)}

    def loss() -> object:
        picked = training[torch.randint(len(training), (batch,), generator=source)]
        q, k = model(take(left, picked)), model(take(right, picked))
        return info_nce_loss(q, k, temperature=temperature, symmetric=True)

    list(descend(optimizer, steps, loss))
    tuned = read(model, tuning, temperature)["recall"]
    yield {"when": "after", **read(model, judging, temperature), "tuned": tuned}


@torch.no_grad()
def read(model: Encoder, which: torch.Tensor, temperature: float) -> Row:
    """What the held-out pairs say; recall and the geometry do not depend on the temperature, the rest does."""
    left, right = pairs()
    q, k = model(take(left, which)), model(take(right, which))
    _, stats = info_nce_loss(q, k, temperature=temperature, return_stats=True)
    assert isinstance(stats, ContrastStats)
    named = ("hardest_share", "effective_negatives", "positive_similarity", "negative_similarity")
    return {
        "recall": top_k_accuracy(stats, 1).item(),
        **{name: getattr(stats, name).mean().item() for name in named},
        "alignment": alignment(q, k).item(),
        "uniformity": uniformity(torch.cat([q, k])).item(),
    }


def judge(rows: list[Row]) -> Verdict:
    before, after = only(rows, when="before"), only(rows, when="after")
    at = distinct(after, "temperature")
    tuned = mean_by(after, "tuned", "temperature")  # the best one is chosen on other pairs than it is judged by
    best = max(at[1:-1] or at[:1], key=lambda t: tuned[t].mean)
    cold, hot = at[0], at[-1]
    gain = {t: paired(after, "recall", "temperature", best, t) for t in (cold, hot)}
    crowd = {t: paired(after, "uniformity", "temperature", t, best) for t in (cold, hot)}

    def listed(found: list[Row], column: str, digits: int) -> str:
        means = mean_by(found, column, "temperature")
        return ", ".join(f"{means[t]:.{digits}f}" for t in at)

    says = (
        f"temperatures {', '.join(f'{t:g}' for t in at)}, held-out pairs: share of the hardest negative at the start "
        f"{listed(before, 'hardest_share', 2)}, after {listed(after, 'hardest_share', 2)}; effective negatives "
        f"{listed(after, 'effective_negatives', 0)}; recall at 1 {listed(after, 'recall', 3)}; uniformity "
        f"{listed(after, 'uniformity', 2)}. Best inside: {best:g}, in recall ahead of the coldest by {gain[cold]}, of "
        f"the hottest by {gain[hot]}."
    )
    claims = [
        claim(f"{words} at {a:g} than at {b:g}", paired(after, column, "temperature", a, b))
        for claim, words, column in (
            (above, "more focus", "hardest_share"),
            (below, "fewer push", "effective_negatives"),
        )
        for a, b in itertools.pairwise(at)
    ]
    claims += [
        above("too hot retrieves worse", gain[hot]),
        above("too cold retrieves worse", gain[cold]),
        above("too hot is crowded", crowd[hot], CROWDED),
        below("too cold is not", crowd[cold], CROWDED),
    ]
    return weigh(claims, says)


def panels(rows: list[Row]) -> list[Panel]:
    similar = {f"{kind} pairs": f"{kind}_similarity" for kind in ("positive", "negative")}
    share, width, recall = (
        lines(rows, "temperature", y, "when", ("after", "before"), "{} training")
        for y in ("hardest_share", "effective_negatives", "recall")
    )
    x, geometry = "temperature", columns(only(rows, when="after"), "temperature", similar)
    return [
        Panel("Who pushes", x, "share of the hardest negative", share, log_x=True),
        Panel("How many push", x, "exp H of the negatives", width, log_x=True, log_y=True),
        Panel("Retrieval", x, "recall at 1, held out", recall, log_x=True),
        Panel("Geometry", x, "similarity", geometry, log_x=True),
    ]


QUICK, FULL = [0.005, 0.02, 0.05, 0.2, 1.0], [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0]
EXPERIMENT = experiment(
    __name__,
    question="What does the temperature do in contrastive training on real sentence pairs?",
    expected="After training, the lower the temperature the more the hardest negative takes of the push; a high one "
    "leaves the embeddings crowded, a low one does not; retrieval is best in between.",
    ids=("M-INC-7", "M-INC-6", "M-INC-3", "M-INF-2"),
    tiny=Size(grid(temperature=[0.02, 1.0], steps=2, batch=32, width=16, test=64), seeds=2, seconds=0.3),
    quick=Size(grid(temperature=QUICK, steps=80, batch=256, width=64, test=2048), seeds=5, seconds=2.0),
    full=Size(grid(temperature=FULL, steps=400, batch=512, width=128, test=4096), seeds=5, seconds=25.0),
    needs=NEEDS,
)
