"""Statements about layers and policies, held against partita's own faces and torch's: M-ATT, M-SCL, M-TMP, M-INF."""

from __future__ import annotations

from math import log, sqrt

import pytest
import torch
from draws import F64, close, randn, vector
from torch.nn import functional as F

import partita
from partita import Gibbs, scale, support
from partita.nn import MultiheadAttention
from partita_theory import information


def test_heads_are_attended_apart_and_joined_by_the_output_projection():
    """M-ATT-3: concat_r softmax(Q_r K_r^T / sqrt(d_head)) V_r, times W_O; with sqrt(d_model) it would be another."""
    layer = MultiheadAttention(12, 3, batch_first=True, dtype=F64)
    x = randn(2, 5, 12)
    q, k, v = (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, -1)

    def joined(dim: int) -> torch.Tensor:
        heads = []
        for r in range(3):
            part = slice(4 * r, 4 * r + 4)
            weights = torch.softmax(q[..., part] @ k[..., part].transpose(-1, -2) / sqrt(dim), -1)
            heads.append(weights @ v[..., part])
        return layer.out_proj(torch.cat(heads, -1))

    out, _ = layer(x, x, x)
    close(out, joined(4))
    assert (out - joined(12)).abs().max() > 1e-3
    peer = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=F64)
    peer.load_state_dict(layer.state_dict())
    close(out, peer(x, x, x)[0])


def test_a_key_bias_is_inert_in_a_whole_layer():
    """M-ATT-2, M-GIB-2: moving the key bias changes no output, moving the query bias does; its gradient is 0."""
    layer = MultiheadAttention(8, 2, batch_first=True, dtype=F64)
    x = randn(1, 6, 8)
    before = layer(x, x, x)[0]
    before.square().sum().backward()
    assert layer.in_proj_bias.grad[8:16].abs().max() < 1e-12 < layer.in_proj_bias.grad[:8].abs().max()
    with torch.no_grad():
        layer.in_proj_bias[8:16] += 3.0
        close(layer(x, x, x)[0], before)
        layer.in_proj_bias[:8] += 3.0
        assert (layer(x, x, x)[0] - before).abs().max() > 1e-3


