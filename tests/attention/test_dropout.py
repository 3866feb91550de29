"""Dropout: exact given its mask, right on average, replayed in backward, invisible to the statistics."""

from __future__ import annotations

import torch

import partita
from partita import recompute, support
from partita.scale import LogLength
from tests.attention.operands import assert_same, make


def implied_mask(q, k, p, seed, **options):
    """With the identity as value, the output is the dropped weight matrix itself."""
    torch.manual_seed(seed)
    eye = torch.eye(k.shape[-2], dtype=q.dtype).expand(*k.shape[:-2], -1, -1)
    return partita.attention(q, k, eye, dropout_p=p, **options)


def test_gradients_are_those_of_the_mask_that_was_drawn(blocked):
    """Also when rows come in blocks, each with its mask remade in the backward pass."""
    q, k, v = make()
    p = 0.4
    keep = implied_mask(q, k, p, 3).detach() > 0
    torch.manual_seed(3)
    got = partita.attention(q, k, v, dropout_p=p)
    weights = (q @ k.mT / 2).softmax(-1) * keep / (1 - p)
    assert_same(got, weights @ v, (q, k, v))


def test_kept_weights_are_a_share_of_one_minus_p_and_independent(monkeypatch):
    """Within a block of rows and between blocks, which have seeds of their own."""
    monkeypatch.setattr(recompute, "_CELLS", 1)
    monkeypatch.setattr(recompute, "_FEWEST", 16)
    q, k, _ = make(64, 128, 4, (4,))
    for p in (0.1, 0.5, 0.9):
        keep = (implied_mask(q, k, p, 5) > 0).double()
        spread = (p * (1 - p) / keep.numel()) ** 0.5
        assert abs(keep.mean() - (1 - p)) < 5 * spread
        for apart in (1, 16, 32):  # rows know nothing of each other
            both = (keep[:, apart:] * keep[:, :-apart]).mean()
            assert abs(both - (1 - p) ** 2) < 10 * spread


def test_the_same_seed_gives_the_same_output_and_another_another():
    q, k, v = make()

    def run(seed):
        torch.manual_seed(seed)
        return partita.attention(q, k, v, dropout_p=0.3)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_statistics_are_those_before_dropout():
    q, k, v = make()
    _, dropped = partita.attention(q, k, v, dropout_p=0.7, is_causal=True, return_stats=True)
    _, plain = partita.attention(q, k, v, is_causal=True, return_stats=True)
    for name, a, b in zip(partita.Stats._fields, dropped, plain, strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_dropout_meets_every_other_option(blocked):
    """Grouped queries, supports with a hole, a policy, a sink and a bias, in one block or many."""
    q = torch.randn(2, 4, 9, 4, dtype=torch.float64)
    k = torch.randn(2, 2, 9, 4, dtype=torch.float64)
    v = torch.eye(9, dtype=torch.float64).expand(2, 2, 9, 9)
    options = {
        "enable_gqa": True,
        "support": (support.causal() & support.not_self()) | support.lengths(torch.tensor([1, 3])),
        "scale": LogLength(reference=4),
        "bias": torch.randn(4, 9, 9, dtype=torch.float64),
        "sink": torch.zeros(4, dtype=torch.float64),
    }
    plain = partita.attention(q, k, v, **options)
    got = partita.attention(q, k, v, dropout_p=0.25, **options)
    kept = got > 0
    torch.testing.assert_close(got[kept], plain[kept] / 0.75)
    assert 0.5 < kept.sum() / (plain > 0).sum() < 0.95


def test_the_ends_of_the_range():
    q, k, v = make()
    assert torch.equal(partita.attention(q, k, v, dropout_p=1.0), torch.zeros_like(q))
    torch.testing.assert_close(partita.attention(q, k, v, dropout_p=1e-12), partita.attention(q, k, v))


def test_dropout_never_holds_the_whole_mask():
    """Neither the booleans of 2048 x 4096 x 4 pairs (32 MB) nor their scores (128 MB in float32) exist at once."""
    parts = recompute.row_blocks(2048, 4096, (4,))
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, 2048)
    assert max((part.stop - part.start) * 4096 * 4 for part in parts) <= 1 << 22
