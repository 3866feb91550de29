"""The verdicts on noise, perturbations and the floor come out negative when the rows contradict the statement."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest

from partita.theory.robustness import laplace_error_exponent
from partita_studies.experiment import Row, Verdict
from partita_studies.experiments import find


@cache
def rows_of(name: str) -> tuple[Row, ...]:
    """The tiny size, with as many draws and steps as the statement needs to be seen."""
    experiment = find(name)
    more = {"budget": 2**19, "steps": 400}
    found: list[Row] = []
    for cell in experiment.cells("tiny"):
        found += experiment.run({k: more.get(k, v) for k, v in cell.settings.items()}, cell.seed)
    if name == "noise_cancellation":  # an order needs a longer lever
        for kind in ("grid", "random", "tie"):
            found += [r for seed in (0, 1) for r in experiment.run({"row": kind, "n": 1024, "budget": 2**20}, seed)]
    return tuple(found)


def as_expected(name: str, row: Row) -> Row:
    """The row with what chance decides at this size put where the statement says; what is spoilt is spoilt after."""
    if name == "noise_cancellation":
        sd = 0.3 if row["row"] == "tie" else row["n"] ** -0.5
        found = {"bias": row["bias_predicted"], "bias_size": 1 / row["n"], "sd": sd, "sd_predicted": sd}
        return row | found | {"bias_error": 1e-9, "sd_error": 1e-9}
    if name == "noise_families" and row["n"]:
        order = laplace_error_exponent(row["width"]) if row["family"] == "laplace" else -0.5
        return row | {"log": order * math.log(row["n"]) + 0.001 * (row["seed"] % 2)}
    if name == "noise_families":
        return row | {z: 0.5 for z in ("mean_z", "cv2_z", "plain_z") if z in row}
    if name == "entropy_floor":
        return row | {"descent": row["floor"] + 1e-9, "gaussian": row["floor"] - 0.1}
    return row


def judged(name: str, change: Callable[[Row], Row] = lambda row: row) -> Verdict:
    return find(name).judge([change(as_expected(name, dict(row))) for row in rows_of(name)])


def test_noise_cancellation() -> None:
    """M-ROB-2: the orders are found; a bias of another order, or a tie that cancels, is noticed."""
    assert judged("noise_cancellation").answer == "holds"
    slower = judged("noise_cancellation", lambda r: r | {"bias_size": r["n"] ** -0.5})
    assert slower.answer == "does not hold" and "bias n^-0.500" in slower.evidence
    assert judged("noise_cancellation", lambda r: r | {"sd": r["n"] ** -0.5}).answer == "does not hold"
    assert judged("noise_cancellation", lambda r: r | {"bias_predicted": 3 * r["bias"]}).answer == "does not hold"
    assert judged("noise_cancellation", lambda r: r | {"common": 0.1}).answer == "does not hold"


def test_noise_families() -> None:
    """M-ROB-3, M-ROB-4: a closed form that is off by more than the simulation allows, or an exponent, is noticed."""
    assert judged("noise_families").answer == "holds"
    for z in ("mean_z", "cv2_z", "plain_z"):
        assert judged("noise_families", lambda r, z=z: r | ({z: 9.0} if z in r else {})).answer == "does not hold"
    for family, width in (("gaussian", 0.5), ("laplace", 0.7), ("laplace", 1.2)):
        chosen = {"family": family, "width": width}

        def steeper(r: Row, by: float, chosen: Row = chosen) -> Row:
            return r | ({"log": r["log"] + by * math.log(r["n"])} if r["n"] and chosen.items() <= r.items() else {})

        for by in (-0.1, 0.1):
            wrong = judged("noise_families", lambda r, by=by, steeper=steeper: steeper(r, by))
            assert wrong.answer == "does not hold" and f"{family} {width:g}" in wrong.evidence, (family, width, by)
    flat = judged("noise_families", lambda r: r | ({"log": 0.0} if r["n"] else {}))
    assert flat.answer == "does not hold"


@pytest.mark.parametrize("broken", [{"weights": 1.01}, {"outputs": 1.01}, {"two_keys": 0.9}, {"least": -0.1}])
def test_lipschitz(broken: Row) -> None:
    """M-ROB-6, M-ROB-7, M-ROB-10: a bound passed, a bound not reached, an exact attack beaten by the sign rule."""
    assert judged("lipschitz").answer in ("holds", "holds within")
    assert judged("lipschitz", lambda r: r | broken).answer == "does not hold"
    assert judged("lipschitz", lambda r: r | {"sign_rule": 0.5}).answer == "does not hold"
    always = judged("lipschitz", lambda r: r | {"sign_rule": 1.0, "l2": 1.0})
    assert always.answer == "holds"


def test_entropy_floor() -> None:
    """M-INF-2: a row below the floor, a descent below it, poles that miss it, and a floor nobody reaches."""
    assert judged("entropy_floor").answer == "holds"
    for change in ("least", "descent", "poles"):
        under = judged("entropy_floor", lambda r, c=change: r | {c: r["floor"] - 1e-6})
        assert under.answer == "does not hold", change
    assert judged("entropy_floor", lambda r: r | {"descent": r["floor"] + 1}).answer == "does not hold"
    assert judged("entropy_floor", lambda r: r | {"gaussian": r["floor"] + 1}).answer == "does not hold"
