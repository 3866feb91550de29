"""Start attention at a chosen sharpness: rescale query and key projections, head by head.

For inputs with independent components of variance 1 the scores of a row have, over its keys, the variance

    sigma^2 = m^2 || W_Q^T W_K ||_F^2        m = 1/sqrt(head_dim), or what the layer's policy gives at `length` keys

so one factor on each head's projections puts sigma where it is wanted, whatever initialised them. (M-INF-3, M-INF-4)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from partita._checks import check_positive, check_whole
from partita.errors import ShapeError, ValueRangeError
from partita.nn.attention import MultiheadAttention
from partita.scale import Policy, TargetEntropy

__all__ = ["init_sharpness_"]


def init_sharpness_(
    module: nn.Module, *, entropy: float | None = None, sigma: float | None = None, length: int = 512
) -> nn.Module:
    """Rescale the query and key projections of every attention layer inside, so that it starts as sharp as asked.

        H = log n - sigma^2 / 2        for n = `length` visible keys

    Give the standard deviation of a row's scores (`sigma`), or the entropy in nats that rows of `length` keys should
    start with. Layers are `partita.nn.MultiheadAttention` and torch's; weights keep their directions, the biases of
    queries and keys become 0, and with `qk_norm` the gains of the norms are set instead. Returns the module.

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
        else:  # several heads share the keys: their queries alone are theirs
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
    """In a graph, which has no values while it is made, torch raises the message when it runs."""
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
