"""One query row against a long key cache with grouped heads: bound by memory bandwidth. Do we at least not lose?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

import partita

from .harness import Options, Row, compare

# query heads, key heads, cached keys, dim, bar
CASES = [(32, 8, 8192, 128, 1.00), (32, 8, 1024, 128, None), (12, 12, 4096, 64, None)]
QUICK = [(4, 2, 128, 32, None)]


def cases(options: Options) -> Iterator[list[Row]]:
    for heads, key_heads, n, dim, bar in QUICK if options.quick else CASES:
        name = f"decode {heads}/{key_heads} heads 1x{n}x{dim}"
        if options.wants(name):
            yield _case(name, heads, key_heads, n, dim, bar, options)


def _case(name: str, heads: int, key_heads: int, n: int, dim: int, bar: float | None, options: Options) -> list[Row]:
    q = torch.randn(1, heads, 1, dim)
    k, v = torch.randn(1, key_heads, n, dim), torch.randn(1, key_heads, n, dim)

    def ours() -> object:
        return partita.attention(q, k, v, enable_gqa=True, return_stats=True)

    def sdpa() -> object:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    # Milliseconds each: more turns cost nothing and the best gets steadier.
    more = replace(options, repeat=options.repeat * (1 if options.quick else 5))
    bars = {} if bar is None else {"SDPA enable_gqa, no stats": bar}
    with torch.no_grad():
        rows = compare("decode", name, ours, {"SDPA enable_gqa, no stats": sdpa}, more, bars=bars)
    bandwidth = 4 * (k.numel() + v.numel()) / rows[0].ours / 1e9
    rows[0].extra["bandwidth_GB_per_s"] = bandwidth
    return rows
