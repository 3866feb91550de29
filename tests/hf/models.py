"""Tiny models with random weights, one of each kind of attention."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="pip install transformers to test partita.hf")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **TOKENS, max_position_embeddings=64))


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **TOKENS))


def gemma2() -> Any:
    """Softcap and alternating windows."""
    config = transformers.Gemma2Config(
        **GROUPED, **TOKENS, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, sliding_window=4
    )
    return transformers.Gemma2ForCausalLM(config)


def mistral() -> Any:
    """A sliding window."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, **TOKENS, sliding_window=5))


def gpt_oss() -> Any:
    """Learned sinks and windows."""
    config = transformers.GptOssConfig(
        **GROUPED, **TOKENS, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    )
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


def t5() -> Any:
    """Position bias, cross attention, no 1/sqrt(dim)."""
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=99, pad_token_id=0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> Any:
    """Cross attention; queries are scaled before the interface."""
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=30, max_target_positions=30,
        vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


DECODERS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2, "llama": llama, "gemma2": gemma2, "mistral": mistral, "gpt-oss": gpt_oss,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {"bert": bert, **DECODERS, "t5": t5, "whisper": whisper}


def make(name: str, implementation: str) -> Any:
    """The model with weights that depend on its name alone."""
    torch.manual_seed(sum(map(ord, name)))
    model = spread(MODELS[name]())
    model.set_attn_implementation(implementation)
    return model


@torch.no_grad()
def spread(model: Any, std: float = 0.2) -> Any:
    """The model, to be evaluated: the usual small weights would make every attention nearly uniform."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(std=std)
    return model.eval()


def tokenizer(*words: str) -> Any:
    """A word, a token; the first of them are special."""
    tokenizers = pytest.importorskip("tokenizers")
    named = {name: f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    vocabulary = [*named.values(), *words]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{name}_token": word for name, word in named.items()}
    )


def inputs(name: str, padding: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch of three with 0, 3 and 7 padded positions, and where the logits of real tokens are."""
    torch.manual_seed(7)
    n = 12
    ids = torch.randint(3, 99, (3, n))
    at = torch.arange(n)
    lengths = torch.tensor([n, n - 3, n - 7])[:, None]
    keep = at < lengths if padding == "right" else at >= n - lengths
    ids = torch.where(keep, ids, 0)
    if name == "whisper":
        return {
            "input_features": torch.randn(3, 8, 60),
            "decoder_input_ids": ids,
            "decoder_attention_mask": keep.long(),
        }, keep
    if name == "t5":
        decoder = torch.randint(3, 99, (3, 6))
        there = torch.ones(3, 6, dtype=torch.bool)
        return {"input_ids": ids, "attention_mask": keep.long(), "decoder_input_ids": decoder}, there
    return {"input_ids": ids, "attention_mask": keep.long()}, keep
