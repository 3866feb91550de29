"""Other positions in trained rotary models: transformers' own formulas, reversible, kept, the same with a cache."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import partita
import partita.hf
from partita import scale
from partita.attn import NTK, Clipped, Interpolated, NoPositions, PartialRotary, YaRN
from partita.errors import ValueRangeError
from tests.hf.models import SMALL, TOKENS, inputs, make, spread, transformers

SETTINGS = [
    NTK(4.0),
    Interpolated(4.0),
    YaRN(4.0, 8),
    PartialRotary(0.5),
    NoPositions(),
    Clipped(3),
    Clipped(4, NTK(2.0)),
]
IDS = torch.arange(3, 24)[None]


def neox():
    """Only a quarter of the features turn, in a model that knows nothing of key heads."""
    config = transformers.GPTNeoXConfig(**SMALL, **TOKENS, rotary_pct=0.5)
    return transformers.GPTNeoXForCausalLM(config)


def cohere():
    """Neighbouring features are paired, not the two halves."""
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, **TOKENS))


def modernbert():
    """An encoder with frequencies of their own for two types of layers."""
    config = transformers.ModernBertConfig(
        **{**SMALL, "num_hidden_layers": 3}, **TOKENS, global_attn_every_n_layers=2, local_attention=8,
        cls_token_id=1, sep_token_id=2, reference_compile=False,
    )  # fmt: skip
    return transformers.ModernBertForMaskedLM(config)


def small(build):
    torch.manual_seed(3)
    model = spread(build())
    model.set_attn_implementation(partita.hf.register())
    return model


def logits(model, ids=IDS, **more):
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


@pytest.mark.parametrize(
    ("setting", "kind", "given"),
    [
        (Interpolated(4.0), "linear", {"factor": 4.0}),
        (YaRN(4.0, 64), "yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
        (YaRN(4.0, 512, fast=16.0, slow=2.0), "yarn",
         {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2}),
        (PartialRotary(0.4), "proportional", {"partial_rotary_factor": 0.4}),
    ],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(setting, kind, given):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters={"rope_type": kind, "rope_theta": 500.0, **given}
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[kind](config)
    ours = type(setting)(**{**vars(setting), "base": 500.0})
    torch.testing.assert_close(ours.frequencies(64).float(), theirs, rtol=1e-5, atol=1e-9)
    assert ours.amplitude == pytest.approx(factor)


def test_ntk_is_the_dynamic_one_at_its_length():
    """transformers' "dynamic" with factor 1 at 8 times the trained length stretches the base by factor 8."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 1.0},
    )  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=8 * 64)
    torch.testing.assert_close(NTK(8.0, base=500.0).frequencies(64).float(), theirs, rtol=1e-5, atol=1e-9)


