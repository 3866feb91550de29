"""Tiny models with random weights, one of each way to make queries and keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="pip install transformers to test partita.control")

TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS}
WIDE = {**SMALL, "intermediate_size": 48}
GROUPED = {**WIDE, "num_key_value_heads": 2}
LATENT = {
    **WIDE, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "kv_lora_rank": 20,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip


class Encoder(nn.Module):
    """Two layers of some attention module between an embedding and nothing."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(99, 64)
        self.layers = nn.ModuleList([make(), make()])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x  # type: ignore[no-any-return]


def hugging_face(kind: str, config: str, /, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**options))


def packed(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Encoder(lambda: nn.MultiheadAttention(64, 4, batch_first=True, **options))


def own(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Encoder(lambda: partita.nn.MultiheadAttention(64, 4, batch_first=True, **options))


FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS}
# each head's scores can be clipped on their own
PER_HEAD: dict[str, Callable[[], Any]] = {
    "torch": packed(),
    "torch-kdim": packed(kdim=64, vdim=64, bias=False),
    "partita": own(),
    "partita-grouped": own(kv_heads=2, rotary=True, scale=partita.scale.LogLength()),
    "bert": hugging_face("BertForMaskedLM", "BertConfig", **WIDE),
    "gpt2": hugging_face("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=4, n_positions=64, **TOKENS),
    "llama": hugging_face("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "falcon-grouped": hugging_face(
        "FalconForCausalLM", "FalconConfig", new_decoder_architecture=True, num_kv_heads=2, **FALCON
    ),
    "falcon-one-key": hugging_face("FalconForCausalLM", "FalconConfig", multi_query=True, **FALCON),
    "neox": hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **WIDE),
    "phi3": hugging_face("Phi3ForCausalLM", "Phi3Config", **GROUPED),
    "modernbert": hugging_face("ModernBertForMaskedLM", "ModernBertConfig", **WIDE, cls_token_id=1, sep_token_id=2),
    "olmo2": hugging_face("Olmo2ForCausalLM", "Olmo2Config", **GROUPED),
    "deepseek-v2": hugging_face("DeepseekV2ForCausalLM", "DeepseekV2Config", **LATENT, q_lora_rank=None),
    "deepseek-v3": hugging_face("DeepseekV3ForCausalLM", "DeepseekV3Config", **LATENT, q_lora_rank=24),
    "whisper": hugging_face(
        "WhisperForConditionalGeneration", "WhisperConfig", d_model=64, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=12, max_target_positions=16, vocab_size=99, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    ),
    "opt": hugging_face("OPTForCausalLM", "OPTConfig", **SMALL, ffn_dim=48, word_embed_proj_dim=64),
}  # fmt: skip
# one gain for all heads of a layer
TOGETHER: dict[str, Callable[[], Any]] = {
    "partita-norm": own(qk_norm=True),
    "qwen3": hugging_face("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=16),
    "gemma3": hugging_face(
        "Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=16, query_pre_attn_scalar=16, sliding_window=4
    ),
}
# something is added to the scores, or bounds them
ADDED: dict[str, Callable[[], Any]] = {
    "bloom": hugging_face("BloomForCausalLM", "BloomConfig", hidden_size=64, n_layer=2, n_head=4, **TOKENS),
    "gemma2": hugging_face(
        "Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=16, query_pre_attn_scalar=16, sliding_window=4
    ),
    "t5": hugging_face(
        "T5ForConditionalGeneration", "T5Config", d_model=64, d_kv=16, d_ff=48, num_layers=2, num_heads=4,
        vocab_size=99, pad_token_id=0, decoder_start_token_id=0,
    ),
}  # fmt: skip
ALL = {**PER_HEAD, **TOGETHER, **ADDED}


def make(
    name: str, dtype: torch.dtype = torch.float64, implementation: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """A model in training mode without dropout whose weights matter, and a batch for it."""
    torch.manual_seed(sum(map(ord, name)))
    model = ALL[name]().to(dtype).train()
    if implementation is not None and hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(implementation)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.dim() >= 2 else parameter.add_(0.1 * torch.randn_like(parameter))
    batch = {"input_ids": torch.randint(3, 99, (3, 12))}
    if name == "whisper":
        batch = {"input_features": torch.randn(3, 8, 24, dtype=dtype), "decoder_input_ids": batch["input_ids"]}
    if name == "t5":
        batch["decoder_input_ids"] = torch.randint(3, 99, (3, 9))
    return model, batch
