"""Plain attention in a graph without gradients is one operator; everything else in a graph is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita.engine import backends

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler


def qkv(rows: int = 5, n: int = 9, heads: int = 4, key_heads: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    g = torch.Generator().manual_seed(rows)
    sizes = ((heads, rows, 8), (key_heads, n, 8), (key_heads, n, 6))
    return [torch.randn(2, *size, generator=g, dtype=torch.float64).to(dtype) for size in sizes]


class Kept:
    """A backend that keeps its graphs."""

    def __init__(self) -> None:
        self.code = ""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.code += graph.code
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    @property
    def short(self) -> bool:
        return "partita.attention" in self.code and "partita.reduce" not in self.code


OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"is_causal": True}, {"scale": 0.7}, {"return_stats": True}, {"is_causal": True, "return_stats": True},
)  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_gives_what_the_call_gives(options: dict[str, Any], dynamic: bool) -> None:
    kept = Kept()
    call = torch.compile(lambda q, k, v: partita.attention(q, k, v, **options), fullgraph=True, backend=kept,
                         dynamic=dynamic)  # fmt: skip
    for given in (qkv(), qkv(11, 13)) if dynamic else (qkv(),):
        torch.testing.assert_close(call(*given), partita.attention(*given, **options))
    assert kept.short


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_grouped_queries_in_other_dtypes(dtype: torch.dtype) -> None:
    kept, given = Kept(), qkv(key_heads=2, dtype=dtype)
    call = torch.compile(lambda *x: partita.attention(*x, enable_gqa=True, return_stats=True), fullgraph=True,
                         backend=kept)  # fmt: skip
    got, want = call(*given), partita.attention(*given, enable_gqa=True, return_stats=True)
    torch.testing.assert_close(got, want)
    assert [x.dtype for x in got[1]] == [x.dtype for x in want[1]]
    assert kept.short


def test_heads_that_lie_side_by_side_and_inductor() -> None:
    """Queries as a projection leaves them; inductor relies on the strides of the meta kernel."""
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()]
    want = F.scaled_dot_product_attention(*given).transpose(1, 2).flatten(2)
    for backend in ("aot_eager", "inductor"):
        call = torch.compile(
            lambda *x: partita.attention(*x).transpose(1, 2).flatten(2), fullgraph=True, backend=backend
        )
        torch.testing.assert_close(call(*given), want)


@pytest.mark.parametrize("name", ["dense", "tiled"])
def test_a_named_backend_serves_the_graph_that_there_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, served = backends.TABLE[name], []

    def forward(request: Any) -> Any:
        served.append(name)
        return entry.forward(request)

    monkeypatch.setitem(backends.TABLE, name, backends.Backend(name, entry.why_not, forward, entry.backward))
    kept, given = Kept(), qkv()
    call = torch.compile(lambda *x: partita.attention(*x, return_stats=True), fullgraph=True, backend=kept)
    want = call(*given)
    with torch._dynamo.config.patch(error_on_recompile=True), partita.backend(name):
        torch.testing.assert_close(call(*given), want)
    assert served == [name] and kept.short


def test_who_needs_gradients_gets_the_pass_that_keeps_what_they_need() -> None:
    kept, given = Kept(), [x.requires_grad_() for x in qkv()]
    call = torch.compile(lambda *x: partita.attention(*x), fullgraph=True, backend=kept)
    grads = [torch.autograd.grad(f(*given).square().sum(), given) for f in (call, partita.attention)]
    torch.testing.assert_close(*grads)
    assert "partita.attention" not in kept.code
    with torch.no_grad():
        torch.testing.assert_close(call(*given), partita.attention(*given))
    assert "partita.attention" in kept.code


@pytest.mark.parametrize("statistics", [False, True])
def test_a_program_exported_without_gradients_still_has_them(statistics: bool) -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = partita.attention(q, k, v, is_causal=True, return_stats=statistics)
            return found[0].square().sum() + found[1].entropy.sum() if statistics else found.square().sum()

    given = qkv(dtype=torch.float64)
    with torch.no_grad():
        program = torch.export.export(Model(), tuple(given))
    assert "partita.attention" in program.module().code
    leaves = [x.requires_grad_() for x in given]
    want = torch.autograd.grad(Model()(*leaves), leaves)
    run = program.module()
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(torch.autograd.grad(call(*leaves), leaves), want)


@torch.no_grad()
def test_autocast_and_broadcasting_go_the_long_way() -> None:
    q, k, v = qkv()
    kept = Kept()
    call = torch.compile(partita.attention, fullgraph=True, backend=kept)
    torch.testing.assert_close(call(q, k[:1], v[:1]), partita.attention(q, k[:1], v[:1]))
    with torch.autocast("cpu", torch.bfloat16):
        got, want = call(q, k, v), partita.attention(q, k, v)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
    assert "partita.attention" not in kept.code
