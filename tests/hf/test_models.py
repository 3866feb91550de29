"""Tiny models of every kind of attention: logits, gradients and generation equal eager attention (M-ATT-1)."""

from __future__ import annotations

import pytest
import torch

import partita
import partita.hf
from tests.hf.models import DECODERS, MODELS, inputs, make, transformers


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    partita.hf.register()


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_eager(name, padding):
    given, real = inputs(name, padding)
    with torch.no_grad():
        theirs, ours = (make(name, kind)(**given).logits for kind in ("eager", "partita"))
    torch.testing.assert_close(ours[real], theirs[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_training_step_equal_eager(name):
    given, real = inputs(name, "right")
    grads = []
    for kind in ("eager", "partita"):
        model = make(name, kind).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        for module in model.modules():  # attention dropout is a number in most models
            for attribute in ("attention_dropout", "dropout", "activation_dropout"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
        logits = model(**given).logits[real]
        torch.nn.functional.cross_entropy(logits, torch.arange(logits.shape[0]) % 99).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for parameter in grads[0]:
        torch.testing.assert_close(grads[1][parameter], grads[0][parameter], atol=1e-5, rtol=1e-4, msg=parameter)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache_equals_eager(name, cache):
    given, _ = inputs(name, "left")
    extra = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    theirs, ours = (
        make(name, kind).generate(**given, max_new_tokens=6, do_sample=False, use_cache=True, **extra)
        for kind in ("eager", "partita")
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_generation_of_encoder_decoders_equals_eager(name):
    given, _ = inputs(name, "right")
    given = {k: v for k, v in given.items() if not k.startswith("decoder")}
    theirs, ours = (
        make(name, kind).generate(**given, max_new_tokens=6, do_sample=False) for kind in ("eager", "partita")
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "whisper"])
def test_output_attentions_are_statistics(name):
    given, _ = inputs(name, "right")
    model = make(name, "partita")
    out = model(**given, output_attentions=True)
    kinds = (
        {"encoder_attentions", "decoder_attentions", "cross_attentions"}
        if name in ("t5", "whisper")
        else {"attentions"}
    )
    for kind in kinds:
        layers = getattr(out, kind)
        assert len(layers) == 2
        for stats in layers:
            assert isinstance(stats, partita.Stats)
            assert stats.entropy.shape[:2] == (3, 4) and stats.entropy.dim() == 3
    if name == "bert":
        visible = given["attention_mask"].sum(-1)
        assert torch.equal(out.attentions[0].visible, visible[:, None, None].expand(3, 4, 12).float())
        theirs = make(name, "eager")(**given, output_attentions=True).attentions[1]
        entropy = torch.special.entr(theirs).sum(-1)
        torch.testing.assert_close(out.attentions[1].entropy, entropy, atol=1e-5, rtol=1e-5)


def test_statistics_are_differentiable():
    given, _ = inputs("llama", "right")
    model = make("llama", "partita")
    sum(stats.entropy.mean() for stats in model(**given, output_attentions=True).attentions).backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    assert model.model.layers[1].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_dropout_in_training_is_reproducible_and_random():
    given, _ = inputs("gpt2", "right")
    model = make("gpt2", "partita").train()

    def run(seed):
        torch.manual_seed(seed)
        return model(**given).logits

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_a_user_mask_of_the_dtypes_minimum_hides_keys():
    given, _ = inputs("llama", "right")
    n = given["input_ids"].shape[1]
    low = torch.finfo(torch.float32).min
    mask = torch.full((n, n), low).triu(1)[None, None].expand(3, 1, n, n)
    with torch.no_grad():
        theirs, ours = (
            make("llama", kind)(input_ids=given["input_ids"], attention_mask=mask, output_attentions=True)
            for kind in ("eager", "partita")
        )
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(ours.attentions[0].visible[0, 0], torch.arange(1, n + 1).float())


def test_names_transformers_would_misread_are_refused():
    with pytest.raises(partita.errors.ValueRangeError, match="sdpa"):
        partita.hf.register("my_sdpa")


def test_a_pretrained_model_can_be_asked_for_by_name(tmp_path):
    make("llama", "eager").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="partita")
    assert model.config._attn_implementation == "partita"
