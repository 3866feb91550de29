"""Models of every attention entry point, each as (model, inputs), to be watched compiled and uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita import hf, support
from partita import scale as scales


class Attention(nn.Module):
    """Causal self-attention of two heads."""

    def __init__(self, width: int = 16, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(width, 3 * width), causal

    def heads(self, x: Tensor) -> Any:
        return (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


def small() -> Attention:
    return Attention(8, causal=False)


class HandAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class OwnAttention(Attention):
    def __init__(self, scale: Any = None, **options: Any) -> None:
        super().__init__()
        self.scale, self.options = scale, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return partita.attention(q, k, v, scale=self.scale, **self.options).transpose(1, 2).flatten(2)


class Receiving(OwnAttention):
    """It uses what each key receives."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        with torch.no_grad():  # its gradients are not traced
            mass = partita.Gibbs(q, k, scale=q.shape[-1] ** -0.5).received().mean()
        out = partita.attention(q, k, v, scale=self.scale, **self.options) + mass
        return out.transpose(1, 2).flatten(2)


class Core(nn.Module):
    """Attention without weights: it is given its queries and keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Outer(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        mask = ~hidden[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        out: Tensor = self.core(*self.heads(x), mask)
        return out.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Tokens -> the loss of the next ones."""

    def __init__(self, attention: Callable[[], nn.Module], linear: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.layers = nn.ModuleList(attention() for _ in range(2))
        self.norm, self.head, self.linear = nn.LayerNorm(16), nn.Linear(16, 23, bias=False), linear

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        if self.linear:
            loss = partita.linear_cross_entropy(x, self.head.weight, ids, shift=1)
            assert isinstance(loss, Tensor)
            return loss
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Shared(nn.Module):
    """One module, called three times, and attention with another name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mix = Attention(), Mix()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.attention(x)
        out: Tensor = self.mix(x)
        return out


class Mix(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout((x @ x.mT).softmax(-1), 0.0) @ x


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x.roll(1, 0).flip(1), x, key_padding_mask=hidden, need_weights=False)[0]
        return out


def hugging_face(name: str, how: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    hf.register()
    sizes: dict[str, Any] = {
        "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
        "pad_token_id": 0, "attn_implementation": how,
    }  # fmt: skip
    made: nn.Module = getattr(transformers, name)(getattr(transformers, more.pop("config"))(**sizes | more))
    return made.train()


def llama(how: str) -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
    return hugging_face("LlamaForCausalLM", how, config="LlamaConfig", **sizes), tokens(labels=True)


def bert(how: str) -> tuple[nn.Module, dict[str, Any]]:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hugging_face("BertModel", how, config="BertConfig", **off), tokens()


def tokens(labels: bool = False) -> dict[str, Any]:
    ids = torch.randint(3, 30, (3, 7))
    real = (torch.arange(7) < torch.tensor([[7], [4], [6]])).long()
    return {"input_ids": ids, "attention_mask": real} | ({"labels": ids} if labels else {})


def encoder(training: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=training)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)


def ids() -> dict[str, Any]:
    return {"ids": torch.randint(23, (3, 9))}


def rows() -> dict[str, Any]:
    return {"x": torch.randn(3, 9, 16)}


PADDED = torch.arange(9) >= torch.tensor([[9], [5], [7]])
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "sdpa": lambda: (GPT(Attention), ids()),
    "by hand": lambda: (GPT(HandAttention), ids()),
    "log length": lambda: (GPT(lambda: OwnAttention(scales.LogLength(64), is_causal=True), linear=True), ids()),
    "window": lambda: (GPT(lambda: OwnAttention(support=support.window(3, 0), softcap=5.0)), ids()),
    "partita's module": lambda: (partita.nn.MultiheadAttention(16, 2), rows_twice()),
    "received": lambda: (GPT(lambda: Receiving(is_causal=True)), ids()),
    "core, padded": lambda: (Outer(), rows() | {"hidden": PADDED}),
    "encoder": lambda: (encoder(True), {"src": torch.randn(3, 9, 16)}),
    "encoder, padded": lambda: (encoder(True), {"src": torch.randn(3, 9, 16), "src_key_padding_mask": PADDED}),
    "cross": lambda: (Cross(), rows() | {"hidden": PADDED}),
    "shared": lambda: (Shared(), rows()),
    "Llama, sdpa": lambda: llama("sdpa"),
    "Llama, eager": lambda: llama("eager"),
    "Llama, partita": lambda: llama("partita"),
    "BERT, sdpa": lambda: bert("sdpa"),
    "BERT, eager": lambda: bert("eager"),
}


def rows_twice() -> dict[str, Any]:
    x = torch.randn(3, 9, 16)
    return {"query": x, "key": x, "value": x, "need_weights": False}
