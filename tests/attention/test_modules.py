"""The modules against torch.nn: constructor, state dicts both ways, outputs, gradients (M-ATT-2, M-ATT-3)."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn as tnn

import partita
from partita import nn, scale, support
from partita.attn import RelativeBias
from partita.errors import ShapeError, ValueRangeError

OPTIONS = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"kdim": 6, "vdim": 10},
    {"kdim": 6, "vdim": 10, "bias": False, "add_bias_kv": True},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
]
WIDE = {"dtype": torch.float64}


def pair(**options):
    """torch's module, ours with its weights, and torch's again with ours."""
    torch.manual_seed(3)
    theirs = tnn.MultiheadAttention(8, 2, **WIDE, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
    ours = nn.MultiheadAttention(8, 2, **WIDE, **options)
    ours.load_state_dict(theirs.state_dict())
    back = tnn.MultiheadAttention(8, 2, **WIDE, **options)
    back.load_state_dict(ours.state_dict())
    return back, ours


def tensors(options, n_query=5, n_key=7, batch=3):
    shapes = ((n_query, 8), (n_key, options.get("kdim", 8)), (n_key, options.get("vdim", 8)))
    made = [torch.randn(batch, n, d, **WIDE) for n, d in shapes]
    made = made if options.get("batch_first") else [x.transpose(0, 1) for x in made]
    return [x.detach().clone().requires_grad_() for x in made]


def masks(kind, heads=2, n_query=5, n_key=7, batch=3):
    torch.manual_seed(11)
    padding = torch.arange(n_key) >= torch.tensor([7, 4, 2])[:, None]
    if kind == "padding":
        return {"key_padding_mask": padding}
    if kind == "padding added":
        return {"key_padding_mask": torch.randn(batch, n_key, **WIDE)}
    if kind == "hidden":
        return {"attn_mask": torch.ones(n_query, n_key, dtype=torch.bool).triu(2)}
    if kind == "added per head":
        return {"attn_mask": torch.randn(batch * heads, n_query, n_key, **WIDE)}
    if kind == "both":
        return {"attn_mask": torch.ones(n_query, n_key, dtype=torch.bool).triu(2), "key_padding_mask": padding}
    return {}


def assert_equal_modules(theirs, ours, given, options):
    outputs = []
    for module in (theirs, ours):
        inputs = [x.detach().clone().requires_grad_() for x in given]
        out, weights = module(*inputs, **options)
        seen = out.square().sum() + (0 if weights is None else weights.square().sum())
        seen.backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        outputs.append((out, weights, [x.grad for x in inputs], grads))
        module.zero_grad()
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_dicts_load_both_ways_with_equal_outputs_and_gradients(options):
    theirs, ours = pair(**options)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert_equal_modules(theirs, ours, tensors(options), {})


@pytest.mark.parametrize("kind", ["padding", "padding added", "hidden", "added per head", "both"])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["plain", "extra keys"])
@pytest.mark.parametrize("call", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
def test_masks_mean_what_they_mean_in_torch(kind, options, call):
    theirs, ours = pair(**options)
    assert_equal_modules(theirs, ours, tensors(options), {**masks(kind), **call})


def test_inputs_without_a_batch():
    theirs, ours = pair()
    x = torch.randn(5, 8, **WIDE)
    for call in ({}, {"need_weights": False}, {"key_padding_mask": torch.tensor([False] * 3 + [True] * 2)}):
        torch.testing.assert_close(ours(x, x, x, **call), theirs(x, x, x, **call))


def test_the_same_seed_gives_torchs_weights():
    for options in OPTIONS:
        states = []
        for kind in (tnn, nn):
            torch.manual_seed(5)
            states.append(kind.MultiheadAttention(8, 2, **options).state_dict())
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_causal_needs_no_mask():
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 6, 8, **WIDE)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    torch.testing.assert_close(ours(x, x, x, is_causal=True), ours(x, x, x, attn_mask=future))


def test_a_padded_batch_entry_without_keys_gives_the_output_bias():
    """torch gives nan in its weights here."""
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 6, 8, **WIDE)
    hidden = torch.tensor([[False] * 6, [True] * 6])
    out, weights = ours(x, x, x, key_padding_mask=hidden)
    torch.testing.assert_close(out[1], ours.out_proj.bias.expand(6, 8))
    assert (weights[1] == 0).all()


def test_statistics_instead_of_weights():
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 6, 8, **WIDE)
    _, stats = ours(x, x, x, is_causal=True, return_stats=True)
    assert isinstance(stats, partita.Stats) and stats.entropy.shape == (2, 2, 6)
    _, weights = ours(x, x, x, is_causal=True, average_attn_weights=False)
    torch.testing.assert_close(stats.entropy, torch.special.entr(weights).sum(-1))


# ---- beyond torch ----------------------------------------------------------------------------------------------------


def test_fewer_key_heads_equal_repeated_ones():
    torch.manual_seed(0)
    few = nn.MultiheadAttention(8, 4, kv_heads=2, batch_first=True, **WIDE)
    full = nn.MultiheadAttention(8, 4, batch_first=True, **WIDE)
    (wq, wk, wv), (bq, bk, bv) = few.projections()
    again = [torch.cat([x[2 * (h // 2) : 2 * (h // 2) + 2] for h in range(4)]) for x in (wk, wv, bk, bv)]
    with torch.no_grad():
        full.in_proj_weight.copy_(torch.cat([wq, again[0], again[1]]))
        full.in_proj_bias.copy_(torch.cat([bq, again[2], again[3]]))
    full.out_proj.load_state_dict(few.out_proj.state_dict())
    x = torch.randn(2, 6, 8, **WIDE)
    torch.testing.assert_close(few(x, x, x), full(x, x, x))
    with pytest.raises(ShapeError, match="kv_heads"):
        nn.MultiheadAttention(8, 4, kv_heads=3)


def test_rotary_makes_outputs_depend_on_distance_alone():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, rotary=True, batch_first=True, **WIDE)
    x = torch.randn(1, 9, 8, **WIDE)
    near = support.window(2, 0)
    whole = layer(x, x, x, support=near)[0]
    part = layer(x[:, 3:], x[:, 3:], x[:, 3:], support=near)[0]
    torch.testing.assert_close(part[:, 2:], whole[:, 5:])
    plain = nn.MultiheadAttention(8, 2, batch_first=True, **WIDE)
    plain.load_state_dict(layer.state_dict())
    assert (plain(x, x, x)[0] - layer(x, x, x)[0]).abs().max() > 1e-3


def test_qk_norm_bounds_scores_whatever_the_weights():
    layer = nn.MultiheadAttention(8, 2, qk_norm=True, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.mul_(1000)
    x = torch.randn(2, 6, 8)
    _, stats = layer(x, x, x, return_stats=True)
    assert stats.max_score.max() <= 4 / 4**0.5 + 1e-5  # |q| = |k| = sqrt(dim)


def test_a_learned_sink_takes_mass_from_output_and_weights():
    layer = nn.MultiheadAttention(8, 2, sink=True, batch_first=True, **WIDE)
    x = torch.randn(2, 6, 8, **WIDE)
    _, weights = layer(x, x, x)
    assert ((weights.sum(-1) > 0) & (weights.sum(-1) < 1)).all()
    layer(x, x, x)[0].sum().backward()
    assert layer.sink.grad.abs().min() > 0
    with torch.no_grad():
        layer.sink.fill_(1e4)
    torch.testing.assert_close(layer(x, x, x)[0], layer.out_proj.bias.expand(2, 6, 8))


def test_a_position_rule_as_bias():
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **WIDE)
    x = torch.randn(2, 6, 8, **WIDE)
    rule = RelativeBias(torch.randn(2, 5, **WIDE))
    matrix = rule.dense(6, 6, x)
    torch.testing.assert_close(layer(x, x, x, attn_bias=rule), layer(x, x, x, attn_bias=matrix))
    padding = torch.zeros(2, 6, **WIDE)
    torch.testing.assert_close(
        layer(x, x, x, attn_bias=rule, key_padding_mask=padding), layer(x, x, x, attn_bias=matrix)
    )


# ---- the module of the notes -----------------------------------------------------------------------------------------


def test_entropy_invariant_attention_has_torchs_parameters():
    ours = nn.EntropyInvariantAttention(8, 2)
    theirs = tnn.MultiheadAttention(8, 2, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


def test_entropy_invariant_attention_counts_visible_keys():
    """Errata K1 to K6: own length of keys, the mask's count, zeros for empty rows, a head axis for a 3-D mask."""
    torch.manual_seed(0)
    layer = nn.EntropyInvariantAttention(8, 2, kappa=3.0, **WIDE)
    x, y = torch.randn(3, 5, 8, **WIDE), torch.randn(3, 7, 8, **WIDE)
    hidden = torch.rand(3, 5, 7) < 0.4
    hidden[1, 2] = True
    _, stats = layer(x, y, attn_mask=hidden, return_stats=True)
    seen = (~hidden).sum(-1)
    assert torch.equal(stats.visible, seen[:, None].expand(3, 2, 5).double())
    q, k, v = layer.project(x, y, y)
    scores = 3.0 * seen.clamp(min=1).log()[:, None, :, None] / 4 * (q @ k.mT)
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    want = layer.out_proj((weights @ v).transpose(1, 2).flatten(2))
    out, none = layer(x, y, attn_mask=hidden)
    assert none is None
    torch.testing.assert_close(out, want)


