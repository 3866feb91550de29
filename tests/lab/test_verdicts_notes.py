"""The judges of the studies on normalisers, entropy in training, starts and regression can come out either way.

Each is shown rows made here in which its expectation is met, and rows in which one thing is false. The numbers jitter a
little with the seed, so that intervals are neither empty nor infinite.
"""

from __future__ import annotations

import importlib.util
import itertools
import math

import pytest
import torch

from partita.lab.draw import svg
from partita_studies.experiment import Row, Verdict
from partita_studies.experiments import find, regression_noise, training_dynamics
from partita_studies.experiments._patches import Reader

SEEDS = range(4)
DIGITS = importlib.util.find_spec("sklearn") is not None


def verdict(name: str, rows: list[Row]) -> Verdict:
    experiment = find(name)
    assert svg(experiment.figure(rows)).startswith("<svg")
    return experiment.judge(rows)


# ---- normalisers ---------------------------------------------------------------------------------------------------


def normaliser_rows(**wrong: float) -> list[Row]:
    """Weights that are powers of n; `wrong` changes an exponent, or a change by noise or an outlier."""
    powers = {"softmax": 0.0, "sink": 0.0, "sigmoid": -0.3, "l1": -1.0, "linear": -1.0} | wrong
    rows = []
    for kind, n, seed in itertools.product(("softmax", "sink", "sigmoid", "l1", "linear"), (16, 256, 4096), SEEDS):
        weight = 0.9 * n ** powers[kind] * (1 + 0.001 * seed)
        moved = 0.05 if kind != "l1" else wrong.get("l1_noise", 0.0)
        far = 0.0 if kind != "l1" else wrong.get("l1_outlier", 0.1)
        row = {"normaliser": kind, "n": n, "seed": seed, "weight": weight, "log_weight": math.log(weight)}
        jitter = 1e-4 * seed * (1 + (kind == "l1"))
        rows.append(row | {"moved": moved + jitter, "relative": moved, "outlier": far + jitter})
    return rows


@pytest.mark.parametrize(
    "wrong",
    [
        {"softmax": -0.5},
        {"sink": -0.5},
        {"l1": -0.4},
        {"linear": 0.0},
        {"l1_noise": 0.2},
        {"l1_outlier": -0.1},
        {"softmax": -1.1, "l1": -1.0},
    ],
    ids=str,
)
def test_each_part_on_normalisers_can_fail(wrong):
    assert verdict("normalisers", normaliser_rows()).answer == "holds"
    assert verdict("normalisers", normaliser_rows(**wrong)).answer == "does not hold"


# ---- optimal entropy -----------------------------------------------------------------------------------------------


def scale_rows(best: float = 3.0, theory: float = 3.0, rise: float = 1.0) -> list[Row]:
    """Parabolas in the scale; noisier values have their best at an entropy that is `rise` higher."""
    rows = []
    for n, noise, seed in itertools.product((64, 256), (0.3, 3.0), SEEDS):
        for scale in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
            row = {"n": n, "noise": noise, "seed": seed, "scale": scale}
            row |= {"error": 1 + (scale - best) ** 2, "predicted": 1 + (scale - theory) ** 2}
            rows.append(row | {"entropy": 5 - 0.5 * scale + (rise if noise > 1 else 0.0) + 0.001 * seed * noise})
    return rows


@pytest.mark.parametrize("wrong", [{"best": 0.0, "theory": 0.0}, {"theory": 5.0}, {"rise": -1.0}], ids=str)
def test_each_part_on_the_best_scale_can_fail(wrong):
    assert verdict("optimal_entropy", scale_rows()).answer == "holds"
    assert verdict("optimal_entropy", scale_rows(**wrong)).answer == "does not hold"


def test_the_best_scales_are_named():
    assert "3.00 and 5.00 at noise 0.3" in verdict("optimal_entropy", scale_rows(theory=5.0)).evidence


# ---- training ------------------------------------------------------------------------------------------------------


