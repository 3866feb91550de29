"""A policy sees what the mask shows; targets are hit; folding is scaling (M-SCL-5, M-SCL-6, M-SCL-10, M-SCL-20)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import partita
from partita import scale, support

SHAPE = (3, 2, 9, 4)
LENGTHS = torch.tensor([9, 6, 0])
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9, [2, 2, 2, 1, 1, 0, 0, 0, 0]])
SUPPORTS = {
    "causal": support.causal(),
    "windowed": support.window(3, 0),
    "padded": support.causal() & support.lengths(LENGTHS),
    "packed": support.causal() & support.segments(DOCUMENTS),
    "masked": support.mask(torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.5),
}
POLICIES = {
    "InverseSqrt": scale.InverseSqrt(),
    "KappaLog": scale.KappaLog(2.0),
    "LogLength": scale.LogLength(reference=6),
    "SqrtLogLength": scale.SqrtLogLength(reference=6),
    "Mixed": scale.Mixed(beta=2.0),
    "CalibratedLog": scale.CalibratedLog(reference=8, sigma=2.0),
    "GaussianEntropy": scale.GaussianEntropy(entropy=1.0, sigma=2.0),
    "ScalableSoftmax": scale.ScalableSoftmax(2),
}


def make():
    return tuple(torch.randn(SHAPE, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("name", SUPPORTS)
def test_the_visible_count_is_the_row_sum_of_the_mask(name):
    q, k, v = make()
    dense = SUPPORTS[name].dense(9, 9, SHAPE[:2])
    seen = []

    class Spy(scale.Policy):
        def multiplier(self, n, dim):
            seen.append(n)
            return torch.full_like(n, 0.5)

    for options in ({"support": SUPPORTS[name]}, {"attn_mask": dense}):
        _, stats = partita.attention(q, k, v, scale=Spy(), return_stats=True, **options)
        assert torch.equal(stats.visible, dense.sum(-1).double())
        assert torch.equal(seen[-1].expand(SHAPE[:3]), dense.sum(-1).clamp(min=1).double())
    added = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~dense, -torch.inf)
    _, stats = partita.attention(q, k, v, added, scale=Spy(), return_stats=True)
    assert torch.equal(stats.visible, dense.sum(-1).double())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SUPPORTS)
def test_folding_equals_scaling_and_serves_torchs_kernel(name, policy):
    q, k, v = make()
    rule, shown = POLICIES[policy], SUPPORTS[name]
    folded = rule.fold(q, shown.visible(9, 9, SHAPE[:2]))
    ours = partita.attention(q, k, v, scale=rule, support=shown)
    torch.testing.assert_close(partita.attention(folded, k, v, scale=1.0, support=shown), ours)
    dense = shown.dense(9, 9, SHAPE[:2])
    torch.testing.assert_close(F.scaled_dot_product_attention(folded, k, v, dense, scale=1.0), ours)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("target", [{"entropy": 0.7}, {"width": 2.0}, {"fraction": 0.6}], ids=str)
@pytest.mark.parametrize("name", SUPPORTS)
def test_a_target_entropy_is_hit_in_every_row_that_can_reach_it(name, target, dtype):
    q, k, v = (x.to(dtype) for x in make())
    policy = scale.TargetEntropy(**target)
    _, stats = partita.attention(q, k, v, scale=policy, support=SUPPORTS[name], return_stats=True)
    goal = policy.target(stats.visible)
    reach = (goal < stats.visible.clamp(min=1).log()) & (stats.visible >= 2)
    assert reach.any()
    assert (stats.entropy - goal)[reach].abs().max() < 1e-4
    flat = ~reach & (stats.visible > 0)
    torch.testing.assert_close(stats.entropy[flat], stats.visible[flat].log())


def test_cross_attention_counts_keys_not_queries():
    q, k = torch.randn(5, 4), torch.randn(50, 4)
    got = partita.attention(q, k, k, scale=scale.KappaLog(4.0))
    want = partita.attention(q, k, k, scale=4.0 * torch.tensor(50.0).log().item() / 4)
    torch.testing.assert_close(got, want)


def test_one_visible_key_needs_no_scale():
    """kappa log 1 / d = 0: the order scale, then mask keeps 0 * -inf out (M-ATT-7)."""
    q, k, v = make()
    out = partita.attention(q, k, v, scale=scale.KappaLog(), support=support.window(0, 0))
    torch.testing.assert_close(out, v)


def test_a_learned_scale_gets_its_gradient_through_attention():
    q, k, v = make()
    learned = scale.ScalableSoftmax(2)
    partita.attention(q, k, v, scale=learned, is_causal=True).square().sum().backward()
    s = learned.s.detach().double().requires_grad_()
    n = torch.arange(1.0, 10.0, dtype=torch.float64)
    scores = (s[:, None] * n.log() / 2)[..., None] * (q @ k.mT)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).square().sum().backward()
    torch.testing.assert_close(learned.s.grad.double(), s.grad, rtol=1e-5, atol=1e-6)
