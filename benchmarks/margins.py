"""The other margin and two distributions at once: what do columns cost, and are we faster than eager torch?

Eager torch also works in chunks of rows, of the size that is best here, found before the comparison; each chunk's
gradients are taken at once, so that no more than a chunk of logits lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import partita

from .harness import Options, Row, compare, interleave

# rows, dim, classes
HEADS, QUICK_HEADS = (1024, 512, 32768), (48, 16, 200)
BARS = {"reverse": 0.8, "js": 1.0}
CHUNKS = (64, 128, 256, 512)


def cases(options: Options) -> Iterator[list[Row]]:
    n, heads = (64, 2) if options.quick else (2048, 8)
    name = f"attention with received and statistics 1x{heads}x{n}x64 causal"
    if options.wants(name):
        yield _received(name, heads, n, options)
    for kind in ("reverse", "js"):
        rows, dim, classes = QUICK_HEADS if options.quick else HEADS
        name = f"{kind} of two heads fwd+bwd N={rows} D={dim} V={classes}"
        if options.wants(name):
            yield _heads(name, kind, rows, dim, classes, options)
    n, heads = (64, 2) if options.quick else (1024, 8)
    name = f"KL of two attentions fwd+bwd 1x{heads}x{n}x64"
    if options.wants(name):
        yield _attentions(name, heads, n, options)


def _received(name: str, heads: int, n: int, options: Options) -> list[Row]:
    q, k, v = (torch.randn(1, heads, n, 64) for _ in range(3))

    def ours() -> object:
        return partita.attention(q, k, v, is_causal=True, return_stats=True, return_received=True)

    peers = {"ours, output alone": lambda: partita.attention(q, k, v, is_causal=True)}
    return compare("margins", name, ours, peers, options, bars=_bars(options, peers, 1.6))


def _bars(options: Options, peers: dict[str, Callable[[], object]], bar: float) -> dict[str, float]:
    return {} if options.quick else dict.fromkeys(peers, bar)


def _dense(kind: str, teacher: Tensor, student: Tensor) -> Tensor:
    """The sum over rows of the divergence, in torch's own functions."""
    a, b = F.log_softmax(teacher, -1), F.log_softmax(student, -1)
    if kind == "reverse":
        return F.kl_div(a, b, log_target=True, reduction="sum")
    if kind == "forward":
        return F.kl_div(b, a, log_target=True, reduction="sum")
    m = torch.logaddexp(a, b) - 0.6931471805599453
    both = (F.kl_div(m, x, log_target=True, reduction="sum") for x in (a, b))
    return 0.5 * sum(both)  # type: ignore[return-value]


def _heads(name: str, kind: str, rows: int, dim: int, classes: int, options: Options) -> list[Row]:
    x, w, y, v = (torch.randn(n, dim) * dim**-0.5 for n in (rows, classes, rows, classes))
    x, w = (4 * x).requires_grad_(), (4 * w).requires_grad_()
    y, v = 4 * y, 4 * v

    def ours() -> object:
        return torch.autograd.grad(partita.linear_distillation_loss(x, w, y, v, kind=kind), (x, w))

    def eager(step: int) -> Callable[[], object]:
        def call() -> object:
            x.grad = w.grad = None
            for i in range(0, rows, step):
                part = slice(i, i + step)
                (_dense(kind, y[part] @ v.T, x[part] @ w.T) / rows).backward()
            return x.grad, w.grad

        return call

    chunked = {f"eager in chunks of {n}": eager(n) for n in CHUNKS if n < rows} or {"eager in chunks of 16": eager(16)}
    trial, _ = interleave(chunked, repeat=2, warmup=1)
    best = min(trial, key=lambda peer: trial[peer].best_s)
    peers = {"eager": eager(rows), best: chunked[best]}
    # logits of both, d input, d weight
    flops = 8.0 * rows * dim * classes
    return compare("margins", name, ours, peers, options, bars=_bars(options, peers, BARS[kind]), flops=flops)


def _attentions(name: str, heads: int, n: int, options: Options) -> list[Row]:
    q, k, a, b = (torch.randn(1, heads, n, 64) for _ in range(4))
    q, k = q.requires_grad_(), k.requires_grad_()

    def ours() -> object:
        return torch.autograd.grad(partita.attention_divergence(q, k, a, b), (q, k))

    def eager() -> object:
        return torch.autograd.grad(_dense("forward", a @ b.mT / 8, q @ k.mT / 8) / (heads * n), (q, k))

    peers = {"eager": eager}
    return compare("margins", name, ours, peers, options, bars=_bars(options, peers, 0.5))
