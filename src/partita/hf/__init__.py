"""Hugging Face: any model runs on partita's attention, and any language model trains and scores without logits.

partita.hf.register()
model = AutoModel.from_pretrained(..., attn_implementation="partita")
partita.hf.logit_free(model)
partita.hf.token_stats(model, input_ids, attention_mask).log_prob
"""

from __future__ import annotations

from typing import Any

from partita._later import load
from partita.hf.attention import register, set_scale
from partita.hf.logit_free import logit_free, logits_again, token_log_callback
from partita.hf.positions import set_positions
from partita.hf.scoring import token_stats

__all__ = ["logit_free", "logits_again", "register", "set_positions", "set_scale", "token_log_callback", "token_stats"]


def __getattr__(name: str) -> Any:
    return load(__name__, name, {})
