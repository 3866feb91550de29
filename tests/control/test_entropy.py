"""Entropy held in a band: for partita's modules, and for a Hugging Face model on partita's attention."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

import partita
from partita import nn
from partita.errors import ValueRangeError
from tests.control.models import make

EXAMPLES = Path(__file__).parents[2] / "examples"


def stats_of(query, key, level):
    return partita.Gibbs(level * query, key).stats()


def test_inside_the_band_nothing_is_done_and_outside_it_moves_towards_it():
    torch.manual_seed(0)
    query, key = torch.randn(1, 40, 8), torch.randn(1, 30, 8)
    for level, sign in ((0.01, 1), (0.35, 0), (3.0, -1)):
        control = nn.TemperatureController(1, fraction=(0.6, 0.95))
        stats = stats_of(query, key, level)
        miss = control.observe(stats)
        share = float((stats.entropy / stats.visible.log()).mean())
        assert (share > 0.95) - (share < 0.6) == sign == int(control.log_scale.sign())
        assert (miss == 0) == (sign == 0)


def test_a_collapsed_hugging_face_model_is_brought_into_the_band():
    """Entropy collapse provoked by large weights; each head's own scale takes it back, in training only."""
    model, batch = make("llama", torch.float32)
    controls = {}

    def scale_of(module):
        return controls.setdefault(module.layer_idx, nn.TemperatureController(4, fraction=(0.4, 0.6)))

    def shares():
        model.eval()
        out = model(**batch, output_attentions=True).attentions
        model.train()
        rows = [(s.entropy / s.visible.log())[..., 1:].mean((0, 2)) for s in out]  # the first row has one key
        return torch.stack(rows)

    model.set_attn_implementation(partita.hf.register("partita-steered", scale=scale_of))
    before = shares()
    assert all(not c.log_scale.any() for c in controls.values())  # evaluation steers nothing
    assert (before < 0.4).any()
    for _ in range(60):
        model(**batch)
    after = shares()
    # the band is of the mean over rows of H against that of log n; the mean of the quotients differs a little
    assert ((after > 0.3) & (after < 0.7)).all(), after
    assert (after - 0.5).abs().max() < (before - 0.5).abs().max()


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("entropy_band")
    sys.path.remove(str(EXAMPLES))


def test_the_example_collapses_without_and_learns_with_the_controller(example):
    loss, share = (example.smooth(x)[-1] for x in example.train(None, 300))
    assert loss > 0.9 * math.log(example.SYMBOLS) and share < 0.01
    loss, share = (example.smooth(x)[-1] for x in example.train((0.2, 1.0), 300))
    assert loss < 0.5 * math.log(example.SYMBOLS) and share > 0.15


def test_the_example_draws(example, tmp_path):
    runs = {name: example.train(band, 3) for name, band in (("plain", None), ("held", (0.2, 1.0)))}
    example.draw(runs, str(tmp_path / "figure.svg"))
    assert (tmp_path / "figure.svg").read_text().startswith("<svg")


def test_a_band_has_two_ends_in_order():
    with pytest.raises(ValueRangeError, match=r"a band is \(low, high\)"):
        nn.TemperatureController(1, fraction=(0.6, 0.4))
    with pytest.raises(ValueRangeError, match="the target"):
        nn.TemperatureController(1, entropy=(-1.0, 0.4))
