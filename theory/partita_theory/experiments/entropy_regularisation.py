"""`entropy_weight` of either sign in a classifier of digits that has seen few or many of them.

loss = cross entropy - entropy_weight * H            a positive weight rewards entropy (M-INF-5)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

from partita.losses import cross_entropy
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._digits import NEEDS, fit, network, read_out, split
from partita_theory.figure import Panel
from partita_theory.results import Row, distinct, lines, mean_by, only, paired
from partita_theory.verdict import Verdict, settle

SMALL = 0.3  # the largest weight that should leave accuracy alone
SAME = 0.01


def measure(seed: int, weight: float, train: int, steps: int) -> Iterable[Row]:
    data, model = split(seed), network(seed)
    fit(model, data.x[:train], data.y[:train], functools.partial(cross_entropy, entropy_weight=weight), steps)
    found, _ = read_out(model, data.x_test, data.y_test)
    yield {**found, "overconfidence": found["confidence"] - found["accuracy"]}


def judge(rows: list[Row]) -> Verdict:
    weights, counts = distinct(rows, "weight"), distinct(rows, "train")
    ordered, moves, parts = True, 0.0, []
    for count in counts:
        own = only(rows, train=count)
        ordered &= all(paired(own, "entropy", "weight", b, a).low > 0 for a, b in itertools.pairwise(weights))
        small = [paired(own, "accuracy", "weight", w, 0.0).mean for w in weights if w and abs(w) <= SMALL]
        moves = max([moves, *map(abs, small)])
        at, error = (mean_by(own, column, "weight") for column in ("entropy", "calibration_error"))
        parts.append(
            f"{count} rows: entropy {', '.join(f'{at[w]:.3f}' for w in weights)} and calibration error "
            f"{', '.join(f'{error[w]:.3f}' for w in weights)}"
        )
    few = only(rows, train=counts[0])  # the network with too little to learn from
    gains = {w: paired(few, "calibration_error", "weight", w, 0.0) for w in weights if w}
    better = [f"{w:g}" for w in gains if w > 0 and gains[w].high < 0]
    worse = [f"{w:g}" for w in gains if w < 0 and gains[w].low > 0]
    modest = gains[weights[-1]].low > 0
    says = (
        f"weights {', '.join(f'{w:g}' for w in weights)}. {'; '.join(parts)}. Weights up to {SMALL} move accuracy by "
        f"at most {moves:.3f}. With {counts[0]} rows calibration is better at {better or 'no weight'}, worse at "
        f"{worse or 'no negative weight'}{', and worse again at the largest' if modest else ''}."
    )
    facts = {
        "entropy and its order": True,
        "a positive weight mends calibration": bool(better),
        "a negative one harms it": bool(worse),
        "too large a one harms it": modest,
        "accuracy unmoved by small weights": moves <= SAME,
    }
    within = "; ".join(name for name, true in facts.items() if true)
    return settle(says, holds=ordered, whole=all(facts.values()), within=within)


def panels(rows: list[Row]) -> list[Panel]:
    shown = (
        ("Entropy", "entropy", "entropy (nats)"),
        ("Calibration", "calibration_error", "expected calibration error"),
        ("Confidence minus accuracy", "overconfidence", "too sure above 0"),
        ("Accuracy", "accuracy", "held-out accuracy"),
    )
    x = "entropy_weight"
    return [Panel(title, x, label, lines(rows, "weight", y, "train", label="{} rows")) for title, y, label in shown]


QUICK, FULL = [-1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0], [-1.0, -0.5, -0.3, -0.1, 0.0, 0.1, 0.2, 0.3, 0.5, 1.0]
EXPERIMENT = experiment(
    __name__,
    question="What does entropy_weight do to a classifier, with either sign?",
    expected="Entropy rises with the weight and accuracy hardly moves for small ones; a small positive weight mends "
    "the calibration of a network that is too sure of itself, a large one and any negative one harm it.",
    ids=("M-INF-5", "M-DER-3", "M-ENT-1"),
    tiny=Size(grid(weight=[-0.3, 0.0, 0.3], train=100, steps=30), seeds=2, seconds=0.1),
    quick=Size(grid(weight=QUICK, train=[100, 1000], steps=200), seeds=5, seconds=0.4),
    full=Size(grid(weight=FULL, train=[50, 100, 300, 1000], steps=400), seeds=20, seconds=0.8),
    needs=NEEDS,
)
