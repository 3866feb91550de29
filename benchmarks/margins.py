"""Attention received per key, and divergences: what do columns cost, and are we faster than eager torch?

Eager torch also works in chunks of rows, of the size that is best here, found before the comparison; each chunk's
gradients are taken at once, so that no more than a chunk of logits lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import partita

from .harness import Call, Options, Row, compare, interleave
from .memory import fitted_exponent
from .peak import measure, memory_row

# rows, dim, classes
HEADS, QUICK_HEADS = (1024, 512, 32768), (48, 16, 200)
BARS = {"reverse": 0.8, "js": 1.0}
CHUNKS = (64, 128, 256, 512)


def cases(options: Options) -> Iterator[list[Row]]:
    yield from _times(options)
    yield from _memory(options)


def _times(options: Options) -> Iterator[list[Row]]:
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


def _attended(heads: int, n: int, received: bool) -> Call:
    q, k, v = (torch.randn(1, heads, n, 64) for _ in range(3))
    if not received:
        return lambda: partita.attention(q, k, v, is_causal=True)

    def both() -> object:
        p = partita.Gibbs(q, k, scale=q.shape[-1] ** -0.5, support=partita.support.causal())
        return p.expectation(v), p.stats(), p.received()

    return both


def _received(name: str, heads: int, n: int, options: Options) -> list[Row]:
    peers = {"ours, output alone": _attended(heads, n, False)}
    return compare("margins", name, _attended(heads, n, True), peers, options, bars=_bars(options, peers, 1.6))


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


def _two_heads(kind: str, rows: int, dim: int, classes: int) -> tuple[Call, Callable[[int], Call]]:
    """Loss and gradients of the student's input and weight, by us and by torch's functions in chunks of rows."""
    x, w, y, v = (torch.randn(n, dim) * dim**-0.5 for n in (rows, classes, rows, classes))
    x, w = (4 * x).requires_grad_(), (4 * w).requires_grad_()
    y, v = 4 * y, 4 * v

    def ours() -> object:
        return torch.autograd.grad(partita.linear_distillation_loss(x, w, y, v, kind=kind), (x, w))

    def eager(step: int) -> Call:
        def call() -> object:
            x.grad = w.grad = None
            for i in range(0, rows, step):
                part = slice(i, i + step)
                (_dense(kind, y[part] @ v.T, x[part] @ w.T) / rows).backward()
            return x.grad, w.grad

        return call

    return ours, eager


def _heads(name: str, kind: str, rows: int, dim: int, classes: int, options: Options) -> list[Row]:
    ours, eager = _two_heads(kind, rows, dim, classes)
    chunked = {f"eager in chunks of {n}": eager(n) for n in CHUNKS if n < rows} or {"eager in chunks of 16": eager(16)}
    trial, _ = interleave(chunked, repeat=2, warmup=1)
    best = min(trial, key=lambda peer: trial[peer].best_s)
    peers = {"eager": eager(rows), best: chunked[best]}
    # logits of both, d input, d weight
    flops = 8.0 * rows * dim * classes
    return compare("margins", name, ours, peers, options, bars=_bars(options, peers, BARS[kind]), flops=flops)


def _two_attentions(heads: int, n: int) -> tuple[Call, Call]:
    q, k, a, b = (torch.randn(1, heads, n, 64) for _ in range(4))
    q, k = q.requires_grad_(), k.requires_grad_()

    def ours() -> object:
        return torch.autograd.grad(partita.attention_divergence(q, k, a, b), (q, k))

    def eager() -> object:
        return torch.autograd.grad(_dense("forward", a @ b.mT / 8, q @ k.mT / 8) / (heads * n), (q, k))

    return ours, eager


def _attentions(name: str, heads: int, n: int, options: Options) -> list[Row]:
    ours, eager = _two_attentions(heads, n)
    peers = {"eager": eager}
    return compare("margins", name, ours, peers, options, bars=_bars(options, peers, 0.5))


# ---- peak memory, each in a process of its own: size -> the work ----------------------------------------------------


def _heads_of(kind: str, n: int, eager: bool) -> Call:
    """`n` rows against 32 n classes, 512 features from 1024 rows on: the shape of the times at n = 1024."""
    ours, chunks = _two_heads(kind, n, n // 2, 32 * n)
    return chunks(n) if eager else ours


PROBES: dict[str, Callable[[int], Call]] = {
    "received": lambda n: _attended(8, n, True),
    "attention": lambda n: _attended(8, n, False),
    "reverse": lambda n: _heads_of("reverse", n, False),
    "reverse eager": lambda n: _heads_of("reverse", n, True),
    "js": lambda n: _heads_of("js", n, False),
    "js eager": lambda n: _heads_of("js", n, True),
    "attentions": lambda n: _two_attentions(8, n)[0],
    "attentions eager": lambda n: _two_attentions(8, n)[1],
}


def _memory(options: Options) -> Iterator[list[Row]]:
    def row(name: str, peer: str, ours: float, theirs: float, unit: str, bar: float | None) -> Row:
        return memory_row(name, peer, ours, theirs, unit, None if options.quick else bar, question="margins")

    n = 64 if options.quick else HEADS[0]
    for kind in ("reverse", "js"):
        name = f"memory {kind} of two heads fwd+bwd N={n} D={n // 2} V={32 * n}"
        if options.wants(name):
            ours, eager = (measure("margins", probe, n, options)[0] for probe in (kind, f"{kind} eager"))
            yield [row(name, "eager", ours, eager, "bytes", 0.1)]
    for what, probe, n in (("KL of two attentions", "attentions", 1024), ("attention with received", "received", 2048)):
        sizes = [64, 128] if options.quick else [n, 2 * n, 4 * n, 8 * n]
        name = f"memory {what} 1x8x{sizes[0]}..{sizes[-1]}x64"
        if options.wants(name):
            taken = [measure("margins", probe, n, options)[0] for n in sizes]
            yield [row(name, "memory as n", fitted_exponent(sizes, taken), 1.0, "exponent", 1.1)]
