"""What does a call cost where there is next to nothing to compute? A thousand calls at a time: the clock is coarse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import partita

from .harness import Call, Options, Row, compare

TIMES = 1000


def cases(options: Options) -> Iterator[list[Row]]:
    q, k, v = (torch.randn(1, 1, 1, 64) for _ in range(3))
    graph = [x.clone().requires_grad_() for x in (q, k, v)]
    for name, ours, inputs in (
        ("one query, one key", plain, (q, k, v)),
        ("one query, one key, with stats", with_stats, (q, k, v)),
        ("one query, one key, with a graph", plain, graph),
        ("one query, one key, with a graph and stats", with_stats, graph),
    ):
        if options.wants(name):
            peers = {"SDPA, no stats": many(F.scaled_dot_product_attention, *inputs, options=options)}
            yield compare("call", name, many(ours, *inputs, options=options), peers, options)


def plain(q: Tensor, k: Tensor, v: Tensor) -> object:
    return partita.attention(q, k, v)


def with_stats(q: Tensor, k: Tensor, v: Tensor) -> object:
    return partita.attention(q, k, v, return_stats=True)


def many(attend: Callable[..., object], *inputs: Tensor, options: Options) -> Call:
    times = 10 if options.quick else TIMES

    def run() -> object:
        for _ in range(times):
            out = attend(*inputs)
        return out

    return run
