"""Random calls for the native kernels: any shape, stride, dtype, support and option, from a seed."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from partita.engine.terms import Term

from .dense import Case

SIZES = (1, 2, 3, 5, 7, 13, 14, 15, 16, 17, 31, 33, 64, 65, 100)
LONG = (130, 257, 449, 513, 700)
DIMS = (1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 64, 100)


def layout(x: Tensor, rng: random.Random) -> Tensor:
    """The same numbers with other strides."""
    kind = rng.randrange(5)
    if kind == 0 and x.dim() > 2:
        return x.transpose(0, -2).contiguous().transpose(0, -2)
    if kind == 1:
        room = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype)
        room[..., 1 : 1 + x.shape[-1]] = x
        return room[..., 1 : 1 + x.shape[-1]]
    if kind == 2:
        return x.mT.contiguous().mT
    return x


def random_case(seed: int, dtype: torch.dtype | None = None) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = dtype or rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    full = rng.choice(((), (1,), (3,), (2, 3), (2, 1, 3)))
    pick = lambda: rng.choice(LONG if rng.random() < 0.2 else SIZES)  # noqa: E731
    n_query, n_key = pick(), pick()
    if rng.random() < 0.04:
        n_query = 0
    if rng.random() < 0.04:
        n_key = 0
    dim = rng.choice(DIMS) if rng.random() > 0.03 else 500
    dim_value = rng.choice(DIMS)

    def some(broadcast: float = 0.35) -> tuple[int, ...]:
        return tuple(1 if rng.random() < broadcast else size for size in full)

    def grouped() -> tuple[int, ...]:
        return (*full[:-1], 1) if full and rng.random() < 0.3 else some(0.2)

    spread = rng.choice((0.5, 1.0, 3.0)) / dim**0.5
    query = layout((torch.randn(*some(0.1), n_query, dim)).to(dtype), rng)
    shared = grouped()
    key = layout(torch.randn(*shared, n_key, dim).to(dtype), rng)
    value = None
    if rng.random() < 0.75:
        value = layout(torch.randn(*(shared if rng.random() < 0.8 else some()), n_key, dim_value).to(dtype), rng)
    per_row = rng.random() < 0.5
    scale = (spread * (0.5 + torch.rand(*some(), n_query if per_row else 1))).to(acc)
    bias = None
    if rng.random() < 0.35:
        shape = (n_query if rng.random() < 0.6 else 1, n_key if rng.random() < 0.7 else 1)
        bias = torch.randn(*some(), *shape).to(rng.choice((acc, dtype)))
        if rng.random() < 0.5:
            bias = bias.masked_fill(torch.rand(bias.shape) < 0.2, float("-inf"))
    target = torch.randint(0, n_key, (*some(0.2), n_query)) if n_key and rng.random() < 0.4 else None
    softcap = rng.choice((0.5, 2.0, 30.0)) if rng.random() < 0.2 else None
    return Case(query, key, value, scale, bias, target, random_terms(rng, some, n_query, n_key), softcap)


def random_terms(rng: random.Random, some: object, n_query: int, n_key: int) -> tuple[Term, ...]:
    if rng.random() < 0.3:
        return ()
    start = stop = query_segment = key_segment = mask = None
    batch = some()  # type: ignore[operator]
    kind = rng.randrange(6)
    rows = torch.arange(n_query, dtype=torch.int32).expand(*batch, n_query)
    if kind in (0, 4):  # causal
        stop = rows + 1
    elif kind == 1:  # window
        start, stop = (rows - rng.randrange(9)).clamp(min=0), (rows + 1 + rng.randrange(9)).clamp(max=max(n_key, 1))
    elif kind == 2:  # lengths, some of them 0
        stop = torch.randint(0, n_key + 1, (*batch, 1), dtype=torch.int32).expand(*batch, n_query)
    if rng.random() < 0.25:
        count = rng.choice((2, 4))
        query_segment = torch.randint(0, count, (*some(), n_query), dtype=torch.int32)  # type: ignore[operator]
        key_segment = torch.randint(0, count, (*some(), n_key), dtype=torch.int32)  # type: ignore[operator]
        if rng.random() < 0.6:
            query_segment, key_segment = query_segment.sort(-1).values, key_segment.sort(-1).values
    if rng.random() < 0.25:
        shape = (n_query if rng.random() < 0.7 else 1, n_key if rng.random() < 0.8 else 1)
        mask = torch.rand(*some(), *shape) < rng.choice((0.1, 0.7))  # type: ignore[operator]
        if rng.random() < 0.3:
            mask = mask.mT.contiguous().mT
    skip = rows + rng.choice((0, 0, -2, 3)) if rng.random() < 0.2 else None
    return (Term(start, stop, query_segment, key_segment, mask, skip),)
