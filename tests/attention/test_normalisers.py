"""Sigmoid, L1 and linear attention, by their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from partita.attn import LinearState, WeightStats, l1_attention, linear_attention, sigmoid_attention
from partita.scale import LogLength
from partita.score import Additive
from tests.attention.operands import assert_same, make


def assert_statistics(stats, weight, keep):
    """Entropy and largest share of the weights divided by their sum."""
    assert isinstance(stats, WeightStats)
    total = weight.sum(-1)
    share = weight / total.clamp(min=1e-300)[..., None]
    torch.testing.assert_close(stats.total, total)
    torch.testing.assert_close(stats.entropy, torch.special.entr(share).sum(-1))
    torch.testing.assert_close(stats.largest, share.amax(-1))
    assert torch.equal(stats.visible, keep.sum(-1).double().expand_as(total))


# ---- sigmoid ---------------------------------------------------------------------------------------------------------


def test_sigmoid_weighs_each_key_on_its_own(blocked):
    q, k, v = make()
    keep = torch.rand(7, 9) < 0.7
    keep[3] = False  # a row that sees nothing
    count = keep.sum(-1, keepdim=True).clamp(min=1).double()
    weight = torch.sigmoid(q @ k.mT / 2 - count.log()) * keep
    out, stats = sigmoid_attention(q, k, v, attn_mask=keep, return_stats=True)
    assert_same(out, weight @ v, (q, k, v))
    assert_statistics(stats, weight, keep)
    assert (out[..., 3, :] == 0).all()


def test_the_offset_of_a_sigmoid_is_learned_or_given(blocked):
    q, k, v = make()
    offset = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.sigmoid(q @ k.mT / 2 + offset[..., None])
    assert_same(sigmoid_attention(q, k, v, offset=offset), weight @ v, (q, k, v, offset))
    per_head = offset[:, :1]
    want = torch.sigmoid(q @ k.mT / 2 + per_head[..., None]) @ v
    torch.testing.assert_close(sigmoid_attention(q, k, v, offset=per_head), want)
    torch.testing.assert_close(sigmoid_attention(q, k, v, offset=per_head[:, 0]), want)
    torch.testing.assert_close(sigmoid_attention(q, k, v, offset=-1.5), torch.sigmoid(q @ k.mT / 2 - 1.5) @ v)


@pytest.mark.parametrize("n", [10, 1000])
def test_with_its_offset_a_sigmoid_adds_up_to_one_at_any_length(n):
    """n sigmoid(-log n) = n / (n + 1)."""
    _, stats = sigmoid_attention(torch.zeros(1, 2), torch.zeros(n, 2), torch.zeros(n, 1), return_stats=True)
    assert math.isclose(stats.total.item(), n / (n + 1), rel_tol=1e-5)


def test_sigmoid_takes_supports_policies_scores_and_grouped_heads():
    q, k, v = make(n=9)
    count = torch.arange(1, 10).double()
    scale = LogLength(16)(count, 4)
    weight = (torch.sigmoid(q @ k.mT * scale[:, None] - count.log()[:, None])).tril()
    assert_same(sigmoid_attention(q, k, v, is_causal=True, scale=LogLength(16)), weight @ v, (q, k, v))
    score = Additive(4, 4, 5, dtype=torch.float64)
    want = torch.sigmoid(score(q, k) - math.log(9)) @ v
    assert_same(sigmoid_attention(q, k, v, score=score), want, (q, k, v, score.weight))
    few = k[:, :1], v[:, :1]
    want = torch.sigmoid(q @ few[0].mT / 2 - math.log(9)) @ few[1]
    torch.testing.assert_close(sigmoid_attention(q, *few, enable_gqa=True), want)


# ---- L1 --------------------------------------------------------------------------------------------------------------


def test_l1_attention_is_blind_to_scale(blocked):
    q, k, v = make()
    keep = torch.rand(7, 9) < 0.7
    keep[0, 0] = True
    size = (q @ k.mT).abs() * keep
    whole = size.sum(-1, keepdim=True)
    want = size / torch.where(whole == 0, 1.0, whole) @ v
    assert_same(l1_attention(q, k, v, attn_mask=keep), want, (q, k, v))
    torch.testing.assert_close(l1_attention(q, k, v, attn_mask=keep, scale=37.0), want)
    assert_statistics(l1_attention(q, k, v, attn_mask=keep, return_stats=True)[1], size / 2, keep)
    assert (l1_attention(q, k, v, attn_mask=torch.zeros(7, 9, dtype=torch.bool)) == 0).all()


# ---- linear ----------------------------------------------------------------------------------------------------------


def weights(q, k, phi=lambda x: F.elu(x) + 1):
    return phi(q) @ phi(k).mT


def test_linear_attention_is_the_matrix_of_its_weights():
    q, k, v = make()
    w = weights(q, k)
    assert_same(linear_attention(q, k, v), w / w.sum(-1, keepdim=True) @ v, (q, k, v))
    net = torch.nn.Sequential(torch.nn.Linear(4, 6, dtype=torch.float64), torch.nn.Softplus())
    w = weights(q, k, net)
    want = w / w.sum(-1, keepdim=True) @ v
    assert_same(linear_attention(q, k, v, feature_map=net), want, (q, k, v, *net.parameters()))


@pytest.mark.parametrize("chunk", [1, 3, 7, 128])
def test_causal_chunks_change_nothing(chunk):
    q, k, v = make(n=9)
    w = weights(q, k).tril()
    want = w / w.sum(-1, keepdim=True) @ v
    assert_same(linear_attention(q, k, v, is_causal=True, chunk=chunk), want, (q, k, v))


def test_a_state_goes_on_where_it_was():
    q, k, v = make(n=9)
    whole, last = linear_attention(q, k, v, is_causal=True, chunk=4, return_state=True)
    first, state = linear_attention(*(x[..., :5, :] for x in (q, k, v)), is_causal=True, return_state=True)
    assert isinstance(state, LinearState)
    assert state.moment.shape == (2, 3, 4, 4)
    rest, end = linear_attention(*(x[..., 5:, :] for x in (q, k, v)), is_causal=True, state=state, return_state=True)
    torch.testing.assert_close(torch.cat([first, rest], -2), whole)
    torch.testing.assert_close(end, last)
    one = linear_attention(q[..., 8:, :], k[..., :0, :], v[..., :0, :], state=last)
    torch.testing.assert_close(one, whole[..., 8:, :])


@pytest.mark.parametrize("causal", [False, True])
def test_the_weights_of_linear_attention_are_looked_at_when_asked(blocked, causal):
    q, k, v = make(n=9)
    keep = (torch.rand(2, 1, 1, 9) < 0.6).expand(2, 3, 9, 9)
    keep = keep.tril() if causal else keep
    mask = keep[:, :1, -1, :]  # the last row sees all that are shown
    w = weights(q, k) * keep
    out, stats, state = linear_attention(q, k, v, key_mask=mask, is_causal=causal, return_stats=True, return_state=True)
    assert isinstance(state, LinearState)
    torch.testing.assert_close(out, linear_attention(q, k, v, key_mask=mask, is_causal=causal))
    assert_statistics(stats, w, keep)
    share = w / w.sum(-1, keepdim=True).clamp(min=1e-300)
    surprise = torch.where(share > 0, share, 1.0).log()  # the slope of p log p at 0 is no number
    assert_same(stats.entropy, -(share * surprise).sum(-1), (q, k))


def test_linear_attention_hides_keys_from_all_rows():
    q, k, v = make()
    keep = torch.rand(2, 1, 9) < 0.6
    w = weights(q, k) * keep[..., None, :]
    want = w / w.sum(-1, keepdim=True).clamp(min=1e-300) @ v
    torch.testing.assert_close(linear_attention(q, k, v, key_mask=keep), want)
    nothing = linear_attention(q, k, v, key_mask=torch.zeros(9, dtype=torch.bool))
    assert (nothing == 0).all()


def test_linear_attention_holds_no_pairs():
    """65536 positions: the matrix of pairs would take 17 GB."""
    n = 65536
    x = torch.zeros(n, 4)
    out = linear_attention(x, x, torch.arange(n, dtype=torch.float32)[:, None], is_causal=True)
    torch.testing.assert_close(out[-1], torch.tensor([(n - 1) / 2]))


def test_half_is_summed_in_float32():
    q, k, v = (x.detach().bfloat16() for x in make(n=9))
    got = linear_attention(q, k, v, is_causal=True)
    want = linear_attention(*(x.double() for x in (q, k, v)), is_causal=True)
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want).abs().max()) <= 2.0**-8 * float(v.abs().max())  # the output is rounded once


def test_linear_attention_takes_the_same_call_with_nothing_in_it():
    q, k, v = make(grad=False)
    found = linear_attention(q, k, v, attn_mask=None, scale=None, enable_gqa=False)
    assert torch.equal(found, linear_attention(q, k, v))
