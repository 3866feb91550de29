"""Who else computes attention and losses on a GPU: a name and a call each, for those that are installed.

Operands are (batch, heads, n, dim) here; flash-attn and Transformer Engine want (batch, n, heads, dim).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # input, weight, target
SDPA = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}


@contextmanager
def _optional(name: str) -> Iterator[None]:
    """What is not installed is left out; what is and does not import, is too, with a word."""
    try:
        yield
    except ModuleNotFoundError:
        pass
    except (ImportError, OSError, AttributeError) as error:
        print(f"{name} is installed and cannot be used: {error}")


def attention(query: Tensor, key: Tensor, causal: bool) -> dict[str, Forward]:
    """Forward functions for operands of this shape; key heads may be fewer than query heads."""
    grouped = query.shape[1] != key.shape[1]
    found: dict[str, Forward] = {name: _sdpa(kind, causal, grouped) for name, kind in SDPA.items()}
    found["flex attention with log Z"] = _flex(query, key, causal, grouped)
    with _optional("flash-attn"):
        found["flash-attn"] = _flash(import_module("flash_attn").flash_attn_func, causal)
    with _optional("flash-attn 3"):
        found["flash-attn 3"] = _flash(import_module("flash_attn_interface").flash_attn_func, causal)
    with _optional("Transformer Engine"):
        engine = import_module("transformer_engine.pytorch")
        found["Transformer Engine"] = _engine(engine, query, key, causal)
    return found


def _sdpa(kind: SDPBackend, causal: bool, grouped: bool) -> Forward:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return call


def _flex(query: Tensor, key: Tensor, causal: bool, grouped: bool) -> Forward:
    function: Any = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
    mask: Any = None
    if causal:
        sizes = (query.shape[2], key.shape[2])
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, *sizes, device=str(query.device))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, aux = function(q, k, v, block_mask=mask, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
        assert aux.lse is not None
        return out

    return call


def _flash(function: Callable[..., Any], causal: bool) -> Forward:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2)

    return call


def _engine(engine: Any, query: Tensor, key: Tensor, causal: bool) -> Forward:
    module = engine.DotProductAttention(
        num_attention_heads=query.shape[1],
        kv_channels=query.shape[-1],
        num_gqa_groups=key.shape[1],
        qkv_format="bshd",
        attn_mask_type="causal" if causal else "no_mask",
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = module(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))  # (batch, n, heads * dim)
        return out.view(*out.shape[:2], q.shape[1], -1).transpose(1, 2)

    return call


def cross_entropy() -> dict[str, Loss]:
    """Mean loss of a linear classifier."""
    found: dict[str, Loss] = {"torch dense": lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y)}
    with _optional("torch chunked"):
        options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        found["torch chunked"] = lambda x, w, y: F.linear_cross_entropy(x, w, y, options=options)  # type: ignore[attr-defined]
    with _optional("Liger"):
        liger = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda x, w, y: liger(w, x, y)
    with _optional("CCE"):
        cce = import_module("cut_cross_entropy").linear_cross_entropy
        found["CCE"] = lambda x, w, y: cce(x, w, y)
    return found


def contrast(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Symmetric InfoNCE as one writes it by hand."""
    logits = (x @ y.mT).float() * scale
    own = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.mT, own)) / 2
