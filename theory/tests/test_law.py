"""The Gibbs law: M-GIB-*, and the attention statements that are statements about it."""

from __future__ import annotations

import itertools
from math import log

import pytest
import torch
from draws import F64, close, randn, vector
from torch.nn.functional import cross_entropy

from partita.errors import ValueRangeError
from partita_theory import contrast, geometry, information, selection
from partita_theory.law import BlockLaw, gibbs_law, log_odds, logits_of, merge_laws, one_hot_bound, variational_gap

NEG = -torch.inf


def test_law_is_softmax_with_strictly_positive_weights():
    """M-GIB-1: weights, log-weights, log Z against torch; -inf has weight exactly 0, finite logits never."""
    s, b = randn(3, 7), randn(3, 7, seed=1)
    scale = vector(0.5, 2.0, 0.0)
    law = gibbs_law(s, scale=scale, bias=b)
    z = scale[:, None] * s + b
    close(law.probs, torch.softmax(z, -1))
    close(law.log_probs, torch.log_softmax(z, -1))
    close(law.log_partition, torch.logsumexp(z, -1))
    hidden = gibbs_law(vector(0.0, NEG, -700.0)).probs
    assert hidden[1] == 0
    assert hidden[2] > 0


def test_shift_changes_log_z_only():
    """M-GIB-2 (and P20): +50 is nothing, x50 is one-hot; a key bias adds <q, b> to a whole row and is inert."""
    s = randn(9)
    a, b = gibbs_law(s), gibbs_law(s + 50)
    assert (a.probs - b.probs).abs().max() < 1e-13
    assert b.log_partition - a.log_partition == pytest.approx(50, abs=1e-12)
    top = s.topk(2).values
    least = 1 / (1 + 8 * float((50 * (top[1] - top[0])).exp()))  # eight others, none nearer than the second
    assert least - 1e-12 <= gibbs_law(50 * s).probs.max() <= 1
    assert gibbs_law(50 * torch.linspace(0, 1, 9, dtype=F64)).probs.max() > 0.998
    q, k, bias_k = randn(4, 8), randn(6, 8, seed=1), randn(8, seed=2)
    assert (gibbs_law(q @ k.T).probs - gibbs_law(q @ (k + bias_k).T).probs).abs().max() < 1e-13


def test_limits_of_the_scale():
    """M-GIB-3: scale 0 is uniform, infinity is uniform on the maximisers; the gap bound holds and can be attained."""
    s = vector(1.0, 1.0, 0.0, -2.0)
    close(gibbs_law(s, scale=0.0).probs, torch.full((4,), 0.25, dtype=F64))
    close(gibbs_law(s, scale=1e4).probs, vector(0.5, 0.5, 0.0, 0.0))
    assert information.entropy(1e4 * s) == pytest.approx(log(2))
    for seed in range(50):
        s = 3 * randn(12, seed=seed)
        top = s.topk(2).values
        assert gibbs_law(s, scale=1.3).probs.max() >= one_hot_bound(12, top[0] - top[1], 1.3) - 1e-12
    with pytest.raises(ValueRangeError, match="gap >= 0"):
        one_hot_bound(10, -1.0)


def test_ratios_ignore_other_keys():
    """M-GIB-4: log-odds are differences of logits, and masking other keys keeps them."""
    s = randn(8)
    full = gibbs_law(s)
    keep = torch.tensor([True, True, False, False, True, False, True, True])
    some = gibbs_law(s, keep=keep)
    assert log_odds(full, 0, 4) == pytest.approx(float(s[0] - s[4]), abs=1e-13)
    assert log_odds(some, 0, 4) == pytest.approx(float(log_odds(full, 0, 4)), abs=1e-13)
    assert (some.probs[~keep] == 0).all()


def test_variational_principle():
    """M-GIB-6 (P13): the gap of any guess is KL(guess || p), least at p itself."""
    z, q = randn(6), torch.softmax(randn(6, seed=1), -1)
    assert variational_gap(q, z) == pytest.approx(float(geometry.kl(q, torch.softmax(z, -1))), abs=1e-13)
    assert variational_gap(torch.softmax(z, -1), z).abs() < 1e-13
    assert variational_gap(torch.eye(6, dtype=F64)[2], z) > 0
    assert variational_gap(torch.tensor([0.5, 0.5]), torch.tensor([0.0, NEG])).isinf()


def test_one_distribution_three_faces():
    """M-GIB-7, M-RMK-5 (P4): InfoNCE is cross entropy, attention is an expectation, and only the loss has a target."""
    q, k, v = randn(5), randn(7, 5, seed=1), randn(7, 3, seed=2)
    s = k @ q
    nce = contrast.info_nce(q, k, 2, temperature=0.3)
    assert nce == pytest.approx(float(cross_entropy(s[None] / 0.3, torch.tensor([2]))), abs=1e-12)
    out = gibbs_law(s, scale=1 / 0.3).probs @ v
    close(out, torch.softmax(s / 0.3, -1) @ v)


