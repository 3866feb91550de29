"""What does `entropy_weight` do to a classifier, with either sign?

    loss = cross entropy - entropy_weight * H            a positive weight rewards entropy (M-INF-5)

Expected: entropy rises and confidence falls with the weight, on both sides of zero, while accuracy hardly moves for
small weights. A small positive weight improves the calibration of a network that has seen too few rows and is too
sure of itself; a large one makes it too modest. A negative weight makes calibration worse.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

from partita.lab.figure import Figure, Panel
from partita.losses import cross_entropy
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by, paired
from partita_studies.experiments._digits import NEEDS, fit, network, read_out, split
from partita_studies.experiments._series import note, only, series

SMALL = 0.3  # the largest weight that should leave accuracy alone
SAME = 0.01


def run(settings: Settings, seed: int) -> Iterable[Row]:
    data, model = split(seed), network(seed)
    count = int(settings["train"])
    loss = functools.partial(cross_entropy, entropy_weight=float(settings["weight"]))
    fit(model, data.x[:count], data.y[:count], loss, int(settings["steps"]))
    found, _ = read_out(model, data.x_test, data.y_test)
    yield {**settings, "seed": seed, **found, "overconfidence": found["confidence"] - found["accuracy"]}


def judge(rows: list[Row]) -> Verdict:
    weights, counts = sorted({row["weight"] for row in rows}), sorted({row["train"] for row in rows})
    few = only(rows, train=counts[0])  # the network with too little to learn from
    ordered, moves, lines = True, 0.0, []
    for count in counts:
        own = only(rows, train=count)
        steps = [paired(own, "entropy", "weight", b, a) for a, b in itertools.pairwise(weights)]
        ordered = ordered and all(step.low > 0 for step in steps)
        small = [paired(own, "accuracy", "weight", w, 0.0).mean for w in weights if w and abs(w) <= SMALL]
        moves = max([moves, *(abs(s) for s in small)])
        at = mean_by(own, "entropy", "weight")
        error = mean_by(own, "calibration_error", "weight")
        lines.append(
            f"{count} rows: entropy {', '.join(f'{at[w,].mean:.3f}' for w in weights)} and calibration error "
            f"{', '.join(f'{error[w,].mean:.3f}' for w in weights)}"
        )
    gains = {w: paired(few, "calibration_error", "weight", w, 0.0) for w in weights if w}
    better = [w for w in gains if w > 0 and gains[w].high < 0]
    worse = [w for w in gains if w < 0 and gains[w].low > 0]
    modest = gains[weights[-1]].low > 0
    says = (
        f"weights {', '.join(f'{w:g}' for w in weights)}. {'; '.join(lines)}. Weights up to {SMALL} move accuracy by "
        f"at most {moves:.3f}. With {counts[0]} rows calibration is better at "
        f"{[f'{w:g}' for w in better] or 'no weight'}, worse at {[f'{w:g}' for w in worse] or 'no negative weight'}"
        f"{', and worse again at the largest' if modest else ''}."
    )
    if not ordered:
        return Verdict("does not hold", says)
    if better and worse and modest and moves <= SAME:
        return Verdict("holds", says)
    parts = {
        "entropy and its order": True,
        "a positive weight mends calibration": bool(better),
        "a negative one harms it": bool(worse),
        "too large a one harms it": modest,
        "accuracy unmoved by small weights": moves <= SAME,
    }
    return Verdict("holds within", says, "; ".join(name for name, true in parts.items() if true))


def figure(rows: list[Row]) -> Figure:
    counts = sorted({row["train"] for row in rows})
    shown = (
        ("Entropy", "entropy", "entropy (nats)"),
        ("Calibration", "calibration_error", "expected calibration error"),
        ("Confidence minus accuracy", "overconfidence", "too sure above 0"),
        ("Accuracy", "accuracy", "held-out accuracy"),
    )
    panels = [
        Panel(title, "entropy_weight", label, [series(only(rows, train=c), f"{c} rows", "weight", y) for c in counts])
        for title, y, label in shown
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="entropy_regularisation",
    question="What does entropy_weight do to a classifier, with either sign?",
    expected="Entropy rises with the weight and accuracy hardly moves for small ones; a small positive weight mends "
    "the calibration of a network that is too sure of itself, a large one and any negative one harm it.",
    ids=("M-INF-5", "M-DER-3", "M-ENT-1"),
    sizes={
        "tiny": Size(grid(weight=[-0.3, 0.0, 0.3], train=[100], steps=[30]), seeds=2, seconds=0.1),
        "quick": Size(
            grid(weight=[-1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0], train=[100, 1000], steps=[200]), seeds=5, seconds=0.4
        ),
        "full": Size(
            grid(
                weight=[-1.0, -0.5, -0.3, -0.1, 0.0, 0.1, 0.2, 0.3, 0.5, 1.0], train=[50, 100, 300, 1000], steps=[400]
            ),
            seeds=20,
            seconds=0.8,
        ),
    },
    run=run,
    judge=judge,
    figure=figure,
    needs=NEEDS,
)
