"""The judges of the experiments on synthetic scores and on the trained encoder can come out either way.

Each is shown rows in which its expectation is met and rows in which one thing is false: rows made here where the
experiment needs a package, else rows of a small run with one column spoilt.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from partita_studies.experiment import Row, Verdict
from partita_studies.experiments import find
from partita_studies.experiments import scale_policies as policies
from partita_studies.experiments._series import only, series, slope, slope_by_seed


def rows_of(name: str, size: str = "tiny") -> list[Row]:
    experiment = find(name)
    return [row for cell in experiment.cells(size) for row in experiment.run(cell.settings, cell.seed)]


def spoilt(rows: list[Row], change: Callable[[Row], Row]) -> list[Row]:
    return [{**row, **change(row)} for row in rows]


# ---- rows made here ------------------------------------------------------------------------------------------------


def policy_rows(
    solved: float = 0.0, law: float = 0.2, blind: float = 0.9, off: float = 0.0, kinds: str = "gaussian real"
) -> list[Row]:
    """Entropies that are straight lines in log n, of these slopes; the Gaussian law says `off` more for the blind."""
    slopes = {policies.SOLVED: solved, **dict.fromkeys(policies.LAWS, law)}

    def sharpness(name: str, n: int) -> float:  # of which half the square falls short of log n as the slope does
        return math.sqrt(2 * (1 - slopes.get(name, blind) - off) * math.log(n))

    return [
        {
            "scores": kind,
            "policy": name,
            "n": n,
            "seed": seed,
            "entropy": 1 + slopes.get(name, blind) * math.log(n),
            "sharpness": sharpness(name, n),
        }
        for kind in kinds.split()
        for name in policies.policies(1.0)
        for n in (16, 256, 1024, 4096)
        for seed in range(2)
    ]


def depth_rows(step: float, spread: float = 0.5, dilution: float = 0.8) -> list[Row]:
    return [
        {
            "length": n,
            "layer": layer,
            "seed": seed,
            "entropy": dilution * math.log(n) + 0.01 * seed,
            "normalised": 0.7 + step * layer + 0.001 * seed * layer,
            "spread": spread,
            "marks": 0.1,
            "flat": 0.0,
            "saturated": 0.0,
        }
        for n in (16, 64)
        for layer in range(6)
        for seed in range(3)
    ]


def head_rows(
    gap: float = -0.2, duplicates: int = 10, tempered: float = 0.01, seen: float = 1.0, guessed: float = 0.3
) -> list[Row]:
    made = {"random": (0.5, 1.0, 0), "copied": (0.3, 0.8, duplicates), "permuted": (0.5, 0.0, 0)}
    made |= {"tempered": (tempered, 0.9, 0), "blurred": (0.4, 0.9, 0)}
    rows: list[Row] = []
    for seed in range(3):
        common = {"seed": seed, "nearest": 0.4, "found_by_distance": seen, "found_by_entropy": guessed + 0.01 * seed}
        rows += [
            {**common, "source": source, "layer": -1, "divergence": d, "spread": s, "duplicates": pairs}
            for source, (d, s, pairs) in made.items()
        ]
        for layer in range(6):
            both = {"trained": 0.6 + gap + 0.01 * seed, "matched": 0.6}
            rows += [
                {**common, "source": s, "layer": layer, "divergence": d, "spread": 1.0, "duplicates": 0}
                for s, d in both.items()
            ]
    return rows


MADE: dict[str, tuple[list[Row], list[list[Row]]]] = {
    "scale_policies": (
        policy_rows(),
        [
            policy_rows(solved=0.2),
            policy_rows(law=0.3),
            policy_rows(law=0.02),
            policy_rows(law=-0.1),
            policy_rows(blind=0.3),
            policy_rows(off=0.06),
            policy_rows(off=-0.06),
            [policy_rows()[0]],
        ],
    ),
    "head_entropy": (depth_rows(-0.02), [depth_rows(0.02), depth_rows(0.0)]),
    "head_diversity": (
        head_rows(),
        [
            head_rows(gap=0.1),
            head_rows(duplicates=9),
            head_rows(tempered=0.9),
            head_rows(seen=0.6),
            head_rows(guessed=0.9),
            # one layer of six is enough
            [{**r, "divergence": 0.9} if r["layer"] == 3 and r["source"] == "trained" else r for r in head_rows()],
        ],
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_made_rows(name: str) -> None:
    good, bad = MADE[name]
    judge = find(name).judge
    assert judge(good).answer == "holds"
    for rows in bad:
        verdict = judge(rows)
        assert verdict.answer == "does not hold" and verdict.evidence


def test_ranges_are_named() -> None:
    mixed = policy_rows(kinds="gaussian") + policy_rows(law=0.9, kinds="clustered")
    verdict = find("scale_policies").judge(mixed)
    assert verdict == Verdict("holds within", verdict.evidence, "gaussian scores, not clustered")
    half = only(depth_rows(-0.02), length=16) + only(depth_rows(0.02), length=64)
    verdict = find("head_entropy").judge(half)
    assert verdict.answer == "holds within" and verdict.within.startswith("lengths 16 ")
    crowded = find("head_entropy").judge(depth_rows(-0.02, dilution=0.3))
    assert crowded.answer == "holds within" and "dilution" in crowded.within
    scattered = [{**r, "divergence": 0.6 + r["seed"] - 1} if r["layer"] == 3 else r for r in head_rows()]
    scattered = [{**r, "divergence": 0.6} if r["source"] == "matched" else r for r in scattered]
    verdict = find("head_diversity").judge(scattered)
    assert verdict.answer == "holds within" and "layer 3" not in verdict.within and "layer 2" in verdict.within


# ---- rows of a run, one column spoilt ------------------------------------------------------------------------------

SPOILT: dict[str, dict[str, Callable[[Row], Row]]] = {
    "condensation": {
        "the law fails early": lambda r: {"gap_ratio": 0.5},
        "entropy beyond the transition still grows with n": lambda r: {"entropy": math.log(r["n"]) / 2},
    },
    "infonce_gradients": {
        "the right gradient is wrong": lambda r: {"right_keys": 0.1},
        "the face is another loss": lambda r: {"parity": 0.1},
        "the printed gradient is right": lambda r: {"printed_positive": 0.0, "printed_negative": 0.0},
        "the printed gradient descends": lambda r: {"printed_rises": 0.0},
    },
    "controllers": {
        "the controller misses": lambda r: {"miss": 1.0} if r["case"] == "controller" else {},
        "the printed rule converges": lambda r: {"miss": 0.0} if r.get("rule") == "printed" else {},
        "the printed rule holds a model": lambda r: {"miss": 0.0} if r["case"] == "printed" else {},
        "newton never converges": lambda r: {"miss": 1.0} if r.get("rule") == "newton" else {},
    },
    "positions": {
        "ALiBi grows": lambda r: {"entropy": math.log(r["n"])} if r["encoding"] == "ALiBi" else {},
        "an opposed bias lowers entropy": lambda r: {"entropy": 0.0} if r["encoding"] == "opposed" else {},
    },
    "sparse_support": {
        "a row exceeds its ceiling": lambda r: {"over_ceiling": 1},
        "an output moves too far": lambda r: {"over_bound": 1},
        "the best raise entropy": lambda r: {"raised": 0.1},
        "no pattern raises entropy": lambda r: {"raised": 0.0},
        "a window keeps more than the best": lambda r: {"mass": 1.0} if r["pattern"] == "window" else {},
    },
    "gumbel": {
        "the argmax follows another law": lambda r: {"argmax_off": 0.5},
        "the mean of y stays off": lambda r: {"mean_off": 0.1, "largest": 0.99},
        "samples stay soft": lambda r: {"largest": 0.4, "mean_off": r["temperature"]},
    },
    "spectra": {
        "Dobrushin's bound breaks": lambda r: {"dobrushin": r["second"] / 2},
        "the stable rank exceeds its bound": lambda r: {"stable_rank": 2 * r["stable_bound"]},
        "rank is width": lambda r: {"rank": r["width"], "factor": 1.0},
    },
    "loss_geometry": {
        "cross entropy is not convex": lambda r: {"ce_smallest": -0.1},
        "squared error is convex": lambda r: {"mse_bent": 0.0},
        "a closed form is wrong": lambda r: {"autograd_off": 0.1},
        "nothing is attenuated": lambda r: {"attenuation": 1.0},
        "cross entropy stops too": lambda r: {"ce_gradient": 0.0},
        "right answers keep their gradient": lambda r: {"ce_gradient": 1.0},
    },
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_rows(name: str) -> None:
    rows = rows_of(name)
    if name == "positions":  # rows of 256 tokens are too short for ALiBi to stop: a longer run, one seed
        rows = list(find(name).run({"content": "independent", "longest": 4096}, 0))
    if name == "gumbel":  # samples enough that chance does not hide what is spoilt
        rows = [r for t in (0.05, 0.1, 0.2, 1.0) for r in find(name).run({"temperature": t, "draws": 20_000}, 0)]
    if name == "controllers":  # ten steps of training show nothing: what it should show is put in its place
        rows = [{**r, "miss": 0.0} if r["case"] == "controller" else r for r in rows]
        rows = [{**r, "miss": 1.0} if r["case"] == "printed" else r for r in rows]
    judge = find(name).judge
    assert judge(rows).answer != "does not hold", judge(rows)
    for what, change in SPOILT[name].items():
        assert judge(spoilt(rows, change)).answer == "does not hold", what


# ---- what they share -----------------------------------------------------------------------------------------------


def test_series_are_sorted_and_carry_intervals() -> None:
    rows = [{"n": n, "seed": s, "y": n + s} for n in (4, 2) for s in (0, 2)]
    line = series(rows, "both", "n", "y")
    assert list(line.x) == [2.0, 4.0] and list(line.y) == [3.0, 5.0]
    assert line.low is not None and line.low[0] < 3.0
    assert series(rows[:1], "one", "n", "y").low is None, "one run has no band"


def test_slope_of_a_power_is_its_exponent() -> None:
    rows = [{"n": n, "seed": s, "y": 3 * math.log(n) + s} for n in (2, 5, 11) for s in range(3)]
    found = slope_by_seed(rows, "n", "y")
    assert math.isclose(found.mean, 3.0) and found.half < 1e-12
    assert math.isnan(slope([1.0, 1.0], [0.0, 5.0]))


def test_printed_controller_moves_the_wrong_way() -> None:
    from partita import Gibbs
    from partita.nn import TemperatureController
    from partita_studies.experiments.controllers import HEADS, PrintedController

    torch.manual_seed(0)
    query, key = torch.randn(2, HEADS, 16, 32).unbind(0)
    stats = Gibbs(query, key, scale=1e-3).stats()  # nearly uniform, so the scale must rise
    right, wrong = TemperatureController(HEADS, fraction=0.5), PrintedController(HEADS, fraction=0.5)
    right.observe(stats)
    wrong.observe(stats)
    assert (right.log_scale > 0).all() and (wrong.log_scale < 0).all()
