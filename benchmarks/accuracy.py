"""Is streaming as exact as plain torch? Errors against float64, ours over those of the plain formula.

error = max |x - x64| / max |x64|, over all entries and several seeds. The rule: at most twice the plain error.
Where both are at the last bit a ratio says little, so errors count from a quarter of the dtype's epsilon up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import partita

from .harness import Options, Row

BAR = 2.0
Outputs = dict[str, Tensor]


def cases(options: Options) -> Iterator[list[Row]]:
    sizes = [(33, 65, 16, 1.0)] if options.quick else [(123, 517, 64, 1.0), (123, 517, 64, 30.0), (256, 4096, 64, 1.0)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n_query, n_key, dim, spread in sizes:
            name = f"{str(dtype)[6:]} {n_query}x{n_key} d={dim} spread={spread:g}"
            if options.wants(name):
                yield _case(name, dtype, n_query, n_key, dim, spread, options)


def _case(
    name: str, dtype: torch.dtype, n_query: int, n_key: int, dim: int, spread: float, options: Options
) -> list[Row]:
    worst: dict[str, tuple[float, float]] = {}
    for seed in range(1 if options.quick else 3):
        generator = torch.Generator().manual_seed(seed)
        query = (torch.randn(n_query, dim, generator=generator) * spread**0.5).to(dtype)
        key = (torch.randn(n_key, dim, generator=generator) * spread**0.5).to(dtype)
        value = torch.randn(n_key, dim, generator=generator).to(dtype)
        target = torch.randint(n_key, (n_query,), generator=generator)

        def run(
            function: Callable[..., Outputs], at: torch.dtype, inputs=(query, key, value), target=target
        ) -> Outputs:
            return function(*(x.to(at).requires_grad_() for x in inputs), target)

        exact = run(plain, torch.float64)
        ours, theirs = run(streamed, dtype), run(plain, dtype)
        for quantity, truth in exact.items():
            floor = torch.finfo(ours[quantity].dtype).eps / 4
            mine, plains = (max(error(x[quantity], truth), floor) for x in (ours, theirs))
            before = worst.get(quantity, (0.0, 0.0))
            worst[quantity] = max(before[0], mine), max(before[1], plains)
    load = round(os.getloadavg()[0], 2)
    return [
        Row("accuracy", name, f"plain torch: {quantity}", mine, plains, "error", bar=BAR, load=load)
        for quantity, (mine, plains) in worst.items()
    ]


def streamed(query: Tensor, key: Tensor, value: Tensor, target: Tensor) -> Outputs:
    p = partita.Gibbs(query, key, scale=query.shape[-1] ** -0.5)
    outputs = {
        "log_partition": p.log_partition(),
        "entropy": p.entropy(),
        "expectation": p.expectation(value),
        "nll": p.nll(target),
    }
    return _with_gradients(outputs, query, key, value)


def plain(query: Tensor, key: Tensor, value: Tensor, target: Tensor) -> Outputs:
    """The textbook lines, in the dtype of the inputs; this is also the oracle, in float64."""
    score = query @ key.mT * query.shape[-1] ** -0.5
    log_p = score.log_softmax(-1)
    p = log_p.exp()
    outputs = {
        "log_partition": score.logsumexp(-1),
        "entropy": -(p * log_p).sum(-1),
        "expectation": p @ value,
        "nll": F.nll_loss(log_p, target, reduction="none"),
    }
    return _with_gradients(outputs, query, key, value)


def _with_gradients(outputs: Outputs, *inputs: Tensor) -> Outputs:
    total = sum(x.square().sum() for x in outputs.values())
    gradients = torch.autograd.grad(total, inputs)  # type: ignore[arg-type]
    named = zip(("grad query", "grad key", "grad value"), gradients, strict=True)
    return {name: x.detach() for name, x in [*outputs.items(), *named]}


def error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).abs().max() / truth.abs().max())