def test_entropy_invariant_attention_calibrated():
    layer = nn.EntropyInvariantAttention(128, 2).calibrated(reference=4096, sigma=8.0)
    assert round(layer.kappa, 2) == 2.77  # M-SCL-16
    assert layer.scale == scale.KappaLog(layer.kappa)
    under_bias = nn.EntropyInvariantAttention(128, 2).calibrated(4096, 8.0, growth=0.25)
    assert under_bias.kappa == pytest.approx(layer.kappa / 2)
    for wrong in ((1, 8.0), (4096, 0.0), (4096, 8.0, -1.0)):
        with pytest.raises(ValueRangeError):
            nn.EntropyInvariantAttention(8, 2).calibrated(*wrong)
    with pytest.raises(ValueRangeError, match="own scale"):
        nn.EntropyInvariantAttention(8, 2, scale=scale.Constant(1.0))


# ---- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [scale.LogLength(reference=16), scale.Mixed(beta=2.0), scale.TargetEntropy(fraction=0.5), scale.ScalableSoftmax(2)],
    ids=lambda p: type(p).__name__,
)
def test_a_saved_and_loaded_model_keeps_its_policy(policy):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, scale=policy)
    if isinstance(policy, scale.ScalableSoftmax):
        torch.nn.init.normal_(policy.s)
    x = torch.randn(2, 7, 8)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    fresh = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, scale=copy.deepcopy(policy))
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), model(x), rtol=0, atol=0)
    plain = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert (plain(x) - model(x)).abs().max() > 1e-5


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}, {"bias": False}], ids=str)
def test_layers_load_torchs_state_and_give_its_output(options):
    x, y = torch.randn(2, 6, 8, **WIDE), torch.randn(2, 9, 8, **WIDE)
    common = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, **WIDE, **options}
    padding = torch.arange(6) >= torch.tensor([6, 4])[:, None]
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    for kind, inputs, call in (
        ("TransformerEncoderLayer", (x,), {"src_mask": future, "src_key_padding_mask": padding}),
        ("TransformerDecoderLayer", (x, y), {"tgt_mask": future, "tgt_key_padding_mask": padding}),
    ):
        theirs = getattr(tnn, kind)(8, 2, **common)
        ours = getattr(nn, kind)(8, 2, **common)
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(*inputs, **call), theirs(*inputs, **call))


def test_a_layers_policy_reaches_its_attention():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, scale=scale.LogLength(), sink=True)
    assert layer.self_attn.scale == layer.multihead_attn.scale == scale.LogLength()
    assert layer.self_attn.sink is not None


def test_training_with_dropout_and_autocast():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True, scale=scale.LogLength()).train()
    x = torch.randn(2, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, is_causal=True)
    out.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
