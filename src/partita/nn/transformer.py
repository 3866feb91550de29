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
    """What both layers share: the feed-forward part, the norms, where they stand."""

    def __init__(
        self,
        d_model: int,
        dim_feedforward: int,
        dropout: float,
        activation: str | Callable[[Tensor], Tensor],
        layer_norm_eps: float,
        norm_first: bool,
        bias: bool,
        make: dict[str, Any],
        norms: int,
    ):
        super().__init__()
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, **make)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **make)
        self.norm_first = norm_first
        for i in range(1, norms + 1):
            setattr(self, f"norm{i}", nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **make))
            setattr(self, f"dropout{i}", nn.Dropout(dropout))
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

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
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(d_model, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias, make, 2)
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout, bias=bias, batch_first=batch_first, scale=scale, **make, **options
        )

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
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(d_model, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias, make, 3)
        both: dict[str, Any] = {"bias": bias, "batch_first": batch_first, "scale": scale, **make, **options}
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, **both)
        self.multihead_attn = MultiheadAttention(d_model, nhead, dropout, **both)

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
