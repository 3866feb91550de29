"""Encoder and decoder layers with torch's constructor and parameter names, and their initial sharpness.

pre-norm    x + f(norm(x))              post-norm    norm(x + f(x))              f: attention, then feed-forward

For inputs with independent components of variance 1 the scores of a row have, over its keys, the variance

    sigma^2 = m^2 || W_Q^T W_K ||_F^2        m = 1/sqrt(head_dim), or what the layer's policy gives at `length` keys

so one factor on each head's projections sets sigma, whatever initialised them. (M-INF-3, M-INF-4)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita._checks import check_positive, check_whole
from partita.attn.problem import check_dropout
from partita.errors import ShapeError, ValueRangeError
from partita.nn.attention import MultiheadAttention
from partita.scale import Policy, TargetEntropy

__all__ = ["TransformerDecoderLayer", "TransformerEncoderLayer", "init_sharpness_"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class _Layer(nn.Module):
    """Shared by both layers: torch's constructor, the feed-forward part, the norms and their order."""

    attentions: tuple[str, ...]  # their names, in the order of their calls

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
        for name, size in (("d_model", d_model), ("nhead", nhead), ("dim_feedforward", dim_feedforward)):
            check_whole(name, size, least=1)
        check_dropout(dropout)
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise ValueRangeError(f"activation must be {' or '.join(_ACTIVATIONS)}, or a function; got {activation!r}.")
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

    def _attend(
        self, x: Tensor, part: int, memory: Tensor | None, padding: Tensor | None, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """x and its attention over memory, or over itself."""

        def attend(x: Tensor) -> Tensor:
            keys = x if memory is None else memory
            out: Tensor = getattr(self, self.attentions[part - 1])(x, keys, keys, padding, False, mask, **options)[0]
            return out

        return self._add(x, part, attend)

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
        x = self._attend(src, 1, None, src_key_padding_mask, src_mask, is_causal=is_causal, **options)
        return self._add(x, 2, self._feed_forward)


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
        x = self._attend(tgt, 1, None, tgt_key_padding_mask, tgt_mask, is_causal=tgt_is_causal)
        x = self._attend(x, 2, memory, memory_key_padding_mask, memory_mask, is_causal=memory_is_causal)
        return self._add(x, 3, self._feed_forward)


# ---- sharpness -------------------------------------------------------------------------------------------------------


def init_sharpness_(
    module: nn.Module, *, entropy: float | None = None, sigma: float | None = None, length: int = 512
) -> nn.Module:
    """Rescale the query and key projections of every attention layer inside to an initial sharpness.

        H = log n - sigma^2 / 2        for n = `length` visible keys

    Give the standard deviation of a row's scores (`sigma`), or the initial entropy, in nats, of rows of `length` keys.
    Layers are `partita.nn.MultiheadAttention` and torch's; weights keep their directions, the biases of queries and
    keys become 0, and with `qk_norm` the gains of the norms are set instead. Returns the module.

    >>> layer = init_sharpness_(MultiheadAttention(64, 4, batch_first=True), sigma=0.5)
    >>> x = torch.randn(8, 512, 64, generator=torch.Generator().manual_seed(0))
    >>> _, stats = layer(x, x, x, return_stats=True)
    >>> round((math.log(512) - stats.entropy).mean().item(), 1)  # sigma^2 / 2 = 0.125
    0.1
    """
    if (entropy is None) == (sigma is None):
        raise ValueRangeError(f"give either entropy or sigma; got entropy={entropy} and sigma={sigma}.")
    check_whole("length", length, least=1)
    if entropy is not None:
        check_positive("entropy", entropy, zero=True)
        if entropy > math.log(length):
            raise ValueRangeError(
                f"the entropy of {length} keys is at most log {length} = {math.log(length):.3f}; got {entropy}. "
                f"Give the length that your rows start with, length=n."
            )
        sigma = math.sqrt(2 * (math.log(length) - entropy))
    assert sigma is not None
    check_positive("sigma", sigma, zero=True)
    layers = [m for m in module.modules() if isinstance(m, (MultiheadAttention, nn.MultiheadAttention))]
    if not layers:
        raise ShapeError(
            f"module must hold a MultiheadAttention of partita.nn or torch.nn, whose projections are known; "
            f"got {type(module).__name__}."
        )
    with torch.no_grad():
        for layer in layers:
            _rescale(layer, sigma, length)
    return module


def _rescale(layer: MultiheadAttention | nn.MultiheadAttention, sigma: float, length: int) -> None:
    heads, dim = layer.num_heads, layer.head_dim
    kv_heads = layer.kv_heads if isinstance(layer, MultiheadAttention) else heads
    wanted = sigma / _multiplier(layer, length, heads, dim)  # (heads,): of the products <query, key> themselves
    if layer.in_proj_bias is not None:
        layer.in_proj_bias[: (heads + kv_heads) * dim].zero_()
    if isinstance(layer, MultiheadAttention) and layer.q_norm is not None and layer.k_norm is not None:
        # normed vectors have products of deviation sqrt(dim): the gains do the rest, one for all heads
        gain = (wanted.mean().double() / math.sqrt(dim)).sqrt()
        layer.q_norm.weight.fill_(gain)
        layer.k_norm.weight.fill_(gain)
        return
    query, key = _weights(layer, heads * dim, kv_heads * dim)
    keys = key.chunk(kv_heads)
    for head, q in enumerate(query.chunk(heads)):
        k = keys[head * kv_heads // heads]
        found = ((q @ q.mT) * (k @ k.mT)).sum().clamp(min=0.0).sqrt()  # || q^T k ||_F
        _require(found > 0, "a head's query or key weights are all zero; initialise them before rescaling.")
        factor = wanted[head].to(q) / found
        if kv_heads == heads:
            q.mul_(factor.sqrt())
            k.mul_(factor.sqrt())
        else:  # several heads share the keys
            q.mul_(factor)


def _multiplier(layer: nn.Module, length: int, heads: int, dim: int) -> Tensor:  # (heads,)
    scale = getattr(layer, "scale", None)
    if isinstance(scale, TargetEntropy):
        raise ValueRangeError("TargetEntropy sets the sharpness of every row itself; there is nothing to initialise.")
    if isinstance(scale, Policy):
        scale = scale(length, dim)
    number = torch.as_tensor(dim**-0.5 if scale is None else scale, dtype=torch.float64).detach().reshape(-1).abs()
    _require((number > 0).all(), f"the scale of the layer is 0 at {length} keys, so no weights make it sharper.")
    return number.expand(heads)


def _require(ok: Tensor, message: str) -> None:
    """Raise unless true; a graph raises when it runs."""
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(ok, message)
    elif not bool(ok):
        raise ValueRangeError(message)


def _weights(layer: MultiheadAttention | nn.MultiheadAttention, n_query: int, n_key: int) -> tuple[Tensor, Tensor]:
    if layer.in_proj_weight is not None:
        return layer.in_proj_weight[:n_query], layer.in_proj_weight[n_query : n_query + n_key]
    assert layer.q_proj_weight is not None
    assert layer.k_proj_weight is not None
    return layer.q_proj_weight, layer.k_proj_weight
