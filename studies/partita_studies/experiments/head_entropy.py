"""How is entropy spread over the layers and heads of a trained encoder, and what does a longer text do to it?

Expected: normalised entropy H / log n falls with depth (later layers choose more), heads of one layer differ by more
than 0.3, and since 1/sqrt(dim) knows nothing of length, entropy grows with log n at a slope above a half in every
layer. The first of these is a habit of the literature, not a theorem; here it is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from partita import Gibbs
from partita.lab.figure import Figure, Panel
from partita.theory.information import selectivity
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by
from partita_studies.experiments._encoder import LAYERS, NEEDS, heads_of, tokens
from partita_studies.experiments._series import note, only, series, slope_by_seed

SPREAD, DILUTED = 0.3, 0.5


@torch.no_grad()
def run(settings: Settings, seed: int) -> Iterable[Row]:
    n, windows = int(settings["length"]), int(settings["windows"])
    marks = torch.zeros(n, 1)
    marks[[0, -1]] = 1.0  # where the encoder's begin and end marks stand
    for layer, (query, key) in enumerate(heads_of(tokens(seed, windows, n))):
        law = Gibbs(query, key, scale=query.shape[-1] ** -0.5)
        entropy = law.entropy().double()
        heads = entropy.mean((0, 2)) / math.log(n)  # (heads,)
        flags = selectivity(entropy, law.visible())
        yield {
            **settings,
            "layer": layer,
            "seed": seed,
            "entropy": float(entropy.mean()),
            "normalised": float(heads.mean()),
            "lowest": float(heads.min()),
            "highest": float(heads.max()),
            "spread": float(heads.max() - heads.min()),
            "width": float(entropy.exp().mean()),
            "marks": float(law.expectation(marks.expand(*key.shape[:2], n, 1)).mean()),
            "flat": float((flags == 1).double().mean()),
            "saturated": float((flags == -1).double().mean()),
        }


def judge(rows: list[Row]) -> Verdict:
    lengths = sorted({row["length"] for row in rows})
    depth = {n: slope_by_seed(only(rows, length=n), "layer", "normalised", log_x=False) for n in lengths}
    falls = [n for n in lengths if depth[n].mean < 0 and (math.isinf(depth[n].half) or depth[n].high < 0)]
    dilution = {k: slope_by_seed(only(rows, layer=k), "length", "entropy").mean for k in range(LAYERS)}
    layers = mean_by(only(rows, length=lengths[-1]), "normalised", "layer")
    spread = mean_by(rows, "spread", "layer")
    marks = mean_by(only(rows, length=lengths[-1]), "marks", "layer")
    says = (
        f"H / log n at length {lengths[-1]} by layer {', '.join(f'{v.mean:.3f}' for v in layers.values())}; change per "
        f"layer {', '.join(f'{depth[n].mean:+.4f} at {n}' for n in lengths)}. Spread between the heads of a layer "
        f"{', '.join(f'{v.mean:.2f}' for v in spread.values())}. dH/dlog n by layer "
        f"{', '.join(f'{v:.2f}' for v in dilution.values())}. Mass on the begin and end marks "
        f"{', '.join(f'{v.mean:.2f}' for v in marks.values())}; rows that choose nothing "
        f"{sum(row['flat'] for row in rows) / len(rows):.1%}, rows that stopped choosing "
        f"{sum(row['saturated'] for row in rows) / len(rows):.1%}."
    )
    apart = min(v.mean for v in spread.values()) > SPREAD
    diluted = len(lengths) < 2 or min(dilution.values()) > DILUTED
    if len(falls) == len(lengths) and apart and diluted:
        return Verdict("holds", says)
    if not falls:
        return Verdict("does not hold", says)
    failed = [] if len(falls) == len(lengths) else [f"depth at {', '.join(str(n) for n in lengths if n not in falls)}"]
    failed += [] if apart else ["spread"]
    failed += [] if diluted else ["dilution"]
    return Verdict("holds within", says, f"lengths {', '.join(map(str, falls))} for depth; not: {'; '.join(failed)}")


def figure(rows: list[Row]) -> Figure:
    lengths = sorted({row["length"] for row in rows})
    long = only(rows, length=lengths[-1])
    panels = [
        Panel(
            "Normalised entropy by layer",
            "layer",
            "H / log n",
            [series(only(rows, length=n), f"{n} tokens", "layer", "normalised") for n in lengths[-5:]],
        ),
        Panel(
            f"Heads of a layer, {lengths[-1]} tokens",
            "layer",
            "H / log n",
            [
                series(long, "highest head", "layer", "highest"),
                series(long, "mean", "layer", "normalised"),
                series(long, "lowest head", "layer", "lowest"),
            ],
        ),
        Panel(
            "Dilution",
            "tokens n",
            "entropy (nats)",
            [series(only(rows, layer=k), f"layer {k}", "length", "entropy") for k in (0, 1, 2, 3, 5)],
            log_x=True,
        ),
        Panel(
            "Mass on the begin and end marks",
            "layer",
            "mass",
            [series(only(rows, length=n), f"{n} tokens", "layer", "marks") for n in lengths[-5:]],
        ),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="head_entropy",
    question="How is entropy spread over the layers and heads of a trained encoder, and what does length do to it?",
    expected="H / log n falls with depth, heads of a layer differ by more than 0.3, and entropy grows with log n at a "
    "slope above 1/2 in every layer.",
    ids=("M-INF-8", "M-INF-1", "M-ENT-2", "M-SCL-0", "M-ATT-3"),
    sizes={
        "tiny": Size(grid(length=[16, 32], windows=[1]), seeds=1, seconds=0.3),
        "quick": Size(grid(length=[16, 32, 64, 128, 256, 512], windows=[4]), seeds=3, seconds=0.7),
        "full": Size(grid(length=[16, 32, 64, 128, 256, 512], windows=[16]), seeds=20, seconds=2.5),
    },
    run=run,
    judge=judge,
    figure=figure,
    needs=NEEDS,
)
