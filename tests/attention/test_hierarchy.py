"""Blocks, segments, two levels: exact where they say so (M-GIB-9, M-ATT-12, M-ATT-14)."""

from __future__ import annotations

import pytest
import torch

import partita
from partita import support
from partita.attn import ALiBi, blockwise_attention, hierarchical_attention
from partita.scale import LogLength
from tests.attention.operands import assert_same, make


@pytest.mark.parametrize("block", [1, 5, 23, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"support": support.window(4, 2) & support.not_self(), "scale": LogLength(reference=8)},
        {"support": support.segments(torch.arange(23) // 4) | support.lengths(2), "softcap": 2.0},
        {"attn_mask": torch.rand(23, 23, generator=torch.Generator().manual_seed(0)) < 0.5},
        {"bias": ALiBi(torch.tensor([0.1, 0.2, 0.3]))},
    ],
    ids=["all", "causal", "window", "packed", "mask", "alibi"],
)
def test_merged_blocks_are_full_attention(block, options):
    q, k, v = make(23, 23)
    got, stats = blockwise_attention(q, k, v, block, return_stats=True, **options)
    want, whole = partita.attention(q, k, v, return_stats=True, **options)
    torch.testing.assert_close(stats, whole)
    assert_same(got + stats.entropy[..., None], want + whole.entropy[..., None], (q, k, v))


def test_segments_are_blind_to_other_segments_and_policies_count_them():
    q, k, v = make(23, 23)
    ids = torch.arange(23) // 5
    segments = partita.support.segments(ids)
    got, stats = partita.attention(q, k, v, support=segments, scale=LogLength(reference=8), return_stats=True)
    same = ids[:, None] == ids
    want = partita.attention(q, k, v, same, scale=LogLength(reference=8))
    torch.testing.assert_close(got, want)
    assert torch.equal(stats.visible[0, 0], same.sum(-1).double())
    assert (want - partita.attention(q, k, v)).abs().max() > 0.1


@pytest.mark.parametrize("causal", [False, True])
def test_two_levels_are_exact_when_keys_agree_inside_blocks(causal):
    q, _, v = make(23, 23)
    k = torch.randn(2, 3, 5, 4, dtype=torch.float64).repeat_interleave(5, -2)[..., :23, :]
    got = hierarchical_attention(q, k, v, 5, is_causal=causal)
    torch.testing.assert_close(got, partita.attention(q, k, v, is_causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_two_levels_written_out(causal):
    q, k, v = make(11, 11, batch=(2,))
    got, stats = hierarchical_attention(q, k, v, 4, is_causal=causal, return_stats=True)
    parts = [slice(0, 4), slice(4, 8), slice(8, 11)]
    means = torch.stack([k[:, s].mean(1) for s in parts], 1), torch.stack([v[:, s].mean(1) for s in parts], 1)
    count = torch.tensor([4.0, 4.0, 3.0], dtype=torch.float64)
    keys, values = torch.cat([k, means[0]], 1), torch.cat([v, means[1]], 1)
    own = torch.arange(11) // 4
    near = own[:, None] == own
    far = torch.arange(3) != own[:, None]
    if causal:
        near, far = near & torch.ones(11, 11, dtype=torch.bool).tril(), torch.arange(3) < own[:, None]
    scores = q @ keys.mT / 2 + torch.cat([torch.zeros(11, dtype=torch.float64), count.log()])
    scores = scores.masked_fill(~torch.cat([near, far], 1), -torch.inf)
    torch.testing.assert_close(got, scores.softmax(-1) @ values)
    torch.testing.assert_close(stats.log_partition, scores.logsumexp(-1))
    exact = partita.Gibbs(q, k, scale=0.5, support=support.causal() if causal else None).log_partition()
    assert (stats.log_partition <= exact + 1e-12).all()  # Jensen: a summary never weighs more than its keys


def test_one_block_is_plain_attention_and_causality_holds():
    q, k, v = make(9, 9, batch=())
    torch.testing.assert_close(hierarchical_attention(q, k, v, 9), partita.attention(q, k, v))
    out = hierarchical_attention(q, k, v, 2, is_causal=True)
    (late,) = torch.autograd.grad(out[:5].sum(), v)
    assert (late[5:] == 0).all() and (late[:5] != 0).any()


def test_a_policy_counts_the_keys_of_each_level():
    n, block = 11, 4
    q, k, v = make(n, n, batch=())
    policy = LogLength(reference=16, floor=2)
    own = torch.arange(n) // block
    near = (own[:, None] == own) & (torch.arange(n)[:, None] >= torch.arange(n))
    blocks = [list(range(b, min(b + block, n))) for b in range(0, n, block)]
    keys, values = (torch.stack([x[b].mean(0) for b in blocks]) for x in (k, v))
    far = torch.arange(3) < own[:, None]
    scale = [policy(m.sum(-1), 4, q)[:, None] for m in (near, far)]
    sizes = torch.tensor([float(len(b)) for b in blocks]).double().log()
    scores = torch.cat(
        [
            (q @ k.mT * scale[0]).masked_fill(~near, -torch.inf),
            (q @ keys.mT * scale[1] + sizes).masked_fill(~far, -torch.inf),
        ],
        -1,
    )
    want = scores.softmax(-1) @ torch.cat([v, values])
    got, stats = hierarchical_attention(q, k, v, block, is_causal=True, scale=policy, return_stats=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(stats.log_partition, scores.logsumexp(-1))
