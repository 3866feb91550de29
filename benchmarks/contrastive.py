"""The symmetric contrastive (CLIP) loss, forward and backward: does one pass over tiles beat the logits matrix?

Two eager forms are the peers: two cross entropies over one logits matrix, and two logsumexps of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import partita

from .harness import Call, Options, Row, bar_in, compare, in_half

# pairs, dim, dtype, bar
CASES = [
    (8192, 256, torch.float32, 0.60),
    (1024, 256, torch.float32, None),
    (8192, 256, torch.bfloat16, 0.45),
]
QUICK = [(64, 16, torch.float32, None), (64, 16, torch.bfloat16, None)]
TEMPERATURE = 0.07


def cases(options: Options) -> Iterator[list[Row]]:
    for n, dim, dtype, bar in QUICK if options.quick else CASES:
        name = f"symmetric InfoNCE fwd+bwd {n}x{n} d={dim}" + in_half(dtype)
        if options.wants(name):
            yield _case(name, n, dim, dtype, bar_in(dtype, bar), options)


def _case(name: str, n: int, dim: int, dtype: torch.dtype, bar: float | None, options: Options) -> list[Row]:
    a, b = (F.normalize(torch.randn(n, dim), dim=-1).to(dtype).requires_grad_() for _ in range(2))

    def timed(loss: object) -> Call:
        return lambda: torch.autograd.grad(loss(a, b), (a, b))  # type: ignore[operator]

    peers = {"eager two cross entropies": timed(two_cross_entropies), "eager two logsumexps": timed(two_logsumexps)}
    bars = {} if bar is None else dict.fromkeys(peers, bar)
    # scores twice (forward, backward), d a, d b
    return compare("contrastive", name, timed(ours), peers, options, bars=bars, flops=8.0 * n * n * dim, dtype=dtype)


def ours(a: Tensor, b: Tensor) -> Tensor:
    return partita.info_nce_loss(a, b, temperature=TEMPERATURE, normalize=False, symmetric=True)


def two_cross_entropies(a: Tensor, b: Tensor) -> Tensor:
    logits = a @ b.T / TEMPERATURE
    index = torch.arange(len(a))
    return (F.cross_entropy(logits, index) + F.cross_entropy(logits.T, index)) / 2


def two_logsumexps(a: Tensor, b: Tensor) -> Tensor:
    logits = a @ b.T / TEMPERATURE
    positive = logits.diagonal()
    return ((logits.logsumexp(1) - positive).mean() + (logits.logsumexp(0) - positive).mean()) / 2
