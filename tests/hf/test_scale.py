"""Scale policies in existing models: for all layers, per layer, kept by save_pretrained (M-SCL-5, M-SCL-7)."""

from __future__ import annotations

import math

import pytest
import torch

import partita
import partita.hf
from partita import scale
from tests.hf.models import inputs, make, transformers


def stats(model, given):
    with torch.no_grad():
        out = model(**given, output_attentions=True)
    return out.attentions if "attentions" in out else out.decoder_attentions


@pytest.mark.parametrize("name", ["llama", "whisper", "t5"])
def test_the_usual_policy_changes_nothing(name):
    """Whisper scales its queries beforehand and T5 not at all: a policy is relative to the model's own scale."""
    partita.hf.register("partita-same", scale=scale.InverseSqrt())
    given, real = inputs(name, "right")
    with torch.no_grad():
        theirs, ours = (make(name, kind)(**given).logits for kind in ("eager", "partita-same"))
    torch.testing.assert_close(ours[real], theirs[real], atol=1e-5, rtol=1e-5)


def test_a_policy_sees_the_visible_length_of_each_row():
    """With LogLength(reference=4), row i of a causal model is multiplied by log max(n_i, 4) / log 4."""
    partita.hf.register("partita-log", scale=scale.LogLength(reference=4))
    given, _ = inputs("llama", "right")
    plain, sharp = (stats(make("llama", kind), given)[0] for kind in (partita.hf.register(), "partita-log"))
    factor = torch.tensor([math.log(max(i + 1, 4)) / math.log(4) for i in range(12)])
    torch.testing.assert_close(sharp.max_score[0], plain.max_score[0] * factor, atol=1e-5, rtol=1e-5)


def test_one_policy_per_layer():
    partita.hf.register("partita-second", scale={1: scale.TargetEntropy(entropy=0.5)})
    given, _ = inputs("llama", "right")
    first, second = stats(make("llama", "partita-second"), given)
    reach = second.visible > 1
    torch.testing.assert_close(second.entropy[reach], torch.full_like(second.entropy[reach], 0.5), atol=1e-4, rtol=0)
    assert (first.entropy[first.visible > 8] - 0.5).abs().min() > 0.1


def test_a_function_of_the_module_chooses():
    partita.hf.register(
        "partita-cross", scale=lambda m: scale.Constant(0.0) if getattr(m, "is_decoder", False) else None
    )
    given, _ = inputs("whisper", "right")
    with torch.no_grad():
        out = make("whisper", "partita-cross")(**given, output_attentions=True)
    flat = out.cross_attentions[0]
    torch.testing.assert_close(flat.entropy, flat.visible.log())
    assert (out.encoder_attentions[0].entropy < out.encoder_attentions[0].visible.log() - 1e-4).any()


def test_a_saved_model_keeps_its_policy(tmp_path):
    partita.hf.register()
    given, _ = inputs("llama", "right")
    model = make("llama", "partita")
    before = model(**given).logits
    partita.hf.set_scale(model, {0: scale.LogLength(reference=3), 1: scale.Mixed(beta=2.0)})
    after = model(**given).logits
    assert (after - before).abs().max() > 1e-4
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="partita")
    torch.testing.assert_close(again.eval()(**given).logits, after)
    partita.hf.set_scale(model, None)
    torch.testing.assert_close(model(**given).logits, before)


def test_a_learned_policy_learns_but_does_not_fit_into_a_config():
    learned = scale.ScalableSoftmax(4)
    partita.hf.register("partita-learned", scale=learned)
    given, _ = inputs("llama", "right")
    make("llama", "partita-learned")(**given).logits.square().sum().backward()
    assert learned.s.grad.abs().min() > 0
    with pytest.raises(partita.errors.ValueRangeError, match="learns"):
        partita.hf.set_scale(make("llama", "eager"), learned)


def test_a_policy_that_nobody_would_follow_is_refused(tmp_path):
    partita.hf.register()
    plain = make("llama", "sdpa")
    with pytest.raises(partita.errors.ValueRangeError, match=r"attention of this model is 'sdpa'.*set_attn_impl"):
        partita.hf.set_scale(plain, scale.LogLength(reference=3))
    partita.hf.set_scale(plain, None)  # nothing to follow
    plain.set_attn_implementation("partita")
    partita.hf.set_scale(plain, scale.LogLength(reference=3))
    plain.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"holds a scale policy of partita.*attn_implementation='partita'"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="partita")
    assert again.config.partita_scale["policy"] == "LogLength"