def training_rows(**wrong: float) -> list[Row]:
    """H / log n at the start and the end, by layer; `wrong` overrides what a treatment, depth or modality adds."""
    adds = {"dropout": 0.1, "decay": 0.1, "broad": 0.2, "sharp": -0.2} | wrong
    rows = []
    names = training_dynamics.TREATMENTS
    for kind, name, seed in itertools.product(training_dynamics.MODELS, names, SEEDS):
        for step, layer in itertools.product((0, 8), (0, 1)):
            level = 0.9 if step == 0 else 0.5 + wrong.get("trained", 0.0)
            level += adds.get(name, 0.0) * (step > 0) + layer * wrong.get("deeper", -0.1)
            level += wrong.get("images", 0.1) * (kind == "images")
            outside = 5.0 + (wrong.get("held_out", -0.5) if name == "broad" else 0.0)
            # no two arms scatter alike
            jitter = 0.001 * (seed * (1 + layer + len(name) + len(kind) + step) % 5)
            row = {"model": kind, "treatment": name, "seed": seed, "step": step, "layer": layer, "loss": 1.0}
            row |= {"entropy": level + jitter, "lowest": level - 0.1, "highest": level + 0.1, "spread": 0.2}
            rows.append(row | {"held_out": outside + jitter})
    return rows


@pytest.mark.parametrize(
    "wrong",
    [
        {"trained": 0.5},
        {"dropout": -0.1},
        {"decay": -0.1},
        {"broad": -0.1},
        {"sharp": 0.1},
        {"deeper": 0.1},
        {"held_out": 0.5},
        {"images": -0.1},
    ],
    ids=str,
)
def test_each_part_on_training_can_fail(wrong):
    assert verdict("training_dynamics", training_rows()).answer == "holds"
    assert verdict("training_dynamics", training_rows(**wrong)).answer == "does not hold"


def test_treatments_reach_every_layer():
    model = Reader(16, 4, 2)
    training_dynamics.treat(model, {"dropout": 0.2, "weight": -0.3})
    for layer in model.layers:
        assert layer.self_attn.dropout == 0.2 and layer.self_attn.attention_entropy_weight == -0.3
        assert layer.dropout1.p == layer.dropout2.p == layer.dropout.p == 0.2


def test_the_share_of_entropy_is_that_of_the_layer():
    """Even attention has share 1 in every head, with a causal row of one key left out."""
    model = Reader(16, 4, 2)
    with torch.no_grad():
        for layer in range(2):
            model.attention(layer).in_proj_weight[:32] = 0.0
    for heads in training_dynamics.shares(model, torch.rand(3, 64)):
        torch.testing.assert_close(heads, torch.ones(4))
    model.causal = True
    for heads in training_dynamics.shares(model, torch.rand(3, 64)):
        torch.testing.assert_close(heads, torch.ones(4))


# ---- a penalty on the entropy of attention -------------------------------------------------------------------------


def penalty_rows(
    broad: float = 0.3,
    sharp: float = -0.2,
    accuracy: float = 0.0,
    gap: float = -0.3,
    alike: float = -0.3,
    apart: float = 0.2,
) -> list[Row]:
    rows = []
    for weight, train, seed in itertools.product((-1.0, -0.3, 0.0, 0.3, 1.0), (64, 512), SEEDS):
        jitter = 0.001 * (seed * (2 + round(10 * weight) + train) % 5)
        up, down = max(weight, 0.0), max(-weight, 0.0)
        row = {"weight": weight, "train": train, "seed": seed, "held_out": 1.0, "loss": 0.1, "spread": 0.1}
        row["entropy"] = 0.5 + broad * up + sharp * down + jitter
        row["accuracy"] = 0.8 + accuracy * (abs(weight) == 0.3) + jitter
        row["gap"] = 0.9 + gap * up + jitter
        rows.append(row | {"diversity": 0.6 + alike * up + apart * down + jitter})
    return rows


@pytest.mark.parametrize(
    "wrong",
    [{"broad": -0.3}, {"sharp": 0.2}, {"accuracy": -0.1}, {"gap": 0.3}, {"alike": 0.3}, {"apart": -0.2}],
    ids=str,
)
def test_each_part_on_the_penalty_can_fail(wrong):
    assert verdict("attention_entropy", penalty_rows()).answer == "holds"
    assert verdict("attention_entropy", penalty_rows(**wrong)).answer == "does not hold"


