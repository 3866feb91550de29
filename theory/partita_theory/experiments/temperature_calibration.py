"""`fit_temperature` on a real classifier of a wrong temperature: digits, its head multiplied by a factor.

One temperature is fitted on rows it has not seen, from streamed statistics, and compared with a search over the
explicit logits in float64. It should be the factor times the temperature of the untouched head, and change no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from partita import metrics
from partita.calibration import fit_temperature
from partita.losses import LossStats, cross_entropy, linear_cross_entropy
from partita.scale.relevant import lowest
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._digits import NEEDS, fit, network, split
from partita_theory.figure import Panel
from partita_theory.results import Row, columns, mean_by, theory
from partita_theory.verdict import Verdict, settle

EXACT = 1e-3  # relative error of the temperature that counts as none


def searched(logits: Tensor, y: Tensor) -> float:
    """The best temperature by golden section in log T: an independent answer, the loss being convex in 1/T."""
    z = logits.double()
    return math.exp(lowest(lambda x: F.cross_entropy(z / math.exp(x), y).item(), math.log(1e-3), math.log(1e3), 1e-6))


def measure(seed: int, factor: float, steps: int) -> Iterable[Row]:
    data, model = split(seed), network(seed)
    fit(model, data.x, data.y, cross_entropy, steps)
    body, head = model[:2], model[2]
    assert isinstance(head, torch.nn.Linear)
    with torch.no_grad():
        weight, bias = (factor * t for t in (head.weight, head.bias))
        tune, test = body(data.x_tune), body(data.x_test)
        own = searched(F.linear(tune, head.weight, head.bias), data.y_tune)
        best = searched(F.linear(tune, weight, bias), data.y_tune)
        found = fit_temperature(tune, weight, data.y_tune, bias=bias).item()
        row: Row = {"temperature": found, "searched": best, "untouched": own}
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
    worst = max(row["error"] for row in rows)
    scaled = max(abs(row["temperature"] / (row["factor"] * row["untouched"]) - 1) for row in rows)
    before, after = (mean_by(rows, f"calibration_error_{when}", "factor") for when in ("before", "after"))
    factors = sorted(after)
    spread = max(v.mean for v in after.values()) - min(v.mean for v in after.values())
    moved = max(abs(row["accuracy_after"] - row["accuracy_before"]) for row in rows)
    mended = all(after[f].mean < before[f].mean for f in factors if f != 1.0)
    says = (
        f"factors {', '.join(f'{f:g}' for f in factors)}: temperature off the search by at most {worst:.1e}, off the "
        f"factor times the untouched head's by at most {scaled:.1e}; calibration error "
        f"{', '.join(f'{before[f]:.3f} to {after[f]:.3f}' for f in factors)}; accuracy moves by {moved:.3f}."
    )
    if worst <= EXACT and scaled <= EXACT:
        return settle(says, whole=mended and spread < 0.01 and moved < 0.005)
    right = [f for f in factors if max(row["error"] for row in rows if row["factor"] == f) <= EXACT]
    return settle(says, holds=bool(right) and mended, whole=False, within=f"factors {right}")


def panels(rows: list[Row]) -> list[Panel]:
    untouched = sum(row["untouched"] for row in rows) / len(rows)
    found = columns(rows, "factor", {"fit_temperature": "temperature"})
    found.append(theory("factor times the untouched", sorted({row["factor"] for row in rows}), lambda f: f * untouched))
    errors = columns(rows, "factor", {when: f"calibration_error_{when}" for when in ("before", "after")})
    x, y = "factor on the head", "expected calibration error"
    return [
        Panel("The temperature found", x, "temperature", found, log_x=True, log_y=True),
        Panel("Calibration on further rows", x, y, errors, log_x=True),
    ]


EXPERIMENT = experiment(
    __name__,
    question="Does fit_temperature undo a wrong temperature of a real classifier?",
    expected="To a thousandth of what a search over explicit logits finds, for every factor; calibration returns, "
    "accuracy does not move.",
    ids=("M-TMP-1", "M-DER-2", "M-DER-4"),
    tiny=Size(grid(factor=[0.2, 5.0], steps=20), seeds=2, seconds=0.1),
    quick=Size(grid(factor=[0.05, 0.2, 1.0, 5.0, 20.0], steps=150), seeds=5, seconds=0.4),
    full=Size(grid(factor=[0.01, 0.05, 0.2, 1.0, 5.0, 20.0, 100.0], steps=150), seeds=20, seconds=0.4),
    needs=NEEDS,
)
