"""How different are the heads of a layer, what finds a duplicate, and are trained heads as different as random ones?

    random     eight heads with projections of their own
    copied     four of them replaced by copies of the first
    permuted   one head, its keys in another order for each head: equal entropies, different laws
    tempered   one head at eight scales: different entropies, nearly the same law
    blurred    copied, and then every head's queries and keys mixed half and half with noise of their own
    trained    the twelve heads of each layer of the encoder, and beside them random heads with row by row the same
               entropies (the scale is solved)

What the first four must give follows from how they are made (copies have distance 0, permuted heads equal entropies):
they check the measures, and if one is off nothing else counts. Expected: of blurred heads, the pairs that come from one
head are still the ten nearest by Fisher-Rao distance, while at most half of them are among the ten pairs whose mean
entropies are nearest. Trained heads agree more than random heads of the same entropies in every layer, because they
share the keys they like.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from partita import Gibbs, solve_scale
from partita.lab.figure import Figure, Line, Panel
from partita.theory.spectrum import head_cosine, head_diversity, head_fisher_rao
from partita_studies.experiment import (
    Experiment,
    Interval,
    Row,
    Settings,
    Size,
    Verdict,
    grid,
    interval,
    mean_by,
    paired,
)
from partita_studies.experiments._claims import above, below, weigh
from partita_studies.experiments._encoder import LAYERS, NEEDS, heads_of, tokens
from partita_studies.experiments._series import note, only, series

HEADS, DIM, COPIES = 8, 32, 4
SAME = 1e-3  # radians: nearer than this two heads are one
MADE = ("random", "copied", "permuted", "tempered")
PAIRS = (COPIES + 1) * COPIES // 2  # of heads that come from the first


@torch.no_grad()
def run(settings: Settings, seed: int) -> Iterable[Row]:
    n = int(settings["length"])
    source = str(settings["kind"])
    if source == "encoder":
        for row in trained(n, seed):
            yield {**settings, **row}
        return
    draw = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(HEADS, n, DIM, generator=draw, dtype=torch.float64) for _ in range(2))
    scale = torch.full((HEADS, 1), 2 * DIM**-0.5, dtype=torch.float64)
    if source in ("copied", "blurred"):
        query[HEADS - COPIES :], key[HEADS - COPIES :] = query[0], key[0]
    if source == "blurred":
        query, key = ((x + torch.randn(x.shape, generator=draw, dtype=x.dtype)) / 2**0.5 for x in (query, key))
    if source == "permuted":
        query = query[:1].expand(HEADS, n, DIM)
        key = torch.stack([key[0, torch.randperm(n, generator=draw)] for _ in range(HEADS)])
    if source == "tempered":
        query, key = query[:1].expand(HEADS, n, DIM), key[:1].expand(HEADS, n, DIM)
        scale = scale * torch.linspace(0.8, 1.2, HEADS, dtype=torch.float64)[:, None]
    yield {**settings, "source": source, "layer": -1, "seed": seed, **measure(query, key, scale)}


def trained(n: int, seed: int) -> Iterable[Row]:
    """Each layer of the encoder, and random heads that are just as sharp in every row."""
    draw = torch.Generator().manual_seed(seed)
    for layer, heads in enumerate(heads_of(tokens(seed, 1, n))):
        query, key = heads.query[0].double(), heads.key[0].double()
        scale = torch.full(query.shape[:2], query.shape[-1] ** -0.5, dtype=torch.float64)
        entropy = Gibbs(query, key, scale=scale).entropy()
        yield {"source": "trained", "layer": layer, "seed": seed, **measure(query, key, scale)}
        query, key = (torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in (query, key))
        solved = solve_scale(query, key, entropy=entropy)
        yield {"source": "matched", "layer": layer, "seed": seed, **measure(query, key, solved)}


def measure(query: Tensor, key: Tensor, scale: Tensor) -> dict[str, float]:
    """How different the heads are, averaged over rows."""
    heads = query.shape[0]
    law = Gibbs(query, key, scale=scale)
    found = head_diversity(law.probs().transpose(0, 1))  # rows, heads, keys
    pair = torch.triu(torch.ones(heads, heads, dtype=torch.bool), 1)
    # scores carry their scale, so that heads of different sharpness can be put side by side
    sharp = query * scale[..., None]
    distance = head_fisher_rao(sharp, key).mean(-1)[pair]
    cosine = head_cosine(sharp, key).mean(-1)[pair]
    level = law.entropy().mean(-1)
    apart = (level[:, None] - level).abs()[pair]
    at = torch.arange(heads)
    kin = (at == 0) | (at >= heads - COPIES)
    related = (kin[:, None] & kin)[pair]
    return {
        "heads": heads,
        "divergence": float(found.divergence.mean()) / math.log(heads),
        "spread": float((found.most - found.least).mean()),
        "entropy": float(found.mean.mean()),
        "distance": float(distance.mean()),
        "nearest": float(distance.min()),
        "cosine": float(cosine.mean()),
        "duplicates": int((distance < SAME).sum()),
        # of the pairs that share their first head (where heads were copied), how many are among the nearest
        "found_by_distance": float(related[distance.argsort()[:PAIRS]].double().mean()),
        "found_by_entropy": float(related[apart.argsort()[:PAIRS]].double().mean()),
    }


def judge(rows: list[Row]) -> Verdict:
    jsd = {key[0]: value.mean for key, value in mean_by(rows, "divergence", "source").items()}
    spread = {key[0]: value.mean for key, value in mean_by(rows, "spread", "source").items()}
    wanted = {"random": 0, "permuted": 0, "tempered": 0, "copied": PAIRS}
    misses = sum(row["duplicates"] != wanted[row["source"]] for row in rows if row["source"] in MADE)
    twins = sum(row["duplicates"] for row in only(rows, source="trained"))
    copying = paired(rows, "divergence", "source", "copied", "random")
    layers = {k: _against_random(rows, k) for k in range(LAYERS) if only(rows, source="trained", layer=k)}
    nearest = min((row["nearest"] for row in only(rows, source="trained")), default=math.nan)
    blurred = only(rows, source="blurred")
    seen, guessed = (interval(row[f"found_by_{by}"] for row in blurred) for by in ("distance", "entropy"))
    says = (
        f"Divergence / log heads: {', '.join(f'{s} {jsd[s]:.3f}' for s in MADE)}; spread of entropies: "
        f"{', '.join(f'{s} {spread[s]:.3f}' for s in MADE)}. Copying {COPIES} heads changes the divergence by "
        f"{copying}; {misses} of {sum(r['source'] in MADE for r in rows)} sets had duplicates missed or invented. Of "
        f"the {PAIRS} blurred pairs {seen.mean:.0%} are among the nearest by distance, {guessed.mean:.0%} by mean "
        f"entropy. Trained minus random heads of equal entropies, by layer: "
        f"{', '.join(f'{g.mean:+.3f}' for g in layers.values())}; {twins} duplicate pairs in the encoder, the "
        f"nearest {nearest:.2f} radians apart."
    )
    measures = (
        misses == 0
        and copying.mean < 0
        and spread["permuted"] < spread["tempered"]
        and jsd["permuted"] > jsd["tempered"]
    )
    if not measures:
        return Verdict("does not hold", says + " The measures fail on heads made to order.")
    claims = [
        above("the distance finds blurred copies", seen, 0.9),
        below("entropies do not", guessed, 0.5),
        *(below(f"layer {k}: trained heads agree more than random ones", gap) for k, gap in layers.items()),
    ]
    return weigh(claims, says)


def _against_random(rows: list[Row], layer: int) -> Interval:
    return paired(only(rows, layer=layer), "divergence", "source", "trained", "matched")


def figure(rows: list[Row]) -> Figure:
    real = [row for row in rows if row["layer"] >= 0]
    made = [row for row in rows if row["layer"] < 0]
    panels = [
        Panel(
            "Spread of entropies is not diversity",
            "spread of entropies (nats)",
            "divergence / log heads",
            [
                Line(
                    s,
                    [r["spread"] for r in only(made, source=s)],
                    [r["divergence"] for r in only(made, source=s)],
                    kind="points",
                )
                for s in (*MADE, "blurred")
            ],
        )
    ]
    for name, label in (("divergence", "divergence / log heads"), ("distance", "mean distance of two heads (radians)")):
        lines = [series(only(real, source=s), s, "layer", name) for s in ("trained", "matched") if only(real, source=s)]
        if lines:
            panels.append(Panel("Heads of the encoder", "layer", label, lines))
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="head_diversity",
    question="How different are the heads of a layer, what finds a copy, are trained heads as different as random?",
    expected="The Fisher-Rao distance finds copies that were blurred with as much noise again, entropies do not; in "
    "every layer trained heads agree more than random heads of equal entropies.",
    ids=("M-INF-6", "M-GEO-5", "M-ATT-3"),
    sizes={
        "tiny": Size(grid(kind=[*MADE, "blurred", "encoder"], length=[24]), seeds=1, seconds=0.3),
        "quick": Size(grid(kind=[*MADE, "blurred", "encoder"], length=[128]), seeds=5, seconds=0.4),
        "full": Size(grid(kind=[*MADE, "blurred", "encoder"], length=[512]), seeds=20, seconds=2.5),
    },
    run=run,
    judge=judge,
    figure=figure,
    needs=NEEDS,
)
