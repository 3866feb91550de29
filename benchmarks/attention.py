"""Is exact attention with statistics faster than the same attention without them?

Peers: F.scaled_dot_product_attention (flash), eager torch that also computes the entropy, and, where they are
installed, the kernels of runtimes.py and KeOps, which streams as we do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import partita

from .harness import Call, Options, Row, bar_in, compare, in_half
from .runtimes import attention_peers

# (batch, heads, n, dim), causal, bar
FORWARD = [
    ((1, 8, 4096, 64), False, 0.88),
    ((1, 8, 2048, 64), False, 0.88),
    ((1, 8, 4096, 64), True, 0.75),
    ((1, 8, 2048, 64), True, 0.75),
    ((1, 8, 4096, 128), False, 0.92),
    ((1, 8, 4096, 128), True, 0.84),
    ((8, 12, 128, 64), False, 0.90),
    ((2, 12, 512, 64), False, 1.00),
]
# As models pass them: transposed views of (batch, n, heads, dim), whose rows lie heads * dim numbers apart.
TRANSPOSED = ((2, 8, 1024, 64), False, 0.90)
BACKWARD = [((1, 8, 2048, 64), False, 0.90), ((1, 8, 2048, 64), True, 0.75)]
HALF = [
    ((1, 8, 2048, 64), False, 0.85),
    ((1, 8, 2048, 64), True, 0.80),
    ((1, 8, 4096, 128), True, 0.80),
    ((8, 12, 128, 64), False, 0.90),
    ((2, 12, 512, 64), False, 0.90),
]
HALF_BACKWARD = [((1, 8, 2048, 64), False, 0.60), ((1, 8, 2048, 64), True, 0.50), ((1, 8, 4096, 128), True, 0.65)]
HELD = ("SDPA flash, no stats", "zentorch, no stats")  # the others are shown
EAGER_BAR, STATS_BAR = 0.30, 1.05
QUICK = (1, 2, 96, 32)
QUICKLY = [(QUICK, False, 1.0), (QUICK, True, 1.0)]


class _Case(NamedTuple):
    """One problem, and the ratio to a peer that it is held to."""

    shape: tuple[int, ...]
    causal: bool
    bar: float
    transposed: bool = False
    dtype: torch.dtype = torch.float32


def cases(options: Options) -> Iterator[list[Row]]:
    forward, both = ("forward with stats", _forward), ("forward+backward with entropy", _backward)
    plain: dict[str, Any] = {}
    transposed, half = {"transposed": True}, {"dtype": torch.bfloat16}
    for (title, measure), listed, more in (
        (forward, FORWARD, plain), (forward, [TRANSPOSED], transposed), (both, [TRANSPOSED], transposed),
        (both, BACKWARD, plain), (forward, HALF, half), (both, HALF_BACKWARD, half),
    ):  # fmt: skip
        for shape, causal, bar in QUICKLY[: 1 if more else 2] if options.quick else listed:
            case = _Case(shape, causal, bar, **more)
            name = f"{title} {_name(shape, causal)}" + (", transposed views" if case.transposed else "")
            name += in_half(case.dtype)
            if options.wants(name):
                yield measure(name, case, options)
    shape = QUICK if options.quick else (1, 8, 2048, 64)
    name = f"stats on / off {_name(shape, False)}"
    if options.wants(name):
        yield _stats(name, shape, options)
    shape = QUICK if options.quick else (1, 1, 2048, 64)
    name = f"forward with stats {_name(shape, False)}, KeOps"
    if options.wants(name) and importlib.util.find_spec("pykeops"):
        yield _keops(name, shape, options)


def _forward(name: str, case: _Case, options: Options) -> list[Row]:
    shape, causal, bar, transposed, dtype = case
    q, k, v = (_laid(torch.randn(shape).to(dtype), transposed) for _ in range(3))

    def ours() -> object:
        return partita.attention(q, k, v, is_causal=causal, return_stats=True)

    def sdpa() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def eager() -> object:
        return eager_with_entropy(q, k, v, causal)

    peers: dict[str, Call] = {"SDPA flash, no stats": sdpa, "eager with entropy": eager}
    if not transposed:
        peers |= attention_peers(q, k, v, causal)
    held = bar_in(dtype, bar)
    with torch.no_grad():
        return compare(
            "attention",
            name,
            ours,
            peers,
            options,
            bars={} if held is None else {peer: held for peer in peers if peer in HELD},
            flops=_flops(shape, causal),
            dtype=dtype,
        )


def _laid(tensor: Tensor, transposed: bool) -> Tensor:
    """The same numbers, in memory as (batch, n, heads, dim) if asked for."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if transposed else tensor


