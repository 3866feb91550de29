"""How different the heads of a layer are, and what finds a duplicate.

    random     eight heads with projections of their own
    copied     four of them replaced by copies of the first
    permuted   one head, its keys in another order for each head: equal entropies, different laws
    tempered   one head at eight scales: different entropies, nearly the same law
    blurred    copied, and then every head's queries and keys mixed half and half with noise of their own
    trained    the twelve heads of each layer of the encoder, next to random heads with row by row the same entropies
               (the scale is solved)

What the first four must give follows from how they are made (copies have distance 0, permuted heads equal entropies):
they check the measures, and if one is off nothing else counts. Of blurred heads, the ten pairs that come from one head
should be the ten nearest by Fisher-Rao distance, while at most half of them are among the ten pairs whose mean
entropies are nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from partita import Gibbs, solve_scale
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._encoder import LAYERS, NEEDS, heads_of, tokens
from partita_theory.figure import Panel
from partita_theory.results import Row, interval, lines, mean_by, only, paired, points
from partita_theory.spectrum import head_cosine, head_diversity, head_fisher_rao
from partita_theory.verdict import Verdict, above, below, weigh

HEADS, DIM, COPIES = 8, 32, 4
SAME = 1e-3  # radians: nearer than this two heads are one
MADE = ("random", "copied", "permuted", "tempered")
PAIRS = (COPIES + 1) * COPIES // 2  # of heads that come from the first


@torch.no_grad()
def measure(seed: int, kind: str, length: int) -> Iterable[Row]:
    if kind == "encoder":
        yield from trained(length, seed)
        return
    draw = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(HEADS, length, DIM, generator=draw, dtype=torch.float64) for _ in range(2))
    scale = torch.full((HEADS, 1), 2 * DIM**-0.5, dtype=torch.float64)
    if kind in ("copied", "blurred"):
        query[HEADS - COPIES :], key[HEADS - COPIES :] = query[0], key[0]
    if kind == "blurred":
        query, key = ((x + torch.randn(x.shape, generator=draw, dtype=x.dtype)) / 2**0.5 for x in (query, key))
    if kind == "permuted":
        query = query[:1].expand(HEADS, length, DIM)
        key = torch.stack([key[0, torch.randperm(length, generator=draw)] for _ in range(HEADS)])
    if kind == "tempered":
        query, key = query[:1].expand(HEADS, length, DIM), key[:1].expand(HEADS, length, DIM)
        scale = scale * torch.linspace(0.8, 1.2, HEADS, dtype=torch.float64)[:, None]
    yield {"source": kind, "layer": -1, **differences(query, key, scale)}


def trained(n: int, seed: int) -> Iterable[Row]:
    """Each layer of the encoder, and random heads that are just as sharp in every row."""
    draw = torch.Generator().manual_seed(seed)
    for layer, heads in enumerate(heads_of(tokens(seed, 1, n))):
        query, key = heads.query[0].double(), heads.key[0].double()
        scale = torch.full(query.shape[:2], query.shape[-1] ** -0.5, dtype=torch.float64)
        entropy = Gibbs(query, key, scale=scale).entropy()
        yield {"source": "trained", "layer": layer, **differences(query, key, scale)}
        query, key = (torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in (query, key))
        solved = solve_scale(query, key, entropy=entropy)
        yield {"source": "matched", "layer": layer, **differences(query, key, solved)}


def differences(query: Tensor, key: Tensor, scale: Tensor) -> Row:
    """How different the heads are, averaged over rows."""
    heads = query.shape[0]
    law = Gibbs(query, key, scale=scale)
    found = head_diversity(law.probs().transpose(0, 1))  # rows, heads, keys
    pair = torch.triu(torch.ones(heads, heads, dtype=torch.bool), 1)
    # scores carry their scale, so that heads of different sharpness can be compared
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
    jsd, spread = (mean_by(rows, column, "source") for column in ("divergence", "spread"))
    made = [row for row in rows if row["source"] in MADE]
    misses = sum(row["duplicates"] != (PAIRS if row["source"] == "copied" else 0) for row in made)
    real = only(rows, source="trained")
    copying = paired(rows, "divergence", "source", "copied", "random")
    layers = {
        k: paired(only(rows, layer=k), "divergence", "source", "trained", "matched")
        for k in range(LAYERS)
        if only(real, layer=k)
    }
    nearest = min((row["nearest"] for row in real), default=math.nan)
    blurred = only(rows, source="blurred")
    seen, guessed = (interval(row[f"found_by_{by}"] for row in blurred) for by in ("distance", "entropy"))
    says = (
        f"Divergence / log heads: {', '.join(f'{s} {jsd[s]:.3f}' for s in MADE)}; spread of entropies: "
        f"{', '.join(f'{s} {spread[s]:.3f}' for s in MADE)}. Copying {COPIES} heads changes the divergence by "
        f"{copying}; {misses} of {len(made)} sets had duplicates missed or invented. Of the {PAIRS} blurred pairs "
        f"{seen:.0%} are among the nearest by distance, {guessed:.0%} by mean entropy. Trained minus random heads of "
        f"equal entropies, by layer: {', '.join(f'{g:+.3f}' for g in layers.values())}; "
        f"{sum(row['duplicates'] for row in real)} duplicate pairs in the encoder, the nearest {nearest:.2f} radians "
        f"apart."
    )
    ordered = spread["permuted"].mean < spread["tempered"].mean and jsd["permuted"].mean > jsd["tempered"].mean
    if misses or copying.mean >= 0 or not ordered:
        return Verdict("does not hold", says + " The measures fail on heads made to order.")
    claims = [
        above("the distance finds blurred copies", seen, 0.9),
        below("entropies do not", guessed, 0.5),
        *(below(f"layer {k}: trained heads agree more than random ones", gap) for k, gap in layers.items()),
    ]
    return weigh(claims, says)


def panels(rows: list[Row]) -> list[Panel]:
    real = [row for row in rows if row["layer"] >= 0]
    dots = [points(only(rows, source=s, layer=-1), s, "spread", "divergence") for s in (*MADE, "blurred")]
    y = "divergence / log heads"
    found = [Panel("Spread of entropies is not diversity", "spread of entropies (nats)", y, dots)]
    shown = [s for s in ("trained", "matched") if only(real, source=s)]
    for column, label in (("divergence", y), ("distance", "mean distance of two heads (radians)")):
        if shown:
            found.append(Panel("Heads of the encoder", "layer", label, lines(real, "layer", column, "source", shown)))
    return found


KINDS = [*MADE, "blurred", "encoder"]
EXPERIMENT = experiment(
    __name__,
    question="How different are the heads of a layer, what finds a copy, are trained heads as different as random?",
    expected="The Fisher-Rao distance finds copies that were blurred with as much noise again, entropies do not; in "
    "every layer trained heads agree more than random heads of equal entropies.",
    ids=("M-INF-6", "M-GEO-5", "M-ATT-3"),
    tiny=Size(grid(kind=KINDS, length=24), seeds=1, seconds=0.3),
    quick=Size(grid(kind=KINDS, length=128), seeds=5, seconds=0.4),
    full=Size(grid(kind=KINDS, length=512), seeds=20, seconds=2.5),
    needs=NEEDS,
)
