"""Does `fit_temperature` undo a wrong temperature of a real classifier?

A digits classifier is trained, then its head is multiplied by a factor. One temperature is fitted on rows it has not
seen, from streamed statistics, and compared with a search over the explicit logits in float64.

Expected: the temperature is that of the search to a thousandth, whatever the factor; the factor times the temperature
of the untouched head is what it finds; calibration error and surprise on further rows return to what they were, and
accuracy does not move, since one temperature changes no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from partita import metrics
from partita.calibration import fit_temperature
from partita.lab.figure import Figure, Line, Panel
from partita.losses import LossStats, cross_entropy, linear_cross_entropy
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by
from partita_studies.experiments._digits import NEEDS, fit, network, split
from partita_studies.experiments._series import note, series

EXACT = 1e-3  # relative error of the temperature that counts as none


def searched(logits: Tensor, y: Tensor) -> float:
    """The best temperature by golden section in log T: an independent answer, the loss being convex in 1/T."""
    z, low, high = logits.double(), math.log(1e-3), math.log(1e3)
    golden = (math.sqrt(5) - 1) / 2

    def value(x: float) -> float:
        return F.cross_entropy(z / math.exp(x), y).item()

    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = value(a), value(b)
    while high - low > 1e-6:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = value(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = value(b)
    return math.exp((low + high) / 2)


def run(settings: Settings, seed: int) -> Iterable[Row]:
    data, model = split(seed), network(seed)
    fit(model, data.x, data.y, cross_entropy, int(settings["steps"]))
    body, head = model[:2], model[2]
    assert isinstance(head, torch.nn.Linear)
    with torch.no_grad():
        weight, bias = (float(settings["factor"]) * t for t in (head.weight, head.bias))
        tune, test = body(data.x_tune), body(data.x_test)
        own = searched(F.linear(tune, head.weight, head.bias), data.y_tune)
        best = searched(F.linear(tune, weight, bias), data.y_tune)
        found = fit_temperature(tune, weight, data.y_tune, bias=bias).item()
        row: Row = {**settings, "seed": seed, "temperature": found, "searched": best, "untouched": own}
        row["error"] = abs(found / best - 1)
        for name, t in (("before", 1.0), ("after", found)):
            _, stats = linear_cross_entropy(
                test, weight, data.y_test, scale=1 / t, linear_bias=bias / t, return_stats=True
            )
            assert isinstance(stats, LossStats)
            row[f"calibration_error_{name}"] = metrics.expected_calibration_error(stats).item()
            row[f"nll_{name}"] = stats.nll.mean().item()
            row[f"accuracy_{name}"] = metrics.top_k_accuracy(stats).item()
        yield row


def judge(rows: list[Row]) -> Verdict:
    factors = sorted({row["factor"] for row in rows})
    worst = max(row["error"] for row in rows)
    scaled = max(abs(row["temperature"] / (row["factor"] * row["untouched"]) - 1) for row in rows)
    before, after = (mean_by(rows, f"calibration_error_{when}", "factor") for when in ("before", "after"))
    spread = max(after[f,].mean for f in factors) - min(after[f,].mean for f in factors)
    moved = max(abs(row["accuracy_after"] - row["accuracy_before"]) for row in rows)
    wrong = [f for f in factors if f != 1.0]
    mended = all(after[f,].mean < before[f,].mean for f in wrong)
    says = (
        f"factors {', '.join(f'{f:g}' for f in factors)}: temperature off the search by at most {worst:.1e}, off the "
        f"factor times the untouched head's by at most {scaled:.1e}; calibration error "
        f"{', '.join(f'{before[f,].mean:.3f} to {after[f,].mean:.3f}' for f in factors)}; accuracy moves by "
        f"{moved:.3f}."
    )
    if worst > EXACT or scaled > EXACT:
        right = [f for f in factors if max(r["error"] for r in rows if r["factor"] == f) <= EXACT]
        return Verdict("holds within", says, f"factors {right}") if right and mended else Verdict("does not hold", says)
    return Verdict("holds", says) if mended and spread < 0.01 and moved < 0.005 else Verdict("does not hold", says)


def figure(rows: list[Row]) -> Figure:
    factors = sorted({row["factor"] for row in rows})
    untouched = sum(row["untouched"] for row in rows) / len(rows)
    law = Line("factor times the untouched", factors, [f * untouched for f in factors], kind="theory")
    panels = [
        Panel(
            "The temperature found",
            "factor on the head",
            "temperature",
            [series(rows, "fit_temperature", "factor", "temperature"), law],
            log_x=True,
            log_y=True,
        ),
        Panel(
            "Calibration on further rows",
            "factor on the head",
            "expected calibration error",
            [series(rows, when, "factor", f"calibration_error_{when}") for when in ("before", "after")],
            log_x=True,
        ),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="temperature_calibration",
    question="Does fit_temperature undo a wrong temperature of a real classifier?",
    expected="To a thousandth of what a search over explicit logits finds, for every factor; calibration returns, "
    "accuracy does not move.",
    ids=("M-TMP-1", "M-DER-2", "M-DER-4"),
    sizes={
        "tiny": Size(grid(factor=[0.2, 5.0], steps=[20]), seeds=2, seconds=0.1),
        "quick": Size(grid(factor=[0.05, 0.2, 1.0, 5.0, 20.0], steps=[150]), seeds=5, seconds=0.4),
        "full": Size(grid(factor=[0.01, 0.05, 0.2, 1.0, 5.0, 20.0, 100.0], steps=[150]), seeds=20, seconds=0.4),
    },
    run=run,
    judge=judge,
    figure=figure,
    needs=NEEDS,
)
