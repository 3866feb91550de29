"""The notes' module and its usage, through EntropyInvariantAttention: weights when asked, masks by name."""

from __future__ import annotations

import math

import pytest
import torch

from partita.errors import ShapeError, ValueRangeError
from partita.nn import EntropyInvariantAttention


def by_hand(layer, x, keep, y=None):
    """The notes' computation with its defects mended: log of the visible keys, no -1e9, zeros for an empty row."""
    y = x if y is None else y
    (wq, wk, wv), (bq, bk, bv) = layer.projections()

    def split(t):
        return t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)

    q, k, v = split(x @ wq.mT + bq), split(y @ wk.mT + bk), split(y @ wv.mT + bv)
    count = keep.sum(-1, keepdim=True).clamp(min=1).double()
    scores = (q @ k.mT * layer.kappa * count.log() / layer.head_dim).masked_fill(~keep, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return EntropyInvariantAttention(16, 4, kappa=1.5, dtype=torch.float64)


def test_the_usage_sample_has_the_shapes_it_prints():
    layer = EntropyInvariantAttention(512, 8)
    x = torch.randn(4, 100, 512)
    out, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    assert (tuple(out.shape), tuple(weights.shape)) == ((4, 100, 512), (4, 8, 100, 100))
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 8, 100))
    assert layer(x, x, x)[1] is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", ["square", "batch", "batch and one head", "keys"])
def test_a_keep_mask_shows_where_it_is_one(layer, dtype, shape):
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    if shape != "square":
        keep = keep & (torch.rand(3, 7, 7) < 0.8)
        keep[1, 4] = False  # a row that sees nothing
    if shape == "keys":
        keep = torch.arange(7)[None, None, :] < torch.tensor([7, 4, 1])[:, None, None]
    given = keep[:, None] if shape == "batch and one head" else keep
    full = (keep if keep.dim() == 2 else keep[:, None]).expand(3, 1, 7, 7) if keep.dim() == 3 else keep
    out, weights = layer(x, x, x, keep_mask=given.to(dtype), need_weights=True, average_attn_weights=False)
    want, wanted = by_hand(layer, x, full.expand(3, 4, 7, 7))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(weights, wanted)
    assert (weights[~full.expand(3, 4, 7, 7)] == 0).all()


def test_the_same_mask_hides_in_torchs_language(layer):
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(layer(x, keep_mask=keep)[0], layer(x, attn_mask=~keep)[0])
    assert not torch.allclose(layer(x, keep_mask=keep)[0], layer(x, attn_mask=keep)[0])


def test_cross_attention_counts_keys(layer):
    x, y = torch.randn(2, 3, 16, dtype=torch.float64), torch.randn(2, 9, 16, dtype=torch.float64)
    keep = torch.ones(2, 4, 3, 9, dtype=torch.bool)
    torch.testing.assert_close(layer(x, y, y)[0], by_hand(layer, x, keep, y)[0])
    assert math.isclose(layer.scale(9, 4).item(), 1.5 * math.log(9) / 4)


def test_a_mask_that_could_be_either_is_refused(layer):
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    for mask in (keep, keep.expand(3, 1, 7, 7)):
        with pytest.raises(ValueRangeError, match="could be either"):
            layer(x, x, x, mask)
    with pytest.raises(ValueRangeError, match="does not say what it means"):
        layer(x, x, x, mask=keep)
    square = torch.randn(7, 7, 16, dtype=torch.float64)  # as many sequences as tokens: a shape tells nothing
    with pytest.raises(ValueRangeError, match="could be either"):
        layer(square, square, square, keep)
    layer(square, key_padding_mask=~keep)
    pad = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]
    torch.testing.assert_close(layer(x, x, x, pad)[0], layer(x, key_padding_mask=pad)[0])
    torch.testing.assert_close(layer(x, x, x, pad, True, None, False)[1], layer(
        x, key_padding_mask=pad, need_weights=True, average_attn_weights=False
    )[1])  # fmt: skip


def test_mistakes_are_named(layer):
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    keep = torch.ones(7, 7, dtype=torch.bool)
    mistakes = [
        ({"keep_mask": torch.full((7, 7), -1e9)}, ValueRangeError, "0 and 1"),
        ({"keep_mask": keep[:5]}, ShapeError, "keep_mask must be"),
        ({"keep_mask": keep, "attn_mask": ~keep}, ValueRangeError, "not both"),
    ]
    for options, error, message in mistakes:
        with pytest.raises(error, match=message):
            layer(x, **options)
    with pytest.raises(ValueRangeError, match="each once"):
        layer(x, x, x, None, True, need_weights=False)
