"""One graph serves every length, where that took care.

`part is None` of a slice whose end is a size makes that size a constant of the graph, and a slice that the backward
pass needs is kept by inductor with the strides of the first length (seen with torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from partita import Gibbs, attention, attn, scale, support
from tests import surface

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler

LENGTHS = ((11, 13), (15, 17), (8, 31))


def operands(n_query: int, n_key: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(n_key)
    shapes = ((2, n_query, 4), (2, n_key, 4), (2, n_key, 3), (2, n_query))
    return [torch.randn(3, *shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def pairs(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
    return attn.pair_attention(q, k, v, attn.ScaleInvariant())


def masked_pairs(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
    seen = support.causal("bottom-right") | support.window(3, 0)
    return attn.pair_attention(q, k, v, attn.ScaleInvariant(), support=seen, scale=scale.LogLength(16), sink=sink)


def received(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
    bias = attn.ALiBi(torch.tensor([0.5, 0.25], dtype=torch.float64))
    p = Gibbs(q, k, support=support.causal())
    return attention(q, k, v, bias=bias, is_causal=True, sink=sink), p.received(1 - p.state().sink_mass(sink))


def running(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
    return attn.linear_attention(k, k + 1, v, is_causal=True, chunk=4)


CALLS = [(pairs, "inductor"), (running, "inductor"), (masked_pairs, "aot_eager"), (received, "aot_eager")]


@pytest.mark.parametrize(("call", "backend"), CALLS, ids=lambda x: getattr(x, "__name__", x))
def test_one_compilation_serves_several_lengths(
    call: Callable[..., Any], backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for n_query, n_key in LENGTHS:
        leaves = operands(n_query, n_key)
        with torch._dynamo.config.patch(error_on_recompile=(n_query, n_key) != LENGTHS[0]):
            got = compiled(*leaves)
        for one, other in zip(_and_gradients(got, leaves), _and_gradients(call(*leaves), leaves), strict=True):
            torch.testing.assert_close(one, other)


def _and_gradients(found: Any, leaves: list[Tensor]) -> list[Tensor]:
    out = list(surface.tensors(found))
    total = torch.stack([x.double().square().sum() for x in out if x.requires_grad]).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [x.detach() for x in (*out, *grads) if x is not None]
