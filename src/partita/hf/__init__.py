"""Hugging Face: any model runs on partita's attention, and any language model trains without logits.

partita.hf.register()
model = AutoModel.from_pretrained(..., attn_implementation="partita")
partita.hf.logit_free(model)
"""

from __future__ import annotations

from partita.hf.attention import register, set_scale
from partita.hf.logit_free import logit_free, logits_again
from partita.hf.positions import set_positions
from partita.hf.token_log import token_log_callback

__all__ = ["logit_free", "logits_again", "register", "set_positions", "set_scale", "token_log_callback"]