def test_causal_rows_of_rectangles_are_aligned_as_named():
    """M-ATT-5: top-left as torch's is_causal (1 and 2 of 5 keys), bottom-right for decoding (4 and 5)."""
    q, k, v = randn(2, 4), randn(5, 4, seed=1), randn(5, 3, seed=2)
    top = partita.attention(q, k, v, support=support.causal())
    close(top, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert support.causal().visible(2, 5).tolist() == [1, 2]
    assert support.causal("bottom-right").visible(2, 5).tolist() == [4, 5]
    last = partita.attention(q, k, v, support=support.causal("bottom-right"))
    close(last[1], partita.attention(q, k, v)[1])  # the newest token sees everything


def test_padding_hides_keys_of_its_own_item_in_every_head_and_joins_by_and():
    """M-ATT-5: item 0 has 2 of 4 keys; no mass on its padding in any head, and query rows of padding stay finite."""
    q, k = randn(2, 3, 4, 5), randn(2, 3, 4, 5, seed=1)  # batch 2, heads 3
    padding = support.lengths(torch.tensor([2, 4])[:, None])
    weights = Gibbs(q, k, support=padding & support.causal()).probs()
    assert (weights[0, ..., 2:] == 0).all() and (weights[1, ..., 3, 2:] > 0).all()
    assert weights.isfinite().all() and torch.allclose(weights.sum(-1), torch.ones((), dtype=F64))
    visible = torch.tensor([[1, 2, 2, 2], [1, 2, 3, 4]])
    both = (padding & support.causal()).dense(4, 4, batch=(2, 3))
    assert torch.equal(both.sum(-1), visible[:, None].expand(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_statistics_and_masks_whole(dtype: torch.dtype):
    """M-ATT-8: log Z and H come in float32 within rounding of the inputs; hidden keys weigh exactly 0, not e^-65504."""
    q, k = randn(6, 16, dtype=dtype), randn(4096, 16, seed=1, dtype=dtype)
    hidden = support.lengths(3000)
    law = Gibbs(q, k, scale=0.5, support=hidden)
    exact = Gibbs(q.double(), k[:3000].double(), scale=0.5)
    assert law.entropy().dtype == law.log_partition().dtype == torch.float32
    close(law.entropy().double(), exact.entropy(), rtol=1e-5, atol=1e-4)
    close(law.log_partition().double(), exact.log_partition(), rtol=1e-5, atol=1e-4)
    assert (law.probs()[:, 3000:] == 0).all()


def test_the_length_of_cross_attention_is_that_of_its_keys():
    """M-ATT-11, M-SCL-6, M-SCL-2: kappa log n_k / d whatever n_q; with n_q instead the result differs."""
    q, k, v = randn(3, 8), randn(50, 8, seed=1), randn(50, 2, seed=2)
    out = partita.attention(q, k, v, scale=scale.KappaLog(2.0))
    close(out, torch.softmax(2 * log(50) / 8 * q @ k.T, -1) @ v)
    assert (out - torch.softmax(2 * log(3) / 8 * q @ k.T, -1) @ v).abs().max() > 1e-3
    keep = torch.arange(50) % 2 == 0
    half = partita.attention(q, k, v, scale=scale.KappaLog(2.0), support=support.mask(keep))
    close(half, torch.softmax(2 * log(25) / 8 * q @ k[::2].T, -1) @ v[::2])


def test_mixed_and_frozen_scales_are_their_equations():
    """M-SCL-3, M-SCL-4: a/sqrt(d) + b log n / d is sharper than 1/sqrt(d); a frozen length is one number."""
    n = vector(2.0, 16.0, 1024.0)
    mixed = scale.Mixed(1.0, 0.1)(n, 64).double()
    close(mixed, 1 / 8 + 0.1 * n.log() / 64, rtol=1e-6, atol=0)
    assert (mixed > 1 / 8).all() and float(mixed[2]) * 8 == pytest.approx(1.087, abs=1e-3)
    frozen = scale.MaxLength(65536)(n, 64).double()
    close(frozen.expand(3), torch.full((3,), log(65536) / 64, dtype=F64), rtol=1e-6, atol=0)


def test_a_window_has_at_most_the_entropy_of_what_it_sees():
    """M-ATT-12: equality exactly where the visible scores are equal, rows at the border included."""
    near = support.window(2, 1)
    law = Gibbs(randn(9, 4), randn(9, 4, seed=1), support=near)
    seen = near.visible(9, 9).double()
    assert seen.tolist() == [2, 3, 4, 4, 4, 4, 4, 4, 3]
    assert (law.entropy() < seen.log()).all()
    flat = Gibbs(torch.zeros(9, 4, dtype=F64), randn(9, 4, seed=1), support=near)
    close(flat.entropy(), seen.log())


def test_a_segment_is_not_the_row_it_is_cut_from():
    """M-ATT-14: states of the segments merge to the whole row; one segment alone is another law."""
    q, k, v = 3 * randn(4, 6), randn(40, 6, seed=1), randn(40, 2, seed=2)
    states = [Gibbs(q, k[a : a + 10]).state(v[a : a + 10]) for a in range(0, 40, 10)]
    whole = partita.merge(*states)
    close(whole.expectation(), Gibbs(q, k).expectation(v))
    close(whole.stats().entropy, Gibbs(q, k).entropy())
    assert (states[0].expectation() - whole.expectation()).abs().max() > 1e-2


def test_flat_and_saturated_heads_are_told_from_healthy_ones_along_a_run():
    """M-INF-8: normalised entropy, information, sample size and trace J of one head as its scale goes from 0 to 50."""
    q, k = randn(20, 8), randn(64, 8, seed=1)
    flags, traces = [], []
    for sharp in (0.0, 0.35, 50.0):
        law = Gibbs(q, k, scale=sharp)
        flags.append(information.selectivity(law.entropy(), law.visible()).float().mean().item())
        p = law.probs()
        traces.append(float((1 - p.square().sum(-1)).mean()))
        n_eff = information.effective_sample_size(sharp * q @ k.T)
        close(1 - p.square().sum(-1), 1 - 1 / n_eff)  # trace J is 1 - 1/n_eff
    assert flags[0] == 1 and flags[1] == 0 and flags[2] < -0.7
    assert traces[0] == pytest.approx(1 - 1 / 64) and traces[2] < 0.05
