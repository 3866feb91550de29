"""The modules against torch.nn: constructor, state dicts both ways, outputs, gradients (M-ATT-2, M-ATT-3)."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.nn as tnn

import partita
from partita import nn, scale, score, support
from partita.attn import RelativeBias
from partita.errors import DtypeError, ShapeError, ValueRangeError

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


@pytest.mark.parametrize("sink", [-torch.inf, 0.5])
def test_a_sequence_of_padding_alone_gives_0_whatever_the_sink(sink):
    layer = nn.MultiheadAttention(8, 2, sink=True, batch_first=True, **WIDE)
    with torch.no_grad():
        layer.sink.fill_(sink)
    x = torch.randn(2, 6, 8, **WIDE)
    out, weights = layer(x, x, x, key_padding_mask=torch.tensor([[True] * 6, [False] * 6]))
    assert (weights[0] == 0).all()
    torch.testing.assert_close(out[0], layer.out_proj.bias.expand(6, 8))
    (out.square().sum() + weights.square().sum()).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


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
    return nn.EntropyInvariantAttention(16, 4, kappa=1.5, dtype=torch.float64)


def test_the_usage_sample_runs_as_it_is_printed(capsys):
    """Section 29 of the note on scales, line by line."""
    from partita.nn import EntropyInvariantAttention

    d_model = 512
    num_heads = 8
    attn = EntropyInvariantAttention(d_model, num_heads, kappa=1.0)

    batch_size = 32
    seq_len = 100
    X = torch.randn(batch_size, seq_len, d_model)

    output, weights = attn(X, X, X)

    print(f"Output shape: {output.shape}")
    print(f"Attention weights shape: {weights.shape}")
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "Output shape: torch.Size([32, 100, 512])",
        "Attention weights shape: torch.Size([32, 8, 100, 100])",
    ]
    torch.testing.assert_close(weights.sum(-1), torch.ones(32, 8, 100))


class Printed(tnn.Module):
    """The module of the notes: four linear maps, log of the number of queries, weights of every head."""

    def __init__(self, d_model, num_heads, kappa=1.0):
        super().__init__()
        self.num_heads, self.kappa = num_heads, kappa
        self.W_Q, self.W_K, self.W_V, self.W_O = (tnn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, Q, K, V):
        maps = ((self.W_Q, Q), (self.W_K, K), (self.W_V, V))
        q, k, v = (W(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for W, x in maps)
        weights = (q @ k.mT * (self.kappa * math.log(Q.shape[1]) / q.shape[-1])).softmax(-1)
        return self.W_O((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a model"])
def test_the_state_dict_of_the_notes_loads(inside):
    """In self-attention without a mask theirs and ours are the same function; torch's names load as before."""
    torch.manual_seed(0)
    theirs, ours = Printed(16, 4, 3.0).double(), nn.EntropyInvariantAttention(16, 4, 3.0, dtype=torch.float64)
    given = theirs.state_dict()
    if inside:
        tnn.ModuleList([ours]).load_state_dict({f"0.{name}": x for name, x in given.items()})
    else:
        ours.load_state_dict(given)
    assert set(given) == {f"W_{a}.{b}" for a in "QKVO" for b in ("weight", "bias")}  # the caller's is left alone
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))
    torch.testing.assert_close(ours(x)[0], theirs(x, x, x)[0])
    nn.EntropyInvariantAttention(16, 4, dtype=torch.float64).load_state_dict(ours.state_dict())
    with pytest.raises(RuntimeError, match="W_V"):
        ours.load_state_dict({name: x for name, x in given.items() if name != "W_O.weight"})


