"""The cache that keeps what received most: its choices are those of eager's matrices, and its memory is bounded."""

from __future__ import annotations

import pytest
import torch

from partita import hf
from partita.errors import ValueRangeError
from tests.hf.models import gpt2, llama

hf_cache = pytest.importorskip("partita.hf.cache", reason="pip install transformers to test it")


def twins(make):
    """The same model in float64, on partita and on eager."""
    hf.register()
    model = make().double().eval()
    model.set_attn_implementation("partita")
    other = make().double().eval()
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation("eager")
    return model, other


def kept_by_matrices(weights, key_heads, keep, recent):
    """The positions that each key head keeps, from eager's matrix (batch, heads, n, n) of one call."""
    n = weights.shape[-1]
    score = weights.unflatten(1, (key_heads, -1)).sum((2, 3))
    best = score[..., : n - recent].sort(dim=-1, descending=True, stable=True).indices[..., :keep].sort(-1).values
    return torch.cat([best, torch.arange(n - recent, n).expand(*best.shape[:-1], recent)], -1)


@torch.no_grad()
@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_choices_are_those_of_eager_matrices(make):
    model, other = twins(make)
    tokens = torch.randint(3, 99, (2, 23))
    cache = hf_cache.heavy_hitter_cache(model, keep=5, recent=3)
    out = model(tokens, past_key_values=cache, use_cache=True)
    dense = other(tokens, output_attentions=True)
    torch.testing.assert_close(out.logits, dense.logits)
    for layer, weights in zip(cache.layers, dense.attentions, strict=True):
        heads = layer.keys.shape[1]
        assert torch.equal(layer.positions, kept_by_matrices(weights, heads, 5, 3))
        assert layer.keys.shape[-2] == layer.values.shape[-2] == 8
    assert cache.get_seq_length() == 23


@torch.no_grad()
def test_a_cache_that_is_large_enough_changes_nothing_and_a_small_one_stays_small():
    model, _ = twins(llama)
    tokens = torch.randint(3, 99, (1, 31))
    whole = model(tokens).logits
    for keep, exact in ((40, True), (4, False)):
        cache = hf_cache.heavy_hitter_cache(model, keep=keep, recent=4)
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in tokens.split(5, 1)]
        assert torch.allclose(torch.cat(parts, 1), whole) == exact
        assert cache.layers[0].keys.shape[-2] == (31 if exact else 8)
        assert cache.get_seq_length() == 31
        last = cache.layers[0].positions[0, 0, -4:]
        assert last.tolist() == [27, 28, 29, 30]


@torch.no_grad()
def test_received_adds_up_over_calls_as_the_matrices_do():
    """Key by key and token by token, as long as nothing has been let go."""
    model, other = twins(llama)
    tokens = torch.randint(3, 99, (1, 11))
    cache = hf_cache.heavy_hitter_cache(model, keep=20, recent=1)
    for part in tokens.split(1, 1):
        model(part, past_key_values=cache, use_cache=True)
    for layer, weights in zip(cache.layers, other(tokens, output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(layer.received, weights.unflatten(1, (2, 2)).sum((2, 3)))


@torch.no_grad()
def test_generation_runs_through_it_and_batches_move_along():
    model, _ = twins(llama)
    tokens = torch.randint(3, 99, (2, 9))
    cache = hf_cache.heavy_hitter_cache(model, keep=3, recent=2)
    out = model.generate(tokens, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert out.shape[0] == 2 and out.shape[1] > 9
    layer = cache.layers[1]
    positions = layer.positions
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.positions, positions[[1, 1]])
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([3]))
    assert layer.keys.shape[0] == layer.received.shape[0] == 1
    layer.reset()
    assert cache.get_seq_length(1) == 0
    with pytest.raises(NotImplementedError, match="cannot be rolled back"):
        layer.crop(-1)


def test_an_attention_that_tells_nothing_is_refused():
    model, other = twins(llama)
    with pytest.raises(ValueRangeError, match="'eager', which gives no attention received per key"):
        hf_cache.heavy_hitter_cache(other, keep=3, recent=2)
    for keep, recent in ((-1, 2), (3, 0), (2.5, 1)):
        with pytest.raises(ValueRangeError, match="whole number"):
            hf_cache.heavy_hitter_cache(model, keep=keep, recent=recent)