def test_softmax_is_not_a_projection_but_sparsemax_is():
    """M-GIB-8 (P10)."""
    p = vector(0.7, 0.2, 0.1)
    close(geometry.simplex_projection(p), p)
    x = 2 * randn(40, 5)
    once = geometry.simplex_projection(x)
    assert geometry.is_distribution(once).all()
    close(geometry.simplex_projection(once), once)
    # nearest: no other point of the simplex is closer
    other = torch.softmax(3 * randn(500, 1, 5, seed=3), -1)
    assert ((x - once).norm(dim=-1) <= (x - other).norm(dim=-1) + 1e-12).all()


def test_blocks_merge_exactly():
    """M-GIB-9, M-ATT-14: log Z, mean and entropy of a split row; an empty block is neutral; segmentation is not."""
    z, v = 4 * randn(50), randn(50, 3, seed=1)
    cuts = [0, 7, 7, 30, 50]  # one block is empty
    parts = []
    for a, b in itertools.pairwise(cuts):
        if a == b:
            parts.append((torch.tensor(NEG, dtype=F64), torch.zeros(3, dtype=F64), torch.zeros((), dtype=F64)))
        else:
            law = gibbs_law(z[a:b])
            parts.append((law.log_partition, law.probs @ v[a:b], information.entropy(z[a:b])))
    merged = merge_laws(BlockLaw(*(torch.stack(x) for x in zip(*parts, strict=False))))
    full = gibbs_law(z)
    close(merged.log_partition[0], full.log_partition)
    close(merged.mean[0], full.probs @ v)
    close(merged.entropy[0], information.entropy(z))
    assert (gibbs_law(z[:7]).probs @ v[:7] - full.probs @ v).norm() > 0.01


def test_output_lies_in_the_hull():
    """M-ATT-4, M-ATT-1: an output is a mean of visible values, so no longer than the longest, in any direction."""
    for seed in range(20):
        s, v, u = 3 * randn(4, 9, seed=seed), randn(9, 3, seed=seed + 100), randn(3, seed=seed + 200)
        out = gibbs_law(s).probs @ v
        assert (out.norm(dim=-1) <= v.norm(dim=-1).max() + 1e-12).all()
        assert (out @ u <= (v @ u).max() + 1e-12).all()


def test_masks_act_on_keys_and_combine_by_and():
    """M-ATT-5, M-ATT-8 (W (77), P23): weights are normalised over the visible set; additive -1e9 is not a mask."""
    s = vector(1.0, 0.0, -1.0)
    causal, padding = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    law = gibbs_law(s, keep=causal & padding)
    assert law.probs.tolist() == [1.0, 0.0, 0.0]
    visible = s.exp() / s.exp().sum()
    close(gibbs_law(s).probs, visible)
    assert gibbs_law(s, keep=torch.zeros(3, dtype=torch.bool)).probs.sum() == 0


def test_row_without_keys_is_zero_with_zero_gradient():
    """M-ATT-6 (K5): weights, output and gradients are 0, never NaN; -1e9 would spread over forbidden keys."""
    s = randn(2, 4).requires_grad_()
    keep = torch.tensor([[True, False, True, True], [False] * 4])
    law = gibbs_law(s, keep=keep)
    assert law.probs[1].tolist() == [0.0] * 4
    assert law.log_partition[1] == NEG
    h = information.entropy(s, keep)
    assert h[1] == 0
    (law.probs.square().sum() + h.sum()).backward()
    assert s.grad.isfinite().all()
    assert (s.grad[1] == 0).all()
    assert s.grad[0, 1] == 0


def test_scale_before_mask():
    """M-ATT-7 (C (5.1.9), (51)): with scale 0 (log 1 = 0) masking first gives NaN, scaling first does not."""
    s = vector(2.0, 5.0)
    keep = torch.tensor([True, False])
    assert (0.0 * s.masked_fill(~keep, NEG)).isnan().any()
    assert gibbs_law(s, scale=0.0, keep=keep).probs.tolist() == [1.0, 0.0]


def test_what_is_masked_may_hold_anything():
    """M-ATT-6: NaN and inf under the mask reach neither value nor gradient."""
    s = torch.tensor([1.0, torch.nan, torch.inf, 2.0], dtype=F64, requires_grad=True)
    keep = torch.tensor([True, False, False, True])
    law = gibbs_law(s, scale=0.7, bias=vector(0.0, torch.nan, NEG, 1.0), keep=keep)
    assert law.probs.isfinite().all()
    (law.probs[0] + law.log_partition).backward()
    assert s.grad.isfinite().all()
    assert logits_of(s, 1.0, None, keep)[1] == NEG


def test_hard_and_top_k_restrictions_of_entropy():
    """M-ATT-12: the most a restricted row can have is log of what it sees; dropping the best key can raise H."""
    s = vector(10.0, 0.0, 0.0, 0.0)
    assert information.entropy(s) == pytest.approx(0.0015, abs=1e-4)
    assert information.entropy(s, torch.tensor([False, True, True, True])) == pytest.approx(log(3))
    assert information.entropy(torch.zeros(7, dtype=F64)) == pytest.approx(1.9459, abs=1e-4)  # all visible: equality
    for seed in range(30):
        z = 2 * randn(9, seed=seed)
        keep = torch.rand(9, generator=torch.Generator().manual_seed(seed)) < 0.6
        keep[0] = True
        assert information.entropy(z, keep) <= log(int(keep.sum())) + 1e-12
        kept = selection.top_k_law(z, 4).probs
        assert information.entropy_of(kept) <= information.entropy(z) + 1e-12
