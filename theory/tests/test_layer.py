"""The parts of an attention layer: M-DER-6, M-ATT-1, M-ATT-9..13, M-RMK-2; selection: M-SPA-*."""

from __future__ import annotations

from math import log

import pytest
import torch
from draws import F64, close, gen, randn, vector
from torch.nn import functional as F

from partita import Gibbs
from partita.errors import ValueRangeError
from partita_theory import layer, robustness, selection
from partita_theory.information import entropy, entropy_of
from partita_theory.law import gibbs_law, logits_of


def test_attention_backward_in_closed_form():
    """M-DER-6, M-ATT-1 (P27): every gradient against autograd, per-row scale, bias, mask and an empty row."""
    q, k, v, g = randn(2, 5, 4), randn(2, 7, 4, seed=1), randn(2, 7, 3, seed=2), randn(2, 5, 3, seed=3)
    scale, bias = torch.rand(2, 5, generator=gen(), dtype=F64), randn(2, 5, 7, seed=4)
    keep = torch.rand(2, 5, 7, generator=gen(1)) < 0.7
    keep[0, 2] = False
    leaves = [t.clone().requires_grad_() for t in (q, k, v, bias, scale)]
    law = gibbs_law(leaves[0] @ leaves[1].transpose(-1, -2), scale=leaves[4], bias=leaves[3], keep=keep)
    (law.probs @ leaves[2] * g).sum().backward()
    got = layer.attention_backward(q, k, v, g, scale=scale, bias=bias, keep=keep)
    for mine, leaf in zip(got, leaves, strict=False):
        close(mine, leaf.grad)
    assert (got.query[0, 2] == 0).all()
    plain = law = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
    close(plain, F.scaled_dot_product_attention(q, k, v))


def test_gradient_of_one_query_is_a_covariance():
    """M-DER-6: scale * Cov_p(key, <g, value>), and X^T dQ for the projection."""
    q, k, v, g = randn(4).requires_grad_(), randn(6, 4, seed=1), randn(6, 3, seed=2), randn(3, seed=3)
    p = torch.softmax(0.7 * k @ q, -1)
    (p @ v @ g).backward()
    close(layer.query_gradient(p.detach(), k, v, g, 0.7), q.grad)
    x, w = randn(5, 8, seed=4), randn(8, 4, seed=5).requires_grad_()
    out = torch.softmax(x @ w @ k.T, -1) @ v
    out.sum().backward()
    dq = layer.attention_backward(x @ w.detach(), k, v, torch.ones(5, 3, dtype=F64)).query
    close(layer.projection_gradients(x, dq), w.grad)


def test_bias_has_no_fixed_sign():
    """M-ATT-9 (P38): a distance bias that cancels the content raises H to log 64, another one lowers it; unscaled."""
    bias = layer.distance_bias(1, 64, 0.05)[0]
    square = layer.distance_bias(3, 5, 0.5)
    assert square.tolist() == [[-0.5 * abs(i - j) for j in range(5)] for i in range(3)]
    assert entropy(-bias) < log(64) - 0.1
    assert entropy(logits_of(-bias, 1.0, bias)) == pytest.approx(log(64))
    assert entropy(logits_of(bias, 1.0, bias)) < entropy(bias)
    close(logits_of(torch.zeros(64, dtype=F64), 9.0, bias), bias)
    p = Gibbs(torch.zeros(1, 2, dtype=F64), torch.zeros(64, 2, dtype=F64), scale=9.0, bias=bias[None])
    assert p.entropy().item() == pytest.approx(float(entropy(bias)))


def test_sinusoidal_positions():
    """M-ATT-10 (P37, P49, N (74)): similarity by lag as printed, oscillating; random position terms lower H."""
    lags = torch.tensor([0, 1, 2, 4, 8, 16, 32])
    printed = vector(32, 30.92, 28.30, 23.93, 22.41, 19.37, 19.55)
    similarity = layer.sinusoidal_similarity(torch.arange(2000), 64)
    close(similarity[lags], printed, atol=6e-3, rtol=0)
    p = layer.sinusoidal_positions(2000, 64)
    close(p[100] @ p[:101].T, similarity[:101].flip(0))
    close(p.square().sum(-1), torch.full((2000,), 32.0, dtype=F64))
    rises = (similarity.diff() > 0).nonzero()[0]
    assert rises.item() == 5
    assert similarity.min() == pytest.approx(-3.29, abs=5e-3)
    assert similarity.argmin() == 1713
    parts = layer.score_parts(randn(4), randn(4, seed=1), p[3, :4], p[9, :4])
    assert parts.total == pytest.approx(float((randn(4) + p[3, :4]) @ (randn(4, seed=1) + p[9, :4])))
    w = randn(4, 4, seed=2)
    before, after = (randn(4) + p[3, :4]) @ w, randn(4) @ w + p[3, :4]
    assert not torch.allclose(before, after)  # before the projection is not after it
    with pytest.raises(ValueRangeError, match="even dim"):
        layer.sinusoidal_positions(4, 5)