def _backward(name: str, case: _Case, options: Options) -> list[Row]:
    shape, causal, bar, transposed, dtype = case
    q, k, v = (_laid(torch.randn(shape).to(dtype), transposed).requires_grad_() for _ in range(3))
    weight = _laid(torch.randn(shape).to(dtype), transposed)  # an upstream gradient that is not all ones
    row_weight = torch.randn(shape[:-1])

    def both(out: Tensor, entropy: Tensor) -> object:
        return torch.autograd.grad((out * weight).sum() + (entropy * row_weight).sum(), (q, k, v))

    def ours() -> object:
        out, stats = partita.attention(q, k, v, is_causal=causal, return_stats=True)
        return both(out, stats.entropy)

    def sdpa() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.autograd.grad((out * weight).sum(), (q, k, v))

    def eager() -> object:
        return both(*eager_with_entropy(q, k, v, causal))

    held = bar_in(dtype, bar)
    return compare(
        "attention",
        name,
        ours,
        {"SDPA flash, output alone": sdpa, "eager with entropy": eager},
        options,
        bars={} if held is None else {"SDPA flash, output alone": held, "eager with entropy": EAGER_BAR},
        # two products forward; scores again, dP, dV, dQ, dK backward
        flops=3.5 * _flops(shape, causal),
        dtype=dtype,
    )


def _stats(name: str, shape: tuple[int, ...], options: Options) -> list[Row]:
    q, k, v = (torch.randn(shape) for _ in range(3))
    off: Call = lambda: partita.attention(q, k, v)  # noqa: E731
    on: Call = lambda: partita.attention(q, k, v, return_stats=True)  # noqa: E731
    longer = replace(options, seconds=3 * options.seconds)  # three per cent are to be distinguished
    with torch.no_grad():
        return compare(
            "attention", name, on, {"partita without stats": off}, longer, bars={"partita without stats": STATS_BAR}
        )


def _keops(name: str, shape: tuple[int, ...], options: Options) -> list[Row]:
    from pykeops.torch import LazyTensor  # optional, and importing it looks for compilers

    q, k, v = (torch.randn(shape) for _ in range(3))
    query, key, value = LazyTensor(q[..., :, None, :]), LazyTensor(k[..., None, :, :]), LazyTensor(v[..., None, :, :])

    def keops() -> object:
        return ((query * key).sum(-1) * shape[-1] ** -0.5).sumsoftmaxweight(value, dim=q.dim() - 1)

    def ours() -> object:
        return partita.attention(q, k, v, return_stats=True)

    with torch.no_grad():
        few = replace(options, repeat=min(3, options.repeat), seconds=0.0)  # it takes seconds
        return compare("attention", name, ours, {"KeOps, no stats": keops}, few)


def eager_with_entropy(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """What one writes by hand to get the output and the entropy."""
    score = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        score = score.masked_fill(torch.ones(score.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    log_p = score.log_softmax(-1)
    p = log_p.exp()
    return p @ v, -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)


def _flops(shape: tuple[int, ...], causal: bool) -> float:
    batch, heads, n, dim = shape
    return 4.0 * batch * heads * n * n * dim * (0.5 if causal else 1.0)


def _name(shape: tuple[int, ...], causal: bool) -> str:
    return f"{'x'.join(map(str, shape))}{' causal' if causal else ''}"
