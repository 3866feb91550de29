"""The closed loop holds its target; the notes' update runs away from it (M-SCL-10). QK-clip shrinks heads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita
from partita import nn, scale
from partita.errors import ValueRangeError


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


@settings(max_examples=200, deadline=None)
@given(
    log_scale=st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=2),
    dim=st.integers(0, 70),
    n=st.integers(0, 1000),
    kind=st.sampled_from([int, torch.int64, torch.float32, torch.float64]),
    wide=st.booleans(),
)
def test_the_scale_is_that_of_its_formula_in_the_precision_of_the_rows(log_scale, dim, n, kind, wide):
    control = nn.TemperatureController(2, entropy=1.0)
    control.log_scale.copy_(torch.tensor(log_scale))
    visible = n if kind is int else torch.full((5,), n, dtype=kind)
    query = torch.zeros(2, 5, dim, dtype=torch.float64) if wide else None
    found = control(visible, dim, query)
    counted = torch.float64 if kind is int or (wide and kind is torch.int64) else torch.float32
    assert found.dtype == (torch.float64 if kind is torch.float64 else counted)
    expected = torch.tensor([math.exp(x) / math.sqrt(max(dim, 1)) for x in log_scale], dtype=torch.float64)
    # an exponential to two units in the last place, one division
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected[:, None].expand(found.shape), rtol=3 * eps, atol=0)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_layer_of_float64_is_scaled_in_float64(dim):
    """Against scores written out, at a scale that float32 does not hold; no features give a uniform mean."""
    control = nn.TemperatureController(1, entropy=1.0)
    control.log_scale.fill_(0.7)
    q, k, v = (torch.randn(1, 1, 6, d, dtype=torch.float64) for d in (dim, dim, 3))
    weight = (math.exp(control.log_scale.item()) / max(dim, 1) ** 0.5 * (q @ k.mT)).softmax(-1)
    torch.testing.assert_close(partita.attention(q, k, v, scale=control), weight @ v, rtol=1e-12, atol=1e-14)


GOOD = {"entropy": 0.5}
NOT_NUMBERS = [math.nan, math.inf, -math.inf, "much", None, (1.0,), (0.1, 0.2, 0.3), (0.5, math.nan), (0.5, "much")]
BAD = [
    *({"entropy": x} for x in [*NOT_NUMBERS, -0.1, (0.5, 0.4), (-0.1, 0.4)]),
    *({"fraction": x} for x in [*NOT_NUMBERS, -0.1, (0.5, 0.4), (-0.1, 0.4), 1.5, (0.5, 1.01)]),
    *(GOOD | {"limits": x} for x in [*NOT_NUMBERS, (2, 1), (0, 1), (-1, 1), 0.0]),
    *(GOOD | {name: x} for name in ("gain", "max_step") for x in (0, -1.0, math.nan, math.inf, "much", None)),
    *(GOOD | {"heads": x} for x in (0, -1, 1.5, True, "two", None)),
]


@pytest.mark.parametrize("options", BAD, ids=str)
def test_numbers_outside_their_domain_are_refused_at_once(options):
    with pytest.raises(ValueRangeError, match=r"got|exactly one"):
        nn.TemperatureController(**{"heads": 2, **options})


def test_numbers_at_the_ends_of_their_domains_are_taken():
    for options in ({"fraction": 1.0}, {"fraction": (0.0, 1.0)}, {"entropy": 0.0}, GOOD | {"limits": (1.0, 1.0)}):
        control = nn.TemperatureController(2, **options)
        control.observe(partita.Gibbs(torch.randn(2, 4, 3), torch.randn(2, 4, 3)).stats())
        assert control.log_scale.isfinite().all()


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
