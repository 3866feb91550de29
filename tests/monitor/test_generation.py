"""Text generated token by token: every softmax is observed, and nothing is complained about."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from partita.monitor import watch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

NEW = 64
TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
GROUPED = {**PLAIN, "num_key_value_heads": 2, "head_dim": 4}
TWO = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}


def of(name: str, kind: str, **config: Any) -> Callable[[], Any]:
    def make() -> Any:
        return getattr(transformers, f"{name}For{kind}")(getattr(transformers, f"{name}Config")(**config))

    return make


LM, TEXT = "CausalLM", "ConditionalGeneration"
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=4, n_positions=128, **TOKENS)
    ),
    "llama": of("Llama", LM, **GROUPED, **TOKENS),
    "mistral": of("Mistral", LM, **GROUPED, **TOKENS, sliding_window=5),
    "gemma2": of("Gemma2", LM, **GROUPED, **TOKENS, attn_logit_softcapping=2.0, sliding_window=4),
    "qwen3": of("Qwen3", LM, **GROUPED, **TOKENS),
    "bloom": of("Bloom", LM, hidden_size=16, n_layer=1, n_head=4, **TOKENS),
    "t5": of(
        "T5", TEXT, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, vocab_size=99, pad_token_id=0,
        decoder_start_token_id=0,
    ),
    "bart": of(
        "Bart", TEXT, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=128,
        decoder_start_token_id=2, **TWO, **TOKENS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_is_observed_without_a_complaint(name: str, cached: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    ids = torch.randint(3, 99, (2, 6))
    mask = torch.ones_like(ids)
    ids[1, :2] = mask[1, :2] = 0
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "use_cache": cached}
    with caplog.at_level(logging.WARNING, "partita.watch"), torch.no_grad():
        plain = model.generate(ids, attention_mask=mask, **options)
        with watch(model, received=True, critical=True, maps=[(0, 0)]) as w:
            out = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(out, plain)
    assert not [r.getMessage() for r in caplog.records if r.name == "partita.watch"]
    found = w.coverage
    assert not found["missed"] and not found.get("errors") and not found.get("impossible"), str(found)
    assert found["text"] == found["short"]
    decoder = w.record.sites[-1].name if name in ("t5", "bart") else w.record.sites[0].name
    steps = [r for r in w.frame(pandas=False) if r["name"] == decoder and r["head"] == 0]
    assert len(steps) == NEW and all(r["rows"] + r["single"] > 0 for r in steps)
    assert {c["layer"] for c in w.record.curves} == set(range(len(w.record.sites)))
    assert max(c["step"] for c in w.record.curves) >= NEW - 1  # the curves of single queries too
