"""Entropy held in a band: for partita's modules, and for a Hugging Face model on partita's attention."""

from __future__ import annotations

import pytest
import torch

import partita
from partita import nn
from partita.errors import ValueRangeError
from tests.control.models import make


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


def test_a_band_has_two_ends_in_order():
    with pytest.raises(ValueRangeError, match=r"fraction must be a finite number or \(low, high\)"):
        nn.TemperatureController(1, fraction=(0.6, 0.4))
    with pytest.raises(ValueRangeError, match="entropy must be a finite number, not negative"):
        nn.TemperatureController(1, entropy=(-1.0, 0.4))
