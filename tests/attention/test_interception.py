"""replace_sdpa: every caller is served inside the block, none outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import partita
from partita import scale
from partita.interception import replace_sdpa

x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))


def test_calls_are_served_inside_and_only_inside():
    original = F.scaled_dot_product_attention
    with replace_sdpa() as block:
        ours = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        named = F.scaled_dot_product_attention(x, x, x, None, 0.0, True)
    assert block.calls == 2
    assert F.scaled_dot_product_attention is original
    torch.testing.assert_close(ours, original(x, x, x, is_causal=True))
    assert torch.equal(ours, named)
    original(x, x, x)
    assert block.calls == 2


def test_nan_behind_a_mask_shows_who_served():
    """torch's own lets a masked nan through; partita does not."""
    k = x.clone()
    k[..., 4, :] = torch.nan
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[:, 4] = False
    with replace_sdpa():
        assert F.scaled_dot_product_attention(x, k, x, keep).isfinite().all()
    assert not F.scaled_dot_product_attention(x, k, x, keep).isfinite().all()


def test_an_exception_restores():
    with pytest.raises(RuntimeError, match="inside"), replace_sdpa() as block:
        raise RuntimeError("inside")
    F.scaled_dot_product_attention(x, x, x)
    assert block.calls == 0


def test_torchs_own_modules_run_on_it_with_a_policy():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    y = torch.randn(2, 7, 8)
    plain = layer(y, y, y, need_weights=False)[0]
    with replace_sdpa() as block:
        same = layer(y, y, y, need_weights=False)[0]
    with replace_sdpa(scale=scale.LogLength(reference=2)):
        sharper = layer(y, y, y, need_weights=False)[0]
    assert block.calls == 1
    torch.testing.assert_close(same, plain)
    assert (sharper - plain).abs().max() > 1e-4
    ours = partita.nn.MultiheadAttention(8, 2, batch_first=True, scale=scale.LogLength(reference=2))
    ours.load_state_dict(layer.state_dict())
    torch.testing.assert_close(sharper, ours(y, y, y, need_weights=False)[0])


def test_gradients_flow_and_blocks_nest():
    q = x.clone().requires_grad_()
    with replace_sdpa() as outer, replace_sdpa() as inner:
        F.scaled_dot_product_attention(q, x, x).sum().backward()
    assert (outer.calls, inner.calls) == (0, 1)
    assert q.grad is not None


def test_it_decorates_functions_too():
    block = replace_sdpa()

    @block
    def run():
        return F.scaled_dot_product_attention(x, x, x)

    run()
    assert block.calls == 1
