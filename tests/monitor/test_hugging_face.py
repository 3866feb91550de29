"""Tiny random Hugging Face models: recorded numbers equal those of eager attention, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import Softmaxes, assert_equal, expected

from partita.monitor import watch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0}


def bert(how: str) -> Any:
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        attn_implementation=how,
        **SMALL,
    )
    return transformers.BertModel(config)


def gpt2(how: str) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation=how,
            **SMALL,
        )
    )


def llama(how: str) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        attn_implementation=how,
        bos_token_id=1,
        eos_token_id=2,
        **SMALL,
    )
    return transformers.LlamaForCausalLM(config)


def t5(how: str) -> Any:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        d_ff=48,
        attn_implementation=how,
        decoder_start_token_id=0,
        **SMALL,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5}


def sharpen(model: torch.nn.Module) -> None:
    """Random initialisation is nearly uniform: larger query and key weights give every statistic something to say."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if (
                any(
                    k in name
                    for k in ("query", "key", "c_attn", "q_proj", "k_proj", ".q.", ".k.", "relative_attention_bias")
                )
                and p.dim() == 2
            ):
                p.normal_(0, 0.5)


def pair(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    fast = MODELS[name]("sdpa").eval()
    sharpen(fast)
    eager = MODELS[name]("eager").eval()
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
        (
            dict(m._forward_hooks),
            dict(m._forward_pre_hooks),
            dict(m._backward_hooks),
            m.__dict__.get("forward"),
            m.__class__,
        )
        for m in model.modules()
    ]
    return [
        hooks,
        [(k, v.clone()) for k, v in model.state_dict().items()],
        getattr(model.config, "_attn_implementation", None),
    ]


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
        if watched:
            with watch(model) as w:
                model(**inputs)[0].square().mean().backward()
            assert len(w.frame(pandas=False)) == 8
        else:
            model(**inputs)[0].square().mean().backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


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


def test_a_copy_made_while_watched_is_a_plain_copy() -> None:
    model, _ = pair("bert")
    inputs = batch("bert", False)
    with torch.no_grad(), watch(model) as w:
        twin = copy.deepcopy(model)
        for p in twin.parameters():
            p.zero_()
        assert twin(**inputs)[0].abs().max() == 0
        model(**inputs)
    assert all("forward" not in m.__dict__ or not hasattr(m.__dict__["forward"], "around") for m in twin.modules())
    assert len(w.frame(pandas=False)) == 8
