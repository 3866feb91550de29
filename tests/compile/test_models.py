"""Whole models in one graph: explained, at many lengths, under autocast, checkpointed, exported, on any backend."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partita
from partita import scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it imports its compiler
    from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler


class Block(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.out, self.mlp = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        seen = partita.attention(q, k, v, is_causal=True, scale=scale.LogLength(reference=8))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(F.gelu(x))


class Gpt(nn.Module):
    """Attention that knows its length, and a head without logits."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(23, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out = partita.linear_cross_entropy(x, self.embed.weight, ids, shift=1, z_loss=1e-3)
        assert isinstance(out, Tensor)
        return out


def ids(length: int, batch: int = 3) -> Tensor:
    return torch.randint(23, (batch, length), generator=torch.Generator().manual_seed(length))


def step(run: Any, model: nn.Module, given: Tensor) -> list[Tensor]:
    """A loss and its gradients."""
    model.zero_grad()
    loss = run(given)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_model_is_one_graph_without_a_break():
    found = torch._dynamo.explain(Gpt())(ids(11))
    assert found.graph_count == 1
    assert found.graph_break_count == 0
    assert not found.break_reasons


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_training_step_is_that_of_the_uncompiled_model(checkpointed):
    model = Gpt(checkpointed)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    want = step(model, model, ids(11))
    torch.testing.assert_close(step(compiled, model, ids(11)), want)
    assert len(want) > 10


def test_autocast_lowers_a_graph_as_it_lowers_the_call():
    model = Gpt()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = (step(run, model, ids(11)) for run in (model, compiled))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        # the same bfloat16 products; they are added up in float32, and a sum may round to the next bfloat16
        torch.testing.assert_close(a, b, rtol=2.0**-7, atol=2.0**-7 * float(b.abs().max()))


def test_ten_lengths_compile_at_most_twice():
    model = Gpt()
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counted)
    for length in range(9, 19):
        got, want = step(compiled, model, ids(length)), step(model, model, ids(length))
        torch.testing.assert_close(got, want)
    assert counted.frame_count <= 2  # one for the first length, one for all others


def test_threads_make_no_guard_of_ours():
    """torch.compile asks every graph for the number of threads; ours are compiled as often as torch's own."""
    counts = []
    for function in (partita.attention, F.scaled_dot_product_attention):
        counted = CompileCounter()
        compiled = torch.compile(lambda q, f=function: f(q, q, q), fullgraph=True, backend=counted)
        threads = torch.get_num_threads()
        try:
            for n in (1, 2, 1, 2):
                torch.set_num_threads(n)
                compiled(torch.ones(2, 3, 7, 4))
        finally:
            torch.set_num_threads(threads)
        counts.append(counted.frame_count)
    assert counts[0] == counts[1]


def test_a_graph_made_inside_replace_sdpa_holds_partitas_attention():
    q = torch.randn(2, 3, 7, 4)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), fullgraph=True, backend=keep)
    with partita.replace_sdpa():
        torch.testing.assert_close(compiled(q), partita.attention(q, q, q))
    assert "ops.partita" in graphs[0].code
    torch.testing.assert_close(compiled(q), F.scaled_dot_product_attention(q, q, q))  # afterwards torch's own again
    assert "ops.partita" not in graphs[-1].code


def test_one_more_graph_serves_what_needs_no_gradient():
    """torch.compile asks every graph for its grad mode; after one compilation for each nothing is compiled again."""
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Gpt(), fullgraph=True, backend=counted)
    for _ in range(3):
        compiled(ids(11)).backward()
        with torch.no_grad():
            compiled(ids(11))
    assert counted.frame_count == 2


# ---- what is wrong with values is said when the graph runs -----------------------------------------------------------


def test_values_that_cannot_be_are_named_when_the_graph_runs():
    x, w = torch.randn(5, 4), torch.randn(7, 4)
    loss = torch.compile(lambda y: partita.linear_cross_entropy(x, w, y), fullgraph=True, backend="aot_eager")
    assert loss(torch.full((5,), -100)) == 0
    with pytest.raises(partita.errors.TargetError, match="0 <= target < 7; got values from 9 to 9"):
        loss(torch.full((5,), 9))
    solved = torch.compile(
        lambda b: partita.solve_scale(x, w, entropy=1.0, bias=b), fullgraph=True, backend="aot_eager"
    )
    hidden = torch.zeros(5, 7).index_fill(1, torch.tensor([2]), -torch.inf)
    torch.testing.assert_close(solved(hidden), partita.solve_scale(x, w, entropy=1.0, bias=hidden))
    with pytest.raises(partita.errors.ValueRangeError, match="not monotone"):
        solved(torch.ones(5, 7))
    sharp = torch.compile(lambda s: partita.Gibbs(x, w, scale=s).entropy(), fullgraph=True, backend="aot_eager")
    with pytest.raises(partita.errors.ValueRangeError, match="scale must be finite"):
        sharp(torch.tensor([1.0, torch.nan, 1.0, 1.0, 1.0]))
    layer = partita.nn.MultiheadAttention(8, 2)
    start = torch.compile(lambda: partita.nn.init_sharpness_(layer, sigma=0.5), fullgraph=True, backend="aot_eager")
    start()
    with torch.no_grad():
        layer.in_proj_weight.zero_()
    with pytest.raises(RuntimeError, match="weights are all zero"):
        start()


def test_random_draws_follow_torchs_seed_and_differ_from_call_to_call():
    q = torch.randn(2, 3, 50, 4)
    draw = torch.compile(lambda q: partita.Gibbs(q, q).sample(), fullgraph=True, backend="aot_eager")
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(draw(q))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert drawn[0].shape == (2, 3, 50)
    uniform = draw(torch.zeros(40, 50, 1)).flatten()  # 2000 draws of one of 50 keys: 40 of each, deviation 6.3
    counts = torch.bincount(uniform, minlength=50)
    assert counts.min() > 40 - 6 * 6.3
    assert counts.max() < 40 + 6 * 6.3


# ---- export ----------------------------------------------------------------------------------------------------------

LOAD = """
import sys, torch, partita
program = torch.export.load(sys.argv[1])
given, want = torch.load(sys.argv[2], weights_only=True)
for x, y in zip(given, want):
    torch.testing.assert_close(program.module()(x), y)
print("same")
"""


def test_an_exported_model_is_saved_loaded_and_run_elsewhere(tmp_path):
    model = Gpt().eval()
    length = torch.export.Dim("length", min=3, max=64)  # two tokens leave one target, and a size of 1 is no symbol
    with torch.no_grad():
        program = torch.export.export(model, (ids(11),), dynamic_shapes=({1: length},))
        given = [ids(11), ids(17)]
        want = [model(x) for x in given]
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((given, want), tmp_path / "data.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "model.pt2", tmp_path / "data.pt"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "same", done.stderr
