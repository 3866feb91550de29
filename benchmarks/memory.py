"""How much memory beyond the inputs, and how time and memory grow with length.

Each number comes from a process of its own (`peak.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

import partita

from .attention import eager_with_entropy
from .contrastive import ours as info_nce
from .contrastive import two_cross_entropies, two_logsumexps
from .harness import Options, Row
from .peak import MB, measure, memory_row

LONG = 65536  # one head, causal, forward with statistics
LONG_LIMIT = 200 * MB


# ---- what is measured, by name: size -> the work; making the inputs is not part of it ----


def _attention_stats(n: int) -> Callable[[], object]:
    q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))
    return lambda: partita.attention(q, k, v, is_causal=True, return_stats=True)


def _attention_eager(n: int) -> Callable[[], object]:
    q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))
    return lambda: eager_with_entropy(q, k, v, causal=True)


def _attention_sdpa(n: int) -> Callable[[], object]:
    q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _reductions_backward(n: int) -> Callable[[], object]:
    q, k, v = (torch.randn(n, 64, requires_grad=True) for _ in range(3))

    def work() -> object:
        p = partita.Gibbs(q, k, scale=0.125)
        (p.log_partition().sum() + p.entropy().sum() + p.expectation(v).sum()).backward()
        return q.grad, k.grad, v.grad

    return work


def _cross_entropy(n: int, loss: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x = torch.randn(n, 512, requires_grad=True)
    w = (torch.randn(16 * n, 512) * 512**-0.5).requires_grad_()
    target = torch.randint(16 * n, (n,))
    return lambda: loss(x, w, target).backward()


def _contrastive(n: int, loss: Callable[..., torch.Tensor]) -> Callable[[], object]:
    a, b = (F.normalize(torch.randn(n, 256), dim=-1).requires_grad_() for _ in range(2))
    return lambda: loss(a, b).backward()


PROBES: dict[str, Callable[[int], Callable[[], object]]] = {
    "attention": _attention_stats,
    "attention eager": _attention_eager,
    "attention sdpa": _attention_sdpa,
    "reductions backward": _reductions_backward,
    "cross entropy": lambda n: _cross_entropy(n, partita.linear_cross_entropy),
    "cross entropy torch": lambda n: _cross_entropy(n, F.linear_cross_entropy),
    "contrastive": lambda n: _contrastive(n, info_nce),
    "contrastive two cross entropies": lambda n: _contrastive(n, two_cross_entropies),
    "contrastive two logsumexps": lambda n: _contrastive(n, two_logsumexps),
}


# case, ours, peer, size, size in a quick run (0: left out of it), bar
RATIOS = [
    ("linear CE fwd+bwd N={n} V=16N D=512", "cross entropy", "cross entropy torch", 2048, 64, 1 / 6),
    ("symmetric InfoNCE fwd+bwd {n} d=256", "contrastive", "contrastive two cross entropies", 8192, 0, 0.1),
    ("symmetric InfoNCE fwd+bwd {n} d=256", "contrastive", "contrastive two logsumexps", 8192, 0, 0.1),
    ("attention causal with stats n={n} d=64", "attention", "attention eager", 8192, 0, None),
    ("attention causal with stats n={n} d=64", "attention", "attention sdpa", 8192, 0, None),
]
# case, what, size, size in a quick run, limit
LIMITS = [
    ("attention causal with stats n={n} d=64", "attention", LONG, 0, LONG_LIMIT),
    ("log Z + H + E[v] fwd+bwd n={n} d=64", "reductions backward", 16384, 512, 96 * MB),
]


def cases(options: Options) -> Iterator[list[Row]]:
    for case, mine, theirs, full, small, bar in RATIOS:
        n = small if options.quick else full
        name = "memory " + case.format(n=n)
        if n and options.wants(name):
            ours, peer = measure("memory", mine, n, options)[0], measure("memory", theirs, n, options)[0]
            yield [memory_row(name, theirs, ours, peer, "bytes", None if options.quick else bar)]

    for case, probe, full, small, limit in LIMITS:
        n = small if options.quick else full
        name = "memory " + case.format(n=n)
        if n and options.wants(name):
            size, seconds = measure("memory", probe, n, options)
            yield [memory_row(name, f"limit {limit // MB} MB", size, limit, "bytes", 1.0, f"{seconds:.2f} s")]

    if options.wants("growth"):
        yield _growth([256, 512] if options.quick else [4096, 8192, 16384, 32768], options)


def _growth(sizes: list[int], options: Options) -> list[Row]:
    """Exponents fitted on log-log: time should grow as n^2, memory as n."""
    runs = [measure("memory", "attention", n, options, repeat=1 if options.quick else 5) for n in sizes]
    memory, seconds = [size for size, _ in runs], [elapsed for _, elapsed in runs]
    name = f"growth attention causal n={sizes[0]}..{sizes[-1]}"
    return [
        memory_row(
            name, "time as n^2", fitted_exponent(sizes, seconds), 2.0, "exponent", None if options.quick else 1.05
        ),
        memory_row(
            name, "memory as n", fitted_exponent(sizes, memory), 1.0, "exponent", None if options.quick else 1.1
        ),
    ]


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log(value) over log(size), least squares.

    >>> round(fitted_exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    x, y = [math.log(s) for s in sizes], [math.log(max(v, 1e-9)) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
