"""Position settings: frequencies by their formulas, clipped distances against dense scores in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from partita import nn, scale, support
from partita.attn import (
    NTK,
    Clipped,
    Interpolated,
    NoPositions,
    PartialRotary,
    Rotary,
    YaRN,
    attention,
    rotary,
    rotary_attention,
)
from partita.errors import ValueRangeError
from tests.attention.operands import assert_same

SETTINGS = [Rotary(), NTK(4.0), Interpolated(4.0), YaRN(4.0, 32), PartialRotary(0.5), NoPositions()]


def dense_scores(query, key, positions, where):
    """clamp(distance) by distance: the pair (k, k + dim/2) as a complex number, turned by distance * w_k."""
    query, key = query.double(), key.double()
    half = query.shape[-1] // 2
    w = positions.frequencies(query.shape[-1]).double()
    q, k = (torch.complex(x[..., :half], x[..., half:]) for x in (query, key))
    distance = where[..., :, None] - torch.arange(key.shape[-2])
    if positions.furthest is not None:
        distance = distance.clamp(-positions.furthest, positions.furthest)
    turn = torch.polar(torch.ones(()).double(), distance[..., None] * w)  # (..., Q, K, half)
    return positions.amplitude**2 * (q[..., :, None, :] * k[..., None, :, :].conj() * turn).real.sum(-1)


def dense(query, key, value, positions, where, factor, keep):
    scores = dense_scores(query, key, positions, where) * factor
    scores = scores.masked_fill(~keep, -math.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ value.double()
    return out, scores.logsumexp(-1)


def given(*batch, n_query=13, n_key=13, dim=8, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(*batch, n, d, dtype=torch.float64, generator=source) for n, d in
            ((n_query, dim), (n_key, dim), (n_key, 3))]  # fmt: skip


@pytest.mark.parametrize("positions", SETTINGS, ids=repr)
def test_turned_scores_depend_on_distance_alone(positions):
    q, k, v = given(2)
    out, stats = rotary_attention(q, k, v, positions, return_stats=True)
    want, log_z = dense(q, k, v, positions, torch.arange(13), 8**-0.5, torch.ones(13, 13, dtype=torch.bool))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(stats.log_partition, log_z)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reach", [0, 1, 5, 12, 40])
@pytest.mark.parametrize("inner", [Rotary(), YaRN(4.0, 32), PartialRotary(0.5)], ids=repr)
def test_clipped_distances_are_those_of_dense_scores(reach, causal, inner):
    positions, where = Clipped(reach, inner), torch.arange(13)
    tensors = [x.requires_grad_() for x in given(2, 3)]
    out, stats = rotary_attention(*tensors, positions, is_causal=causal, return_stats=True)
    keep = torch.ones(13, 13, dtype=torch.bool)
    want, log_z = dense(*tensors, positions, where, 8**-0.5, keep.tril() if causal else keep)
    assert_same(out, want, tensors)
    torch.testing.assert_close(stats.log_partition, log_z)


@pytest.mark.parametrize("where", [9, torch.arange(9, 13), torch.tensor([[[9, 10, 11, 12]], [[7, 8, 9, 10]]])], ids=str)
def test_clipped_with_a_cache(where):
    """The last queries of a longer sequence; each entry of the batch may have its own places."""
    q, k, v = given(2, 3, n_query=4)
    places = where if isinstance(where, torch.Tensor) else torch.arange(where, where + 4)
    keep = (torch.arange(13) <= places[..., None]).expand(2, 3, 4, 13)
    positions = Clipped(3, NTK(2.0))
    out = rotary_attention(q, k, v, positions, where=where, attn_mask=keep)
    torch.testing.assert_close(out, dense(q, k, v, positions, places, 8**-0.5, keep)[0])
    if not isinstance(where, torch.Tensor):
        bottom = rotary_attention(q, k, v, positions, where=where, support=support.causal("bottom-right"))
        torch.testing.assert_close(bottom, out)


@pytest.mark.parametrize("positions", [*SETTINGS, Clipped(3)], ids=repr)
def test_chunks_and_steps_give_the_whole(positions):
    q, k, v = given(1)
    whole = rotary_attention(q, k, v, positions, is_causal=True, scale=scale.LogLength(4))
    for cuts in ((0, 5, 6, 13), range(14)):
        for a, b in itertools.pairwise(cuts):
            part = rotary_attention(q[:, a:b], k[:, :b], v[:, :b], positions, where=a, scale=scale.LogLength(4),
                                    support=support.causal("bottom-right"))  # fmt: skip
            torch.testing.assert_close(part, whole[:, a:b])


def test_the_policy_counts_near_and_far_keys_together():
    """Orthogonal: with reach 2 the row's scale is that of all the keys it sees, and options go to every part."""
    q, k, v = given(2, 4)
    positions, keep = Clipped(2), torch.rand(13, 13, generator=torch.Generator().manual_seed(1)) < 0.7
    out = rotary_attention(q, k[:, :2], v[:, :2], positions, scale=scale.LogLength(3), attn_mask=keep, enable_gqa=True)
    factor = scale.LogLength(3)(keep.sum(-1), 8).double()[:, None]
    k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    want = dense(q, k, v, positions, torch.arange(13), factor, keep)[0]
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)  # a policy counts in float32


