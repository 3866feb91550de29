"""Wrong arguments of attention, its variants, positions and modules name what was expected."""

from __future__ import annotations

import math

import pytest
import torch

import partita
from partita import attn, nn, scale
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.score import Additive

q, k, v = (torch.zeros(2, 3, n, 4) for n in (7, 9, 9))
x, ones, whole = torch.zeros(2, 3, 4), torch.ones, torch.zeros(3, 3, dtype=torch.int64)
rows = partita.Gibbs(torch.zeros(2, 3, 1), torch.zeros(2, 3, 1)).stats()
seen = torch.ones(7, 9, dtype=torch.bool)
state = attn.linear_attention(q, k, v, return_state=True)[1]
options = [
    lambda name=name, call=call: call(q, k, v, **{name: torch.zeros(3)})
    for call in (attn.sigmoid_attention, attn.l1_attention, attn.hard_attention)
    for name in ("sink", "dropout_p", "suport")
]
MISTAKES = [
    (lambda: partita.attention(x, x, x, whole), DtypeError, "attn_mask"),
    (lambda: partita.attention(x, x, x, dropout_p=1.5), ValueRangeError, "dropout_p"),
    (lambda: partita.attention(q, k, v, sink=torch.zeros(4, 7)), ShapeError, "sink"),
    (lambda: partita.attention_divergence(q, k, q, k, sample_weight=ones(4)), ShapeError, "sample_weight must"),
    (lambda: partita.attention_divergence(q, k, q, k[..., :5, :]), ShapeError, "same numbers of queries and keys"),
    (lambda: partita.attention_divergence(q, k, q, k, reduction="average"), ValueRangeError, "reduction must be"),
    *((call, TypeError, "(sink|dropout_p|suport) is no option.*is_causal") for call in options),
    # variants
    (lambda: attn.top_k_attention(q, k, v, 0), ValueRangeError, "k must"),
    (lambda: attn.gumbel_attention(q, k, v, 0.0), ValueRangeError, "temperature"),
    (lambda: attn.blockwise_attention(q, k, v, 0), ValueRangeError, "block"),
    (lambda: attn.hierarchical_attention(q, k, v, 2), ShapeError, "same number of queries and keys"),
    (lambda: attn.hierarchical_attention(x, x, x, 2, scale=scale.TargetEntropy(1.0)), ValueRangeError, "two levels"),
    # other normalisers
    (lambda: attn.linear_attention(q, k, v, is_causal=True), ShapeError, "same number of queries and keys"),
    (lambda: attn.linear_attention(q, k, v, key_mask=seen[0, :7]), ShapeError, "one entry per key"),
    (lambda: attn.linear_attention(q, k, v, key_mask=ones(9)), DtypeError, "key_mask"),
    (lambda: attn.sigmoid_attention(q, k, v[..., 1:, :]), ShapeError, "one row per key"),
    (lambda: attn.l1_attention(q, k, v[..., 1:, :]), ShapeError, "one row per key"),
    (lambda: attn.linear_attention(q, k, v[..., 1:, :]), ShapeError, "one row per key"),
    (lambda: attn.linear_attention(q, k, v, chunk=0), ValueRangeError, "chunk"),
    (lambda: attn.linear_attention(q, k, v, scale=2.0), ValueRangeError, "takes no scale"),
    (lambda: attn.linear_attention(q, k, v, attn_mask=seen), ValueRangeError, "takes no attn_mask"),
    (lambda: attn.linear_attention(q, k, v, score=Additive(4, 4, 5)), ValueRangeError, "takes no score"),
    (lambda: attn.linear_attention(q, k, v, sacle=2.0), TypeError, "'sacle'"),
    (lambda: attn.linear_attention(q[:1, :1].expand(1, 4, 7, 4), k[:1, :2], v[:1, :2]), ShapeError, "heads and key 2"),
    (lambda: attn.linear_attention(q, k, v, state=state, return_stats=True), ValueRangeError, "needs all keys"),
    (lambda: attn.sigmoid_attention(q, k, v, offset=torch.zeros(5)), ShapeError, "offset must be one score per head"),
    (lambda: attn.sigmoid_attention(q, k, v, offset=torch.zeros(3).long()), DtypeError, "offset"),
    (lambda: attn.sigmoid_attention(q, k, v, offset="a"), ValueRangeError, "offset must be a finite number"),
    (lambda: attn.sigmoid_attention(q, k, v, offset=math.nan), ValueRangeError, "offset must be a finite number"),
    # positions
    (lambda: attn.NTK(0.0), ValueRangeError, "factor"),
    (lambda: attn.YaRN(2.0, 1), ValueRangeError, "trained"),
    (lambda: attn.YaRN(2.0, 64, fast=1.0), ValueRangeError, "fast must be above slow"),
    (lambda: attn.PartialRotary(1.5), ValueRangeError, "share"),
    (lambda: attn.Clipped(-1), ValueRangeError, "reach"),
    (lambda: attn.Clipped(3, attn.Clipped(2)), ValueRangeError, "inner"),
    (lambda: attn.Rotary(base=1.0), ValueRangeError, "base"),
    (lambda: attn.rotary_attention(x, x, x, attn.Clipped(2), scale=scale.TargetEntropy(1.0)), ValueRangeError,
     "TargetEntropy"),
    (lambda: attn.rotary_attention(x, x, x, 64), DtypeError, "must be a setting"),
    (lambda: attn.rotary_attention(x, x, x, attn.Clipped(2), where=torch.arange(5)), ShapeError, "where"),
    (lambda: attn.Positions().frequencies(4), TypeError, "abstract"),
    (lambda: attn.sinusoidal(3, 5), ShapeError, "even"),
    (lambda: attn.RelativeBias(torch.zeros(2, 4)), ShapeError, "odd"),
    (lambda: attn.ALiBi(ones(1), "middle"), ValueRangeError, "align"),
    (lambda: scale.Llama4Temperature(0), ValueRangeError, "floor_scale"),
    # modules
    (lambda: nn.MultiheadAttention(8, 4, kv_heads=3), ShapeError, "kv_heads"),
    (lambda: nn.MultiheadAttention(8, 2, attention_entropy_weight=math.nan), ValueRangeError, "entropy_weight"),
    (lambda: nn.MultiheadAttention(8, 2, attention_entropy_weight=[0.1] * 3), ShapeError, "attention_entropy_weight"),
    (lambda: attn.entropy_penalty(rows, [0.1, 0.2, 0.3]), ShapeError, "one per head"),
    (lambda: nn.EntropyInvariantAttention(8, 2).calibrated(1, 8.0), ValueRangeError, "reference length"),
    (lambda: nn.EntropyInvariantAttention(8, 2).calibrated(4096, 0.0), ValueRangeError, "sigma"),
    (lambda: nn.EntropyInvariantAttention(8, 2).calibrated(4096, 8.0, -1.0), ValueRangeError, "growth"),
    (lambda: nn.EntropyInvariantAttention(8, 2, scale=scale.Constant(1.0)), ValueRangeError, "own scale"),
    (lambda: nn.TemperatureController(1), ValueRangeError, "exactly one"),
    (lambda: nn.TemperatureController(3, entropy=0.5).observe(rows), ShapeError, "heads"),
    (lambda: nn.TemperatureController(3, entropy=0.5)(ones(4, 7), 8), ShapeError, "has 3 heads"),
    (lambda: nn.qk_clip_(nn.MultiheadAttention(8, 2, qk_norm=True), ones(2)), ValueRangeError, "qk_norm"),
    (lambda: nn.qk_clip_(nn.MultiheadAttention(8, 2), ones(3)), ShapeError, "heads"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_a_mistake_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
