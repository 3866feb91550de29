"""Encoder and decoder layers with torch's constructor and parameter names, thin enough for studies.

pre-norm    x + f(norm(x))              post-norm    norm(x + f(x))              f: attention, then feed-forward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.nn.attention import MultiheadAttention
from partita.scale import Policy

__all__ = ["TransformerDecoderLayer", "TransformerEncoderLayer"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class _Layer(nn.Module):
    """What both layers share: torch's constructor, the feed-forward part, the norms and where they stand."""

    attentions: tuple[str, ...]  # their names, in the order in which they look

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale: float | Policy | None = None,
        **options: Any,
    ):
        super().__init__()
        make: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.linear1 = nn.Linear(d_model, dim_feedforward, **make)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **make)
        self.norm_first = norm_first
        for i in range(1, len(self.attentions) + 2):
            setattr(self, f"norm{i}", nn.LayerNorm(d_model, eps=layer_norm_eps, **make))
            setattr(self, f"dropout{i}", nn.Dropout(dropout))
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        options = {"batch_first": batch_first, "scale": scale, **make, **options}
        for name in self.attentions:
            setattr(self, name, MultiheadAttention(d_model, nhead, dropout, **options))

    def _add(self, x: Tensor, part: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        norm, dropout = getattr(self, f"norm{part}"), getattr(self, f"dropout{part}")
        out: Tensor = x + dropout(function(norm(x))) if self.norm_first else norm(x + dropout(function(x)))
        return out

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return out


class TransformerEncoderLayer(_Layer):
    """torch.nn.TransformerEncoderLayer on partita; state dicts load both ways.

    scale and the further options are those of `partita.nn.MultiheadAttention`.
    """

    attentions = ("self_attn",)
    self_attn: MultiheadAttention

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """As torch's; further options (support, attn_bias) go to the attention."""

        def look(x: Tensor) -> Tensor:
            return self.self_attn(  # type: ignore[no-any-return]
                x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal, **options
            )[0]

        return self._add(self._add(src, 1, look), 2, self._feed_forward)


class TransformerDecoderLayer(_Layer):
    """torch.nn.TransformerDecoderLayer on partita; state dicts load both ways. One scale serves both attentions."""

    attentions = ("self_attn", "multihead_attn")
    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        def look(x: Tensor) -> Tensor:
            return self.self_attn(  # type: ignore[no-any-return]
                x, x, x, tgt_key_padding_mask, False, tgt_mask, is_causal=tgt_is_causal
            )[0]

        def cross(x: Tensor) -> Tensor:
            return self.multihead_attn(  # type: ignore[no-any-return]
                x, memory, memory, memory_key_padding_mask, False, memory_mask, is_causal=memory_is_causal
            )[0]

        return self._add(self._add(self._add(tgt, 1, look), 2, cross), 3, self._feed_forward)