def test_cost():
    """M-ATT-13 (P29): counted by running the products; projections dominate below 2 d_model."""
    c = layer.attention_cost(512, 512, 8)
    assert (c.projections, c.attention) == (536870912, 268435456)
    assert c.stored_weights == 512 * 512 * 8
    from torch.utils.flop_counter import FlopCounterMode

    x, w = torch.randn(1, 32, 16), torch.randn(16, 16)
    with FlopCounterMode(display=False) as counter:
        q = k = v = (x @ w).view(1, 32, 4, 4).transpose(1, 2)
        (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).sum()
    small = layer.attention_cost(32, 16, 4)
    assert counter.get_total_flops() == 2 * (small.attention + small.projections // 4)
    n = layer.balance_length(96)
    at = layer.attention_cost(n, 96, 2)
    assert at.attention == at.projections
    with pytest.raises(ValueRangeError, match="divide"):
        layer.attention_cost(8, 10, 3)


def test_norms_need_their_epsilon():
    """M-RMK-2 (N (44), (45), P47): torch's functions, length sqrt(d), 0 instead of NaN for constant vectors."""
    x = 3 + 2 * randn(5, 64)
    close(layer.layer_norm(x), F.layer_norm(x, (64,)))
    close(layer.rms_norm(x, 1e-6), F.rms_norm(x, (64,), eps=1e-6))
    assert layer.layer_norm(x).norm(dim=-1)[0] == pytest.approx(8, abs=1e-3)
    assert layer.rms_norm(x).norm(dim=-1)[0] == pytest.approx(8, abs=1e-5)
    constant = torch.full((64,), 5.0, dtype=F64)
    assert layer.layer_norm(constant, eps=0.0).isnan().all()
    assert (layer.layer_norm(constant) == 0).all()
    assert layer.rms_norm(torch.zeros(4), eps=0.0).isnan().all()


def test_top_k_identities():
    """M-SPA-1: TV, KL, output bound and entropy for every k, ties broken by index, gradient to kept keys only."""
    z, v = 2 * randn(30, 9), randn(9, 3, seed=1)
    p = torch.softmax(z, -1)
    diameter = robustness.value_diameter(v)
    for k in (1, 3, 9):
        law, mass = selection.top_k_law(z, k)
        loss = selection.top_k_loss(mass, diameter)
        close((law - p).abs().sum(-1) / 2, loss.total_variation)
        ratio = torch.where(law > 0, (law / p).log(), 0.0)
        close((law * ratio).sum(-1), loss.divergence)
        assert ((law @ v - p @ v).norm(dim=-1) <= loss.output + 1e-12).all()
        assert (entropy_of(law) <= torch.minimum(torch.tensor(log(k)), entropy_of(p)) + 1e-12).all()
    assert selection.top_k_law(torch.zeros(4), 2).probs.tolist() == [0.5, 0.5, 0.0, 0.0]
    leaf = z[0].clone().requires_grad_()
    selection.top_k_law(leaf, 3).probs.square().sum().backward()
    assert (leaf.grad != 0).sum() == 3
    many = 3 * randn(50_000, 6, seed=2)
    assert (entropy_of(selection.top_k_law(many, 3).probs) <= entropy(many) + 1e-12).all()
    with pytest.raises(ValueRangeError, match="between 1"):
        selection.top_k_law(z, 10)


def test_hard_attention():
    """M-SPA-2 (C (54), (56)): the limit of softmax, its distance bounds, and the mean at ties."""
    s, v = randn(20, 8), randn(8, 3, seed=1)
    hard = selection.hard_choice(s, v.expand(20, 8, 3))
    close(hard, v[s.argmax(-1)])
    close(torch.softmax(1e6 * s, -1) @ v, hard, atol=1e-6, rtol=0)
    rest, bound = selection.hard_gap(s, 3.0)
    assert (rest <= bound).all()
    soft = torch.softmax(3 * s, -1) @ v
    assert ((soft - hard).norm(dim=-1) <= rest * robustness.value_diameter(v) + 1e-12).all()
    tie = vector(1.0, 1.0, 0.0)
    close(selection.hard_choice(tie, v[:3]), v[:2].mean(0))
    assert [x.tolist() for x in selection.hard_gap(torch.tensor([[2.0], [-1.0]]))] == [[0, 0], [0, 0]]  # of one key


def test_gumbel_softmax():
    """M-SPA-3 (P40): argmax follows softmax at every temperature; the mean sample does not; limits; gradients."""
    z = vector(2.0, 1.0, 0.0)
    p = torch.softmax(z, -1)
    noise = selection.gumbel_noise(400_000, 3, generator=gen())
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, rel=0.02)
    for t in (0.1, 1.0, 10.0):
        y = selection.gumbel_softmax(z, t, noise)
        frequency = F.one_hot(y.argmax(-1), 3).double().mean(0)
        close(frequency, p, atol=4e-3, rtol=0)
    y = selection.gumbel_softmax(z, 1.0, noise).mean(0)
    close(y, vector(0.569, 0.289, 0.142), atol=3e-3, rtol=0)
    assert selection.gumbel_softmax(z, 1e-3, noise[:1000]).amax(-1).mean() > 0.99
    assert (selection.gumbel_softmax(z, 1e4, noise[:1000]) - 1 / 3).abs().max() < 1e-2
    leaf = z.clone().requires_grad_()
    one_hot = selection.straight_through(selection.gumbel_softmax(leaf, 0.5, noise[0]))
    assert one_hot.detach().round(decimals=6).sort().values.tolist() == [0.0, 0.0, 1.0]
    one_hot[0].backward()
    soft = z.clone().requires_grad_()
    selection.gumbel_softmax(soft, 0.5, noise[0])[0].backward()
    close(leaf.grad, soft.grad)