# ---- starts --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not DIGITS, reason="needs scikit-learn; make test-peers installs it")
def test_a_start_that_is_not_where_it_was_asked_to_be_is_noticed(monkeypatch):
    from partita_studies.experiments import initialisation

    def start(sigma: float, scale: str = "1") -> float:
        (row,) = initialisation.run({"scale": scale, "sigma": sigma, "steps": 0}, 0)
        return float(row["sharpness"])

    for scale in initialisation.SCALES:
        assert start(1.0, scale) == pytest.approx(1.0, rel=initialisation.CLOSE)
    honest = initialisation.init_sharpness_
    monkeypatch.setattr(initialisation, "init_sharpness_", lambda m, sigma, length: honest(m, sigma=2 * sigma))
    assert start(1.0) == pytest.approx(2.0, rel=initialisation.CLOSE)


# ---- regression ----------------------------------------------------------------------------------------------------


def noise_rows(
    gaussian: float = math.pi / 2, laplace: float = 0.5, found: float = 1.0, gain: float = 0.1, real: float = 0.1
) -> list[Row]:
    rows = []
    for noise, loss, seed in itertools.product(regression_noise.NOISES, regression_noise.LOSSES, SEEDS):
        right = {"gaussian": "squared", "laplace": "absolute", **regression_noise.REAL}[noise]
        drawn = noise in regression_noise.DRAWN
        row = {"noise": noise, "n": 300, "loss": loss, "seed": seed}
        row["nll"] = 1.4 + (0.0 if loss == right else gain if drawn else real) + 0.001 * seed * (loss == right)
        row["scale"] = found * regression_noise.TRUE_SCALE.get((noise, loss), 1.0) * (1 + 0.001 * seed)
        if drawn:
            ratio = {"gaussian": gaussian, "laplace": laplace}[noise]
            row["excess"] = (ratio if loss == "absolute" else 1.0) * (1 + 0.01 * seed * (loss == right))
            row["log_excess"] = math.log(row["excess"])
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    "wrong",
    [
        {"gaussian": 0.9},
        {"gaussian": 3.0},
        {"laplace": 1.1},
        {"laplace": 0.2},
        {"found": 1.3},
        {"gain": -0.1},
        {"real": -0.1},
    ],
    ids=str,
)
def test_each_part_on_noise_can_fail(wrong):
    assert verdict("regression_noise", noise_rows()).answer == "holds"
    assert verdict("regression_noise", noise_rows(**wrong)).answer == "does not hold"


@pytest.mark.skipif(not DIGITS, reason="needs scikit-learn; make test-peers installs it")
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_drawn_noise_has_the_moments_it_should(noise):
    """Standard deviation 1, and the mean size of its family: sqrt(2 / pi), or sqrt(1/2)."""
    sizes = []
    for seed in range(40):
        data = regression_noise.draw(noise, seed)
        sizes.append(data.y - data.clean)
    gap = torch.cat(sizes)
    # 17,680 draws: four standard errors of the mean size are 0.021 at most, of the deviation 0.034 (Laplace)
    assert gap.std().item() == pytest.approx(1.0, abs=0.034)
    assert gap.abs().mean().item() == pytest.approx(
        (2 / math.pi) ** 0.5 if noise == "gaussian" else 0.5**0.5, abs=0.021
    )


def test_the_fit_is_least_squares_or_the_median():
    """On a column of ones alone the squared error finds the mean, the absolute error the median, with their scales."""
    y = torch.tensor([0.0, 1.0, 2.0, 3.0, 14.0], dtype=torch.float64)
    ones = torch.ones(5, 1, dtype=torch.float64)
    weight, scale = regression_noise.fit(ones, y, regression_noise.gaussian_nll_loss, 2000)
    assert weight.item() == pytest.approx(4.0, abs=1e-3)
    assert scale.item() == pytest.approx((y - 4).square().mean().sqrt().item(), rel=1e-3)
    weight, scale = regression_noise.fit(ones, y, regression_noise.laplace_nll_loss, 2000)
    assert weight.item() == pytest.approx(2.0, abs=1e-2)
    assert scale.item() == pytest.approx((y - 2).abs().mean().item(), rel=1e-2)
