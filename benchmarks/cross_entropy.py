"""Cross entropy over a large vocabulary, forward and backward: are we faster than torch, dense and chunked?

torch's chunked form gets the chunk size that is best here, found before the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions

import partita

from .harness import Call, Options, Row, bar_in, compare, in_half, interleave

# rows, dim, classes, dtype, bar
CASES = [
    (2048, 512, 32768, torch.float32, 0.92),
    (512, 256, 8192, torch.float32, None),
    (2048, 512, 32768, torch.bfloat16, 0.75),
]
QUICK = [(64, 16, 200, torch.float32, None), (64, 16, 200, torch.bfloat16, None)]
CHUNKS = (128, 256, 512, 1024)


def cases(options: Options) -> Iterator[list[Row]]:
    for rows, dim, classes, dtype, bar in QUICK if options.quick else CASES:
        name = f"linear CE fwd+bwd N={rows} D={dim} V={classes}" + in_half(dtype)
        if options.wants(name):
            yield _case(name, rows, dim, classes, dtype, bar_in(dtype, bar), options)


def _case(
    name: str, rows: int, dim: int, classes: int, dtype: torch.dtype, bar: float | None, options: Options
) -> list[Row]:
    x = torch.randn(rows, dim).to(dtype).requires_grad_()
    w = (torch.randn(classes, dim) * dim**-0.5).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,))

    def ours() -> object:
        return torch.autograd.grad(partita.linear_cross_entropy(x, w, target), (x, w))

    def torch_call(chunking: LinearCrossEntropyOptions | None) -> Call:
        return lambda: torch.autograd.grad(F.linear_cross_entropy(x, w, target, options=chunking), (x, w))

    chunked = {
        f"torch chunked {n}": torch_call(LinearCrossEntropyOptions(batch_chunk_size=n)) for n in CHUNKS if n < rows
    }
    chunked["torch chunked auto"] = torch_call(LinearCrossEntropyOptions())
    trial, _ = interleave(chunked, repeat=2, warmup=1)
    best = min(trial, key=lambda peer: trial[peer].best_s)
    peers = {"torch dense": torch_call(None), best: chunked[best]}
    # The bar counts against the better of the two, so it holds for both rows.
    bars = {} if bar is None else dict.fromkeys(peers, bar)
    # scores, d input, d weight
    return compare(
        "cross_entropy", name, ours, peers, options, bars=bars, flops=6.0 * rows * dim * classes, dtype=dtype
    )
