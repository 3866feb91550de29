"""Tiny random Hugging Face models: recorded numbers equal those of eager attention, and nothing else changes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from oracle import Softmaxes, assert_equal, expected

from partita.monitor import watch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0}
TEXT = {"bos_token_id": 1, "eos_token_id": 2}
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", WIDE),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TEXT}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**WIDE, **TEXT, "num_key_value_heads": 2}),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 48, "decoder_start_token_id": 0},
    ),
}  # fmt: skip
SHARP = ("query", "key", "c_attn", "q_proj", "k_proj", ".q.", ".k.", "relative_attention_bias")


def pair(name: str) -> tuple[Any, Any]:
    """One model with fused and with eager attention."""
    torch.manual_seed(0)
    model, config, sizes = MODELS[name]
    fast, eager = (
        getattr(transformers, model)(getattr(transformers, config)(attn_implementation=how, **SMALL, **sizes)).eval()
        for how in ("sdpa", "eager")
    )
    # random initialisation is nearly uniform: larger query and key weights give every statistic a value that differs
    with torch.no_grad():
        for key, p in fast.named_parameters():
            if p.dim() == 2 and any(part in key for part in SHARP):
                p.normal_(0, 0.5)
    eager.load_state_dict(fast.state_dict())
    return fast, eager


def batch(name: str, padded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 50, (3, 11))
    inputs = {"input_ids": ids}
    if padded:
        mask = torch.ones(3, 11, dtype=torch.long)
        mask[1, 8:] = 0
        mask[2, 5:] = 0
        inputs["attention_mask"] = mask
    if name == "t5":
        inputs["decoder_input_ids"] = torch.randint(3, 50, (3, 7))
    return inputs


def snapshot(model: torch.nn.Module) -> list[Any]:
    hooks = [
        [dict(h) for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
        + [m.__dict__.get("forward"), m.__class__]
        for m in model.modules()
    ]
    state = [(k, v.clone()) for k, v in model.state_dict().items()]
    return [hooks, state, getattr(model.config, "_attn_implementation", None)]


def assert_untouched(before: list[Any], model: torch.nn.Module) -> None:
    after = snapshot(model)
    assert before[0] == after[0] and before[2] == after[2]
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(before[1], after[1], strict=True))


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_numbers_equal_those_of_eager_attention(name: str, how: str, padded: bool) -> None:
    fast, eager = pair(name)
    inputs = batch(name, padded)
    with torch.no_grad(), Softmaxes() as seen:
        eager(**inputs)
    model = fast if how == "sdpa" else eager
    before = snapshot(model)
    with torch.no_grad():
        plain = model(**inputs)[0]
        with watch(model) as w:
            out = model(**inputs)[0]
    assert_untouched(before, model)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)
    assert len(w.record.sites) == len(seen), (w.coverage, len(seen))
    frame = w.frame(pandas=False)
    for layer, scores in enumerate(seen):
        keep = inputs.get("attention_mask")
        inside_decoder = name == "t5" and layer >= 2
        keep = None if keep is None or inside_decoder else keep.bool()
        assert_equal(frame, layer, expected(scores, keep))
    assert not w.coverage["missed"], str(w.coverage)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_are_those_without_watching(name: str) -> None:
    model, _ = pair(name)
    inputs = batch(name, True)
    gradients = []
    for watched in (False, True):
        model.zero_grad()
        with watch(model) if watched else contextlib.nullcontext() as w:
            model(**inputs)[0].square().mean().backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    assert len(w.frame(pandas=False)) == 8 and gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-6, atol=1e-8)


def test_an_exception_inside_leaves_the_model_alone() -> None:
    model, _ = pair("bert")
    before = snapshot(model)

    def broken_training() -> None:
        with watch(model):
            model(**batch("bert", False))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        broken_training()
    assert_untouched(before, model)
    with pytest.raises(Exception), watch(model):
        model(input_ids=torch.full((1, 4), 999))  # fails inside a forward
    assert_untouched(before, model)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_loss_inside_the_model_is_seen() -> None:
    model, _ = pair("gpt2")
    inputs = batch("gpt2", False)
    with torch.no_grad(), watch(model) as w:
        out = model(**inputs, labels=inputs["input_ids"])
    (row,) = w.record.losses
    assert row["type"] == "classification" and row["classes"] == 50
    assert abs(row["loss"] - out.loss.item()) < 1e-4


def test_generation_with_a_cache_sees_the_new_tokens() -> None:
    model, _ = pair("llama")
    ids = torch.randint(3, 50, (1, 6))
    with torch.no_grad():
        plain = model.generate(ids, max_new_tokens=4, do_sample=False)
        with watch(model) as w:
            out = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(plain, out)
    rows = [r for r in w.frame(pandas=False) if r["layer"] == 0 and r["head"] == 0]
    assert [r["length"] for r in rows] == [6, 7, 8, 9]
    assert [r["rows"] for r in rows] == [5, 1, 1, 1]  # the first token of the prompt sees one key


def test_gradient_checkpointing_is_counted_once() -> None:
    model, _ = pair("bert")
    model.train()
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    for config in (model.config, *(m.config for m in model.modules() if hasattr(m, "config"))):
        config.attention_probs_dropout_prob = 0.0
    inputs = batch("bert", False)
    counts = []
    for reentrant in (None, False, True):
        copied = copy.deepcopy(model)
        if reentrant is not None:
            copied.gradient_checkpointing_enable({"use_reentrant": reentrant})
        w = watch(copied)  # a handle: inside a with block, backward already runs with the mode off
        copied(**inputs)[0].sum().backward()
        w.detach()
        counts.append([(r["rows"], round(r["entropy"], 4)) for r in w.frame(pandas=False)])
    assert counts[0] == counts[1] == counts[2]
