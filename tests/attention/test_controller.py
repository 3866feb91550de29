"""The closed loop holds its target; the notes' update runs away from it (M-SCL-10). QK-clip shrinks heads."""

from __future__ import annotations

import pytest
import torch

import partita
from partita import nn, scale
from partita.errors import ShapeError, ValueRangeError


def entropy_at(scores, level):
    return partita.Gibbs(level * torch.ones(1, 1, dtype=torch.float64), scores[:, None]).stats()


@pytest.mark.parametrize("start", [1.5, 3.0])
def test_the_printed_update_diverges_and_the_controller_converges(start):
    """Same scores, same target, same start on either side of the root."""
    torch.manual_seed(0)
    scores = torch.randn(64, dtype=torch.float64)
    target = 2.0
    root = partita.solve_scale(torch.ones(1, 1, dtype=torch.float64), scores[:, None], entropy=target).item()
    assert 1.5 < root < 3.0
    printed, controlled = start, start
    for _ in range(40):
        printed *= target / max(entropy_at(scores, printed).entropy.item(), 1e-12)
        printed = min(printed, 1e12)
        stats = entropy_at(scores, controlled)
        step = (stats.entropy.item() - target) / stats.score_variance.item()
        controlled *= torch.tensor(step).clamp(-0.5, 0.5).exp().item()
    assert printed < 1e-3 or printed > 1e3  # positive feedback: away from the root on both sides
    assert controlled == pytest.approx(root, rel=1e-6)
    assert entropy_at(scores, controlled).entropy.item() == pytest.approx(target, abs=1e-6)


@pytest.mark.parametrize("target", [{"entropy": 1.2}, {"fraction": 0.6}], ids=str)
def test_a_layer_in_training_is_steered_to_its_target(target):
    torch.manual_seed(0)
    control = nn.TemperatureController(2, **target)
    layer = nn.MultiheadAttention(16, 2, batch_first=True, scale=control)
    x = torch.randn(4, 24, 16)
    for _ in range(80):
        layer(x, x, x, need_weights=False, is_causal=True)
    layer.eval()
    before = control.log_scale.clone()
    _, stats = layer(x, x, x, is_causal=True, return_stats=True)
    assert torch.equal(control.log_scale, before)  # evaluation leaves it alone
    goal = torch.full_like(stats.visible, 1.2) if "entropy" in target else 0.6 * stats.visible.log()
    usable = (stats.visible >= 2) & (goal < stats.visible.log())
    for head in range(2):
        use = usable[:, head]
        assert (stats.entropy[:, head][use] - goal[:, head][use]).mean().abs() < 0.02


def test_the_loop_follows_weights_that_grow():
    """Doubling the query weights would halve the width; the loop takes it back."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, batch_first=True, scale=nn.TemperatureController(2, fraction=0.7, gain=0.5))
    x = torch.randn(4, 24, 16)
    widths = []
    for grow in (1.0, 4.0):
        with torch.no_grad():
            layer.in_proj_weight[:16].mul_(grow)
        for _ in range(40):
            _, stats = layer(x, x, x, return_stats=True)
        widths.append(stats.entropy.mean().item())
    assert widths[1] == pytest.approx(widths[0], abs=0.02)


def test_the_scale_is_saved_as_a_buffer():
    control = nn.TemperatureController(3, entropy=1.0)
    control.log_scale.copy_(torch.tensor([0.1, 0.2, 0.3]))
    again = nn.TemperatureController(3, entropy=1.0)
    again.load_state_dict(control.state_dict())
    torch.testing.assert_close(again(torch.ones(3, 5), 16), control(torch.ones(3, 5), 16))
    assert list(control.parameters()) == []


def test_rows_without_a_choice_do_not_steer():
    control = nn.TemperatureController(1, entropy=0.5)
    q = torch.randn(1, 4, 2)
    stats = partita.Gibbs(q, q, support=partita.support.window(0, 0)).stats()
    control.observe(stats)
    assert control.log_scale.item() == 0.0
    with pytest.raises(ValueRangeError, match="exactly one"):
        nn.TemperatureController(1)
    with pytest.raises(ShapeError, match="heads"):
        nn.TemperatureController(3, entropy=0.5).observe(stats)


# ---- QK-clip ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"rotary": True, "scale": scale.LogLength()}], ids=str)
def test_clipped_heads_meet_the_limit_and_others_are_untouched(options):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        layer.in_proj_weight.mul_(3)
        layer.in_proj_bias.normal_()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    _, before = layer(x, x, x, return_stats=True)
    top = before.max_score.amax((0, 2))
    tau = float(top.median())
    factor = nn.qk_clip_(layer, before, tau)
    _, after = layer(x, x, x, return_stats=True)
    torch.testing.assert_close(after.max_score.amax((0, 2)), torch.minimum(top, torch.full_like(top, tau)))
    torch.testing.assert_close(after.mean_score.isfinite(), torch.ones_like(after.mean_score, dtype=torch.bool))
    assert (factor[top <= tau] == 1).all() and (factor[top > tau] < 1).all()


def test_clip_refuses_what_it_cannot_shrink():
    with pytest.raises(ValueRangeError, match="qk_norm"):
        nn.qk_clip_(nn.MultiheadAttention(8, 2, qk_norm=True), torch.ones(2))
    with pytest.raises(ShapeError, match="heads"):
        nn.qk_clip_(nn.MultiheadAttention(8, 2), torch.ones(3))
