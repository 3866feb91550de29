"""Log-probabilities and entropy of a language model's tokens, with gradients: ours beside those of the field.

Peers that are installed and run on a CPU take part. Three of them give no entropy, and have less to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions

import partita

from .harness import Call, Options, Row, compare
from .peak import measure, memory_row

ROWS, DIM = 2048, 512  # the vocabulary has 64 times as many tokens: 131,072
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TIME_BAR, MEMORY_BAR = 0.8, 0.1

Stats = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]  # hidden, weight, ids: log p and entropy


def ours(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    stats = partita.token_stats(hidden, weight, ids)
    return stats.log_prob, stats.entropy


def dense(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    log_p = F.log_softmax((hidden @ weight.T).float(), -1)
    return log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def torch_chunked(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    options = LinearCrossEntropyOptions(batch_chunk_size=512)  # its own choice here, 4 rows, takes minutes
    return -F.linear_cross_entropy(hidden, weight, ids, reduction="none", options=options), None


def _trl(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    trl: Any = import_module("trl.kernels")  # in the chunks its trainers take
    found = trl.ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, 32768, None, 1.0, ("entropy",))
    return found[0], found[1]


def _liger(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    liger: Any = import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    return liger.LigerFusedLinearPPOBase.chunk_forward(hidden[None], weight, ids[None])[0], None


def _cce(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    cce: Any = import_module("cut_cross_entropy")
    return -cce.linear_cross_entropy(hidden, weight, ids, reduction="none", impl="torch_compile"), None


PEERS: dict[str, tuple[Stats, str]] = {  # name: (function, the package it needs)
    "torch dense": (dense, "torch"),
    "torch chunked, log p alone": (torch_chunked, "torch"),
    "trl chunked": (_trl, "trl"),
    "Liger chunked, log p alone": (_liger, "liger_kernel"),
    "CCE torch_compile, log p alone": (_cce, "cut_cross_entropy"),
}


def _inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, DIM).to(dtype).requires_grad_()
    weight = (torch.randn(64 * rows, DIM) * DIM**-0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(64 * rows, (rows,)), torch.randn(2, rows)


def _step(stats: Stats, hidden: Tensor, weight: Tensor, ids: Tensor, upstream: Tensor) -> Call:
    def run() -> object:
        log_p, entropy = stats(hidden, weight, ids)
        loss = (log_p * upstream[0]).sum()
        return torch.autograd.grad(loss if entropy is None else loss + (entropy * upstream[1]).sum(), (hidden, weight))

    return run


def _probe(stats: Stats, dtype: torch.dtype) -> Callable[[int], Call]:
    return lambda rows: _step(stats, *_inputs(rows, dtype))


PROBES = {  # for benchmarks.peak
    f"{name} {kind}": _probe(stats, dtype)
    for name, (stats, _) in {"partita": (ours, ""), **PEERS}.items()
    for kind, dtype in DTYPES.items()
}


def cases(options: Options) -> Iterator[list[Row]]:
    rows = 16 if options.quick else ROWS
    for kind, dtype in DTYPES.items():
        case = f"log p, H fwd+bwd {kind} N={rows} V=64N D={DIM}"
        peers = {peer: stats for peer, (stats, package) in PEERS.items() if find_spec(package)}
        if options.quick:
            peers = {"torch dense": dense}
        for peer in (peer for peer in peers if options.wants(f"{case} time {peer}")):
            mine, theirs = (_step(stats, *_inputs(rows, dtype)) for stats in (ours, peers[peer]))
            yield compare("tokens", case, mine, {peer: theirs}, options, bars={peer: TIME_BAR}, warmup=1)
        for peer in (peer for peer in peers if options.wants(f"{case} memory {peer}")):
            size, least = (measure("tokens", f"{each} {kind}", rows, options)[0] for each in ("partita", peer))
            # the gradients of hidden states and weight are in everybody's number: what counts is what is beyond them
            size, least = (max(1.0, x - (1 + 64) * rows * DIM * dtype.itemsize) for x in (size, least))
            bar = None if options.quick else MEMORY_BAR
            yield [memory_row(case, peer, size, least, "bytes", bar, "beyond the gradients", "tokens")]
