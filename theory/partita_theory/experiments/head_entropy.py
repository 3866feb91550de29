"""How entropy is spread over the layers and heads of a trained encoder, and what a longer text does to it.

That later layers choose more (H / log n falls with depth) is a habit of the literature, not a theorem; here it is
measured. 1/sqrt(dim) does not depend on the length, hence the growth with log n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from partita import Gibbs
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._encoder import LAYERS, NEEDS, heads_of, tokens
from partita_theory.figure import Panel
from partita_theory.information import selectivity
from partita_theory.results import Row, columns, distinct, lines, mean_by, only, said, slope_by_seed
from partita_theory.verdict import Verdict, settle

SPREAD, DILUTED = 0.3, 0.5


@torch.no_grad()
def measure(seed: int, length: int, windows: int) -> Iterable[Row]:
    marks = torch.zeros(length, 1)
    marks[[0, -1]] = 1.0  # where the encoder's begin and end marks stand
    for layer, (query, key) in enumerate(heads_of(tokens(seed, windows, length))):
        law = Gibbs(query, key, scale=query.shape[-1] ** -0.5)
        entropy = law.entropy().double()
        heads = entropy.mean((0, 2)) / math.log(length)  # (heads,)
        flags = selectivity(entropy, law.visible())
        yield {
            "layer": layer,
            "entropy": float(entropy.mean()),
            "normalised": float(heads.mean()),
            "lowest": float(heads.min()),
            "highest": float(heads.max()),
            "spread": float(heads.max() - heads.min()),
            "width": float(entropy.exp().mean()),
            "marks": float(law.expectation(marks.expand(*key.shape[:2], length, 1)).mean()),
            "flat": float((flags == 1).double().mean()),
            "saturated": float((flags == -1).double().mean()),
        }


def judge(rows: list[Row]) -> Verdict:
    lengths = distinct(rows, "length")
    depth = {n: slope_by_seed(only(rows, length=n), "layer", "normalised", log_x=False) for n in lengths}
    falls = [n for n in lengths if depth[n].mean < 0 and (math.isinf(depth[n].half) or depth[n].high < 0)]
    dilution = {k: slope_by_seed(only(rows, layer=k), "length", "entropy").mean for k in range(LAYERS)}
    layers, marks = (mean_by(only(rows, length=lengths[-1]), y, "layer") for y in ("normalised", "marks"))
    spread = mean_by(rows, "spread", "layer")
    flat, saturated = (sum(row[y] for row in rows) / len(rows) for y in ("flat", "saturated"))
    says = (
        f"H / log n at length {lengths[-1]} by layer {said(layers, '{1:.3f}')}; change per layer "
        f"{said(depth, '{1:+.4f} at {0}')}. Spread between the heads of a layer {said(spread, '{1:.2f}')}. dH/dlog n "
        f"by layer {said(dilution, '{1:.2f}')}. Mass on the begin and end marks {said(marks, '{1:.2f}')}; rows that "
        f"choose nothing {flat:.1%}, rows that stopped choosing {saturated:.1%}."
    )
    apart = min(v.mean for v in spread.values()) > SPREAD
    diluted = len(lengths) < 2 or min(dilution.values()) > DILUTED
    deep = len(falls) == len(lengths)
    failed = [] if deep else [f"depth at {', '.join(str(n) for n in lengths if n not in falls)}"]
    failed += [name for name, true in (("spread", apart), ("dilution", diluted)) if not true]
    within = f"lengths {', '.join(map(str, falls))} for depth; not: {'; '.join(failed)}"
    return settle(says, holds=bool(falls), whole=not failed, within=within)


def panels(rows: list[Row]) -> list[Panel]:
    lengths = distinct(rows, "length")
    x, y = "layer", "H / log n"
    share, marks = (lines(rows, x, c, "length", lengths[-5:], "{} tokens") for c in ("normalised", "marks"))
    heads = {"highest head": "highest", "mean": "normalised", "lowest head": "lowest"}
    long = columns(only(rows, length=lengths[-1]), x, heads)
    growth = lines(rows, "length", "entropy", "layer", (0, 1, 2, 3, 5), "layer {}")
    return [
        Panel("Normalised entropy by layer", x, y, share),
        Panel(f"Heads of a layer, {lengths[-1]} tokens", x, y, long),
        Panel("Dilution", "tokens n", "entropy (nats)", growth, log_x=True),
        Panel("Mass on the begin and end marks", x, "mass", marks),
    ]


LENGTHS = [16, 32, 64, 128, 256, 512]
EXPERIMENT = experiment(
    __name__,
    question="How is entropy spread over the layers and heads of a trained encoder, and what does length do to it?",
    expected="H / log n falls with depth, heads of a layer differ by more than 0.3, and entropy grows with log n at a "
    "slope above 1/2 in every layer.",
    ids=("M-INF-8", "M-INF-1", "M-ENT-2", "M-SCL-0", "M-ATT-3"),
    tiny=Size(grid(length=[16, 32], windows=1), seeds=1, seconds=0.3),
    quick=Size(grid(length=LENGTHS, windows=4), seeds=3, seconds=0.7),
    full=Size(grid(length=LENGTHS, windows=16), seeds=20, seconds=2.5),
    needs=NEEDS,
)
