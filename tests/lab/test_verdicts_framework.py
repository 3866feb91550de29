"""The verdicts on noise, perturbations and the floor come out negative when the rows contradict the statement."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from partita.lab.experiment import Row, Verdict
from partita.lab.experiments import find


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


def judged(name: str, change: Callable[[Row], Row] = lambda row: row) -> Verdict:
    return find(name).judge([change(dict(row)) for row in rows_of(name)])


def test_noise_cancellation() -> None:
    """M-ROB-2: the orders are found; a bias of another order, or a tie that cancels, is noticed."""
    assert judged("noise_cancellation").answer in ("holds", "holds within")
    slower = judged("noise_cancellation", lambda r: r | {"bias_size": r["n"] ** -0.5})
    assert slower.answer == "does not hold" and "bias n^-0.500" in slower.evidence
    assert judged("noise_cancellation", lambda r: r | {"sd": r["n"] ** -0.5}).answer == "does not hold"
    assert judged("noise_cancellation", lambda r: r | {"bias_predicted": 3 * r["bias"]}).answer == "does not hold"
    assert judged("noise_cancellation", lambda r: r | {"common": 0.1}).answer == "does not hold"


def test_noise_families() -> None:
    """M-ROB-3: a closed form that is off by more than the simulation allows is noticed; a wrong exponent narrows."""
    assert judged("noise_families").answer in ("holds", "holds within")
    for z in ("mean_z", "cv2_z"):
        assert judged("noise_families", lambda r, z=z: r | ({z: 9.0} if z in r else {})).answer == "does not hold"
    flat = judged("noise_families", lambda r: r | ({"log": 0.0} if r["n"] else {}))
    assert flat.answer == "holds within" and "gaussian 0.25" in flat.within


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