def test_options_reach_every_part():
    q, k, v = given(2, 4)
    bias = torch.randn(13, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sink = torch.tensor([0.0, 1.0, -1.0, 2.0]).double()
    keep = support.window(9, 1)
    out = rotary_attention(q, k, v, Clipped(2), bias=bias, support=keep, softcap=2.0, sink=sink, scale=0.7)
    scores = 2 * torch.tanh(dense_scores(q, k, Clipped(2), torch.arange(13)) * 0.7 / 2) + bias
    scores = scores.masked_fill(~keep.dense(13, 13), -math.inf)
    with_sink = torch.cat([scores, sink[:, None, None].expand(2, 4, 13, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out, with_sink @ v)


def test_clipped_in_low_precision_is_as_good_as_the_plain_formula():
    q, k, v = given(2, n_query=50, n_key=50)
    positions, where = Clipped(7), torch.arange(50)
    exact = dense(q, k, v, positions, where, 8**-0.5, torch.ones(50, 50, dtype=torch.bool).tril())[0]
    low = [x.to(torch.bfloat16) for x in (q, k, v)]
    near, far = (rotary(low[0]) @ rotary(low[1]).mT, Rotary().turn(low[0], torch.full((50,), 7)) @ low[1].mT)
    distance = where[:, None] - where
    plain = torch.where(distance <= 7, near, far).masked_fill(distance < 0, -math.inf) * 8**-0.5
    naive = (plain.softmax(-1) @ low[2] - exact).abs().max()
    assert (rotary_attention(*low, positions, is_causal=True) - exact).abs().max() <= 2 * naive


def test_formulas():
    w = Rotary(base=500.0).frequencies(6)
    torch.testing.assert_close(w, torch.tensor([1.0, 500 ** (-1 / 3), 500 ** (-2 / 3)]).double())
    torch.testing.assert_close(NTK(8.0, base=500.0).frequencies(6), Rotary(base=500 * 8**1.5).frequencies(6))
    torch.testing.assert_close(Interpolated(8.0, base=500.0).frequencies(6), w / 8)
    assert PartialRotary(0.67, base=500.0).frequencies(6).tolist() == [*w[:2].tolist(), 0.0]
    assert YaRN(8.0, 64).amplitude == 0.1 * math.log(8) + 1
    assert YaRN(8.0, 64, temperature=False).amplitude == YaRN(0.5, 64).amplitude == 1.0
    assert not NoPositions().frequencies(6).any()
    torch.testing.assert_close(YaRN(8.0, 10**9).frequencies(6)[:2], Rotary().frequencies(6)[:2])  # every pair is fast
    slow = YaRN(8.0, 2).frequencies(64)
    torch.testing.assert_close(slow[1:], Rotary().frequencies(64)[1:] / 8)


def test_plain_rotary_is_what_it_was():
    q, k, v = given(2)
    torch.testing.assert_close(rotary_attention(q, k, v), attention(rotary(q), rotary(k), v))
    torch.testing.assert_close(Rotary(base=77.0).turn(q), rotary(q, base=77.0))


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_module_takes_any_setting_and_tells_its_weights(kv_heads):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(
        16, 2, batch_first=True, rotary=True, kv_heads=kv_heads, scale=scale.LogLength(4), dtype=torch.float64
    )
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    trained = layer(x, x, x, is_causal=True)[0]
    layer.rotary = Clipped(10)
    torch.testing.assert_close(layer(x, x, x, is_causal=True)[0], trained)  # no distance is longer
    for setting in (YaRN(4.0, 8), Clipped(3), Clipped(3, NTK(2.0))):
        layer.rotary = setting
        out, weights = layer(x, x, x, is_causal=True, average_attn_weights=False)
        assert (out - trained).abs().max() > 1e-3
        v = layer.project(x, x, x)[2].repeat_interleave(2 // kv_heads, 1)
        torch.testing.assert_close(layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), out)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 11).double())
    layer.dropout = 0.1
    with pytest.raises(ValueRangeError, match="dropout"):
        layer.train()(x, x, x)


def test_policies_of_models_in_use():
    """Llama 4 (as its modeling file has it), Qwen's list of logarithms, YaRN's mscale."""
    n = torch.arange(1, 200)
    own = torch.log1p(torch.floor(n.float() / 16)) * 0.1 + 1.0
    torch.testing.assert_close(scale.Llama4Temperature(16)(n, 64) * 8, own)
    qwen = torch.tensor([math.log(i, 50) if i > 50 else 1.0 for i in range(1, 200)])
    torch.testing.assert_close(scale.LogLength(50, floor=50)(n, 64) * 8, qwen)
    assert scale.YarnTemperature(8.0)(9, 64).item() * 8 == pytest.approx(YaRN(8.0, 64).amplitude ** 2, rel=1e-12)
    assert scale.YarnTemperature(0.5)(9, 64).item() == scale.InverseSqrt()(9, 64).item() == 0.125
    assert scale.InverseSqrt(2.0)(9, 64).item() == 0.25


def test_a_setting_reads_as_it_is_typed():
    for text in ("NTK(4.0)", "NTK(4.0, base=500.0)", "YaRN(8.0, trained=512, slow=2.0)", "Clipped(63)", "Rotary()",
                 "Clipped(63, inner=YaRN(8.0, trained=512))", "PartialRotary(0.5)", "NoPositions()"):  # fmt: skip
        assert repr(eval(text)) == text