def test_the_arguments_of_the_notes():
    """d_model by name, kappa by position; weights of every head unless torch's options say otherwise."""
    layer = nn.EntropyInvariantAttention(d_model=8, num_heads=2, kappa=2.0)
    assert layer.embed_dim == 8 and nn.EntropyInvariantAttention(8, 2, 2.0).scale == layer.scale == scale.KappaLog(2.0)
    x = torch.randn(3, 5, 8)
    assert layer(x)[1] is None and layer(x, x, x, need_weights=False)[1] is None
    assert layer(x, x, x)[1].shape == layer(x, x, x, keep_mask=torch.ones(5, 5))[1].shape == (3, 2, 5, 5)
    assert layer(x, x, x, need_weights=True)[1].shape == (3, 5, 5)
    assert layer(x, x, x, average_attn_weights=True)[1].shape == (3, 5, 5)
    assert layer(x, x, x, return_stats=True)[1].entropy.shape == (3, 2, 5)
    for sizes in ({"num_heads": 2}, {"embed_dim": 8, "d_model": 8, "num_heads": 2}):
        with pytest.raises(ValueRangeError, match="embed_dim or d_model"):
            nn.EntropyInvariantAttention(**sizes)


# ---- another score ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharp", [None, 3.0, scale.LogLength(8)], ids=["no scale", "a number", "a policy"])
@pytest.mark.parametrize(
    "made", [score.Cosine, score.SquaredDistance, score.Distance, lambda: score.Additive(4, 4, 3, dtype=torch.float64)]
)
def test_a_score_of_another_kind(made, sharp):
    """Weights and output of a whole layer by hand; a module's parameters are the layer's, with gradients."""
    torch.manual_seed(0)
    kind = made()
    layer = nn.MultiheadAttention(8, 2, batch_first=True, scale=sharp, score=kind, **WIDE)
    x = torch.randn(2, 5, 8, **WIDE)
    out, weights = layer(x, x, x, average_attn_weights=False, is_causal=True)
    q, k, v = layer.project(x, x, x)
    n = torch.arange(1.0, 6.0, dtype=torch.float64)
    factor = 1.0 if sharp is None else sharp if sharp == 3.0 else sharp(n, 4)[:, None]
    raw = (factor * kind(q, k)).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(weights, raw.softmax(-1))
    torch.testing.assert_close(out, layer.out_proj((raw.softmax(-1) @ v).transpose(1, 2).flatten(2)))
    assert not torch.allclose(out, nn.MultiheadAttention.forward(_without_score(layer), x, x, x, is_causal=True)[0])
    out.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name


def _without_score(layer):
    plain = copy.deepcopy(layer)
    plain.score = None
    return plain


def test_a_score_that_is_none_is_refused_at_once():
    with pytest.raises(DtypeError, match="Make one of this class: Cosine"):
        nn.MultiheadAttention(8, 2, score=score.Cosine)


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


@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_same_mask_hides_in_torchs_language(layer, batch):
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    keep = torch.ones(7, 7, dtype=torch.bool).tril() & (torch.rand(*batch, 7, 7) < 0.8)
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
    with pytest.raises(ValueRangeError, match="mask= is ambiguous"):
        layer(x, x, x, mask=keep)
    square = torch.randn(7, 7, 16, dtype=torch.float64)  # 7 sequences of 7 tokens: a shape tells nothing
    with pytest.raises(ValueRangeError, match="could be either"):
        layer(square, square, square, keep)
    layer(square, key_padding_mask=~keep)
    pad = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]
    torch.testing.assert_close(layer(x, x, x, pad)[0], layer(x, key_padding_mask=pad)[0])
    torch.testing.assert_close(layer(x, x, x, pad, True, None, False)[1], layer(
        x, key_padding_mask=pad, need_weights=True, average_attn_weights=False
    )[1])  # fmt: skip


def test_mistakes_in_masks_are_named(layer):
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


def test_entropy_invariant_attention_calibrated():
    layer = nn.EntropyInvariantAttention(128, 2).calibrated(reference=4096, sigma=8.0)
    assert round(layer.kappa, 2) == 2.77  # M-SCL-16
    assert layer.scale == scale.KappaLog(layer.kappa)
    under_bias = nn.EntropyInvariantAttention(128, 2).calibrated(4096, 8.0, growth=0.25)
    assert under_bias.kappa == pytest.approx(layer.kappa / 2)


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