def test_a_set_model_is_one_that_was_made_so():
    """The logits of a Llama made with rope_type yarn are those of a plain one that was set to it."""
    plain = make("llama", partita.hf.register())
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = copy.deepcopy(plain.config)
    config.rope_parameters = {**config.rope_parameters, **parameters}
    made = transformers.LlamaForCausalLM(config).eval()
    made.load_state_dict(plain.state_dict())
    made.set_attn_implementation("sdpa")
    partita.hf.set_positions(plain, YaRN(4.0, 64))
    torch.testing.assert_close(logits(plain), logits(made), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("build", [lambda: make("llama", partita.hf.register()), lambda: small(neox),
                                   lambda: small(cohere), lambda: small(modernbert)],
                         ids=["llama", "neox", "cohere", "modernbert"])  # fmt: skip
def test_settings_come_and_go(build):
    model = build()
    own = logits(model)
    for setting in SETTINGS:
        partita.hf.set_positions(model, setting)
        assert (logits(model) - own).abs().max() > 1e-3, setting
    partita.hf.set_positions(model, Clipped(100))  # no distance is longer
    torch.testing.assert_close(logits(model), own, atol=1e-4, rtol=1e-4)
    partita.hf.set_positions(model, None)
    assert torch.equal(logits(model), own)


POLICIES = [
    None,
    scale.InverseSqrt(1.3),
    scale.Constant(0.4),
    scale.KappaLog(2.0),
    scale.LogLength(6, floor=6),
    scale.SqrtLogLength(6),
    scale.Llama4Temperature(4, 0.5),
    scale.YarnTemperature(4.0),
    scale.CriticalScale(6, 0.7),
    scale.CriticalScale(6, (0.3, 0.7, 1.0, 1.5)),  # as `fit` finds it, a head each
    scale.Mixed(beta=0.5),
    scale.MaxLength(64),
    scale.BestFor(relevant=2, margin=3.0),
    scale.CalibratedLog(6, 2.0),
    scale.GaussianEntropy(1.0, 2.0),
    scale.TargetEntropy(fraction=0.5),
]


def assert_pieces_give_the_whole(model):
    whole = logits(model)
    n = IDS.shape[1]
    for cuts in ([0, 8, 15, n], [0, *range(9, n + 1)]):
        cache = transformers.DynamicCache(config=model.config)
        parts = [logits(model, IDS[:, a:b], past_key_values=cache) for a, b in itertools.pairwise(cuts)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-4, rtol=2e-4)
    return whole


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_chunked_prefill_and_steps_give_the_same(policy):
    """Every policy with every setting of positions, each of which changes what comes out."""
    model = make("llama", partita.hf.register())
    seen = []
    for setting in [None, *SETTINGS]:
        partita.hf.set_positions(model, setting)
        partita.hf.set_scale(model, policy)
        if isinstance(policy, scale.TargetEntropy) and isinstance(setting, Clipped):
            with pytest.raises(ValueRangeError, match="use another policy"):
                logits(model)
            continue
        seen.append(assert_pieces_give_the_whole(model))
    assert all((a - b).abs().max() > 1e-4 for a, b in itertools.combinations(seen, 2))


def test_a_learned_policy_gives_the_same_in_pieces():
    """Scalable softmax comes with the registration; its own factor in each head, under every setting of positions."""
    learned = scale.ScalableSoftmax(4)
    with torch.no_grad():
        learned.s.copy_(torch.tensor([0.5, 1.0, 2.0, 3.0]))
    model = make("llama", partita.hf.register("partita-scalable", scale=learned))
    plain = logits(make("llama", partita.hf.register()))
    for setting in [None, *SETTINGS]:
        partita.hf.set_positions(model, setting)
        assert (assert_pieces_give_the_whole(model) - plain).abs().max() > 1e-3


def test_every_policy_that_can_be_set_is_among_them():
    """A new policy is to be added above, unless it learns."""
    kinds = {c for c in vars(scale).values() if isinstance(c, type) and issubclass(c, scale.Policy)}
    assert kinds - {scale.Policy, scale.ScalableSoftmax} == {type(p) for p in POLICIES if p is not None}


@pytest.mark.parametrize("setting", [YaRN(4.0, 8), Clipped(3)], ids=repr)
def test_a_sliding_window_gives_the_same_in_pieces(setting):
    model = make("mistral", partita.hf.register())
    partita.hf.set_positions(model, setting)
    assert_pieces_give_the_whole(model)


@pytest.mark.parametrize("setting", [YaRN(4.0, 8), Clipped(3)], ids=repr)
def test_generation_with_growing_and_fixed_caches_and_padding(setting):
    model = make("llama", partita.hf.register())
    partita.hf.set_positions(model, setting)
    partita.hf.set_scale(model, scale.LogLength(6, floor=6))
    given, _ = inputs("llama", "left")
    more = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    grown = model.generate(**given, **more)
    assert torch.equal(model.generate(**given, **more, cache_implementation="static"), grown)
    assert torch.equal(model.generate(**given, **more, use_cache=False), grown)
    for ids, keep, out in zip(given["input_ids"], given["attention_mask"], grown, strict=True):
        alone = model.generate(input_ids=ids[keep.bool()][None], **more)
        assert torch.equal(alone[0, -6:], out[-6:])  # padding does not count as distance, nor as keys


def test_llama4_temperature_is_the_model_s_own():
    """The query scales of transformers' Llama 4 attention, read off its code by running it on queries of ones."""
    from transformers.models.llama4 import modeling_llama4

    config = transformers.Llama4TextConfig(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        no_rope_layers=[0], attn_temperature_tuning=True, floor_scale=4, attn_scale=0.3, use_qk_norm=False,
    )  # fmt: skip
    layer = modeling_llama4.Llama4TextAttention(config, 0)
    seen = {}

    def read(module, query, *_, **__):
        seen["query"] = query
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register("partita-read", read)
    config._attn_implementation = "partita-read"
    x = torch.ones(1, 20, 16)
    with torch.no_grad():
        layer(x, (torch.ones(()),) * 2, None)
        plain = layer.q_proj(x).view(1, 20, 2, 8).transpose(1, 2)
    factor = scale.Llama4Temperature(4, 0.3)(torch.arange(1, 21), 8) * 8**0.5
    torch.testing.assert_close(seen["query"], plain * factor[:, None])


@pytest.mark.parametrize("setting", [YaRN(4.0, 8), Clipped(3, NTK(2.0))], ids=repr)
def test_a_saved_model_keeps_its_positions(setting, tmp_path):
    partita.hf.register()
    model = make("llama", "partita")
    own = logits(model)
    partita.hf.set_positions(model, setting)
    after = logits(model)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="partita").eval()
    torch.testing.assert_close(logits(again), after)
    torch.testing.assert_close(logits(copy.deepcopy(again)), after)
    partita.hf.set_positions(again, None)
    torch.testing.assert_close(logits(again), own)


def test_what_cannot_be_set_is_told():
    with pytest.raises(ValueRangeError, match="no rotary positions"):
        partita.hf.set_positions(make("gpt2", "sdpa"), NTK(2.0))
    with pytest.raises(ValueRangeError, match="set_attn_implementation"):
        partita.hf.set_positions(make("llama", "sdpa"), Clipped(3))
    with pytest.raises(ValueRangeError, match="must be a setting"):
        partita.hf.set_positions(make("llama", "sdpa"), 4.0)
    model = make("llama", "sdpa")
    partita.hf.set_positions(model, YaRN(4.0, 8))  # frequencies alone need no attention of ours
    config = transformers.LlamaConfig(
        **SMALL, **TOKENS, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    with pytest.raises(ValueRangeError, match="with the length"):
        partita.hf.set_positions(transformers.LlamaForCausalLM(config), NTK(2.0))


def test_a_model_that_turns_otherwise_is_refused(monkeypatch):
    model = make("llama", partita.hf.register())
    own = logits(model)
    rotary = model.model.rotary_emb
    own_forward = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda x, position_ids: tuple(t.flip(1) for t in own_forward(x, position_ids))
    )
    wrong = logits(model)
    assert (wrong - own).abs().max() > 1e-3
    with pytest.raises(ValueRangeError, match="cannot be clipped"):
        partita.hf.set_positions(model, Clipped(3))
    assert torch.equal(logits(model), wrong)  # as before
